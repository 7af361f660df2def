"""Types of options that several commands take."""

from __future__ import annotations

import click


class Count(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A whole number, 0 or more."""

    name = "n"

    def convert(
        self, value: object, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        """The number; click turns what is none into a usage error."""
        text = str(value)
        if not (text.isascii() and text.isdigit()):
            self.fail(f"{text!r} must be a whole number, 0 or more", parameter, context)
        return int(text)


COUNT = Count()
