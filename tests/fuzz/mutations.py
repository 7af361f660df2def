"""Hostile versions of sound files: bytes that changed, JSON that says something else.

Every choice comes from one `random.Random`, so that hypothesis can shrink what it finds, and the
fuzzer of `scripts/fuzz` can learn which choices lead to new code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

MOST_BYTES = 1 << 20  # of a mutated file
DEEP = 300  # levels of nesting; Python itself takes fewer than 1,000

# Sizes around every limit of the format and of the machine's integers.
SIZES = (
    *(-1, 0, 1, 2, 3, 255, 4095, 4096, 65_535, 65_536, 1 << 20, 1 << 24),
    *((1 << bits) + more for bits in (31, 32, 40, 62, 63, 64, 200) for more in (-1, 0, 1)),
    10 * 10**12,
)
NAMES = (
    *("..", "../x", "../../../../etc/passwd", "/etc/passwd", "a/../../x", "a\0b", "\0", "", "."),
    *("a" * 300, "/".join("a" * 1000), "__expstore/lock", "zarr.json", "\ud800", "é\U0001f600"),
    *("next_x", "done", "episode", "a//b", "C:\\x", "~root", "$HOME", "%2e%2e", "\x1b[2J"),
)
OTHERS = (None, True, False, 1.5, -0.0, float("nan"), float("inf"), 1e308, [], {}, [[]], [0], "0")


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Something near `data`, or nothing like it."""
    kind = rng.randrange(9)
    if kind == 0 or not data:
        return rng.randbytes(rng.choice((0, 1, 8, 64, 4096)))
    out = bytearray(data)
    if kind == 1:
        return bytes(out[: rng.randrange(len(out))])
    if kind == 2:
        out += rng.randbytes(rng.choice((1, 8, 4096)))
    elif kind == 3:
        at = rng.randrange(len(out))
        del out[at : at + rng.choice((1, 2, 8, 64))]
    elif kind == 4:
        first, last, target = (rng.randrange(len(out)) for _ in range(3))
        out[target:target] = out[min(first, last) : max(first, last)]
    elif kind == 5:  # a whole number of eight bytes
        at = rng.randrange(len(out))
        number = rng.choice(SIZES) % (1 << 64)
        out[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
    elif kind == 6:
        at = rng.randrange(len(out))
        out[at : at + rng.choice((1, 4, 64))] = b""
        out[at:at] = rng.choice((b"\0", b"\xff", b'"', b"{", b"\n")) * rng.choice((1, 8, 2000))
    else:
        for _ in range(rng.choice((1, 1, 2, 8))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out[:MOST_BYTES])


def mutated_json(rng: Random, document: Any) -> Any:
    """A copy in which one to three members were replaced, renamed, removed or put elsewhere."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder = _some_holder(rng, document)
        if holder is None:
            break
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(NAMES)] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            holder[rng.choice(NAMES)] = copy.deepcopy(holder[key])
        elif kind == 3:
            holder[key] = holder[rng.choice(keys)]
            document = copy.deepcopy(document)
        elif kind == 4:
            holder[key] = _nested(rng, rng.choice((3, 40, DEEP)))
        else:
            holder[key] = _other(rng, holder[key])
    return document


def mutated_file(rng: Random, data: bytes, sealed: Callable[[Any], Any] | None) -> bytes:
    """A JSON file in which bytes or members are others.

    Args:
        sealed: puts right whatever guards a document, so that what is behind it is reached.
    """
    if rng.randrange(4) == 0:
        return mutated_bytes(rng, data)
    document = mutated_json(rng, json.loads(data))
    if sealed is not None and rng.randrange(8):
        document = sealed(document)
    return json.dumps(document).encode()


def _some_holder(rng: Random, document: Any) -> Any:
    """A dict or list that is not empty, at any depth alike."""
    found = []
    waiting = [document]
    while waiting:
        here = waiting.pop()
        if isinstance(here, (dict, list)) and here:
            found.append(here)
            waiting += here.values() if isinstance(here, dict) else here
    return rng.choice(found) if found else None


def _other(rng: Random, value: Any) -> Any:
    """Mostly something of the same type, since other types are refused at once."""
    if rng.randrange(5) == 0:
        return rng.choice(OTHERS)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*SIZES, value + 1, value - 1, value * 2, value // 2))
    if isinstance(value, str):
        dtypes = ("float64", "int8", "bool", "uint64", "text", "bfloat16", "object", "O", "U10")
        return rng.choice((*NAMES, *dtypes, value[:-1], value + "x", "mapped", "coded", "auto"))
    return rng.choice((*OTHERS, *SIZES, *NAMES))


def _nested(rng: Random, depth: int) -> Any:
    found: Any = rng.choice((0, "x", None))
    for _ in range(depth):
        found = {"a": found} if rng.randrange(2) else [found]
    return found
