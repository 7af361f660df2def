"""Numbers, bars and JSON as the commands print them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

BARS = "▁▂▃▄▅▆▇█"
_IN_PYTHON = re.compile(r"(--[a-z-]+(?: [^\s()]+)?) \(\w+=[^()]*\)")
PLAIN_WIDTH = 1000  # of what goes to a file or another program: no line is folded


def echo_json(document: Any) -> None:
    """A document on stdout, and nothing else; numbers that JSON lacks become null."""
    click.echo(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def output() -> Console:
    """Where tables go: stdout, as wide as the terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def messages() -> Console:
    """Where progress goes: stderr."""
    return Console(stderr=True, highlight=False)


def as_flags(text: str) -> str:
    """A message without what an option is called in Python, which it has beside its flag.

    >>> as_flags("give the limit, as in --max-episode-steps 1000 (max_episode_steps=1000)")
    'give the limit, as in --max-episode-steps 1000'
    """
    return _IN_PYTHON.sub(r"\1", text).replace("open the writer with cast=True", "allow --cast")


def count(number: int, noun: str) -> str:
    """`1 episode`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """Bytes as people read them.

    >>> size(900), size(123_456), size(2_500_000_000)
    ('900 B', '123 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    digits = 1 if unit != "B" and num_bytes < 10 else 0
    return f"{num_bytes:,.{digits}f} {unit}"


def number(value: float | None) -> str:
    """A number with the digits that matter, and none that only look exact.

    >>> number(1000.0), number(-345.119451), number(0.000123456), number(None)
    ('1,000', '-345.1', '0.0001235', '-')
    """
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15 if math.isfinite(value) else False:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e7 else f"{value:,.0f}"


def bars(counts: Sequence[int]) -> str:
    """A bar for each count, the largest one full; none only where nothing is.

    >>> bars([0, 1, 4, 8])
    ' ▁▄█'
    """
    most = max(counts)
    return "".join(BARS[max(1, round(n / most * len(BARS))) - 1] if n else " " for n in counts)


def duration(seconds: float) -> str:
    """A span of time in its largest unit.

    >>> duration(0.42), duration(90), duration(7200)
    ('0.4 s', '90 s', '2 h')
    """
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
