"""Names at the places where code written for RLightning looks for them; nothing is made here."""
