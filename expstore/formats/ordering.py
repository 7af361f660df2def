"""The order of files and members whose names have numbers in them."""

from __future__ import annotations

import re


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort by: numbers by value; the name itself decides between `ep1` and `ep01`.

    >>> sorted(["ep10", "ep9", "ep"], key=natural)
    ['ep', 'ep9', 'ep10']
    """
    parts: list[str | int] = list(re.split(r"(\d+)", name))
    parts[1::2] = [int(part) for part in parts[1::2]]
    return parts, name
