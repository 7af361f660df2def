"""Foreign formats that the episodes of a store are written to, one module each."""
