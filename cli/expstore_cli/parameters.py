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


class Range(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number N, for the first so many, or A:B, for those from number A on and before B."""

    name = "n|a:b"

    def convert(
        self, value: object, parameter: click.Parameter | None, context: click.Context | None
    ) -> int | slice:
        """The number, or the range as a slice; either of its ends may be left out."""
        start, colon, stop = str(value).partition(":")
        if not colon:
            return COUNT.convert(value, parameter, context)
        first = COUNT.convert(start or 0, parameter, context)
        last = COUNT.convert(stop, parameter, context) if stop else None
        if last is not None and last < first:
            self.fail(f"{value!r} stops before it starts", parameter, context)
        return slice(first, last)


class Renamed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Two names, OLD=NEW."""

    name = "old=new"

    def convert(
        self, value: object, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[str, str]:
        """Both names; click turns what is none into a usage error."""
        if isinstance(value, tuple):
            return value
        old, equals, new = str(value).partition("=")
        if not old or not equals or not new:
            self.fail(f"{value!r} must be OLD=NEW, two names of fields", parameter, context)
        return old, new


COUNT, RANGE, RENAMED = Count(), Range(), Renamed()
