"""The parsers under a fuzzer that is guided by the code it reaches; run by hand, not by the tests.

    python -m venv /tmp/guided && /tmp/guided/bin/pip install atheris
    echo "$PWD/.venv/lib/python3.11/site-packages" > \
        /tmp/guided/lib/python3.11/site-packages/expstore-development.pth
    /tmp/guided/bin/python -m tests.fuzz.guided root -len_control=0 -max_total_time=600

The name of a parser, then options of libFuzzer. What the fuzzer makes up is, by its first byte,
either the file itself, or the choices by which a sound file is changed; checksums then hold.
"""

from __future__ import annotations

import contextlib
import sys
from random import Random
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["expstore"]):
    from expstore.errors import ExpstoreError
    from tests.fuzz.limits import limit_memory
    from tests.fuzz.parsers import PARSERS


class Choices(Random):
    """Random choices that are read from bytes; the same again and again when they are used up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._bits, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def getrandbits(self, count: int) -> int:
        found = self._bits & ((1 << count) - 1)
        self._bits, self._left = self._bits >> count, self._left - count
        return found if self._left >= 0 else super().getrandbits(count)

    def random(self) -> float:
        return self.getrandbits(53) / (1 << 53)


def main() -> None:
    name, *options = sys.argv[1:]
    parser = PARSERS[name]
    sound = parser.sound()

    def attempt(data: bytes) -> Any:
        if not data:
            return
        changed = data[1:] if data[0] < 64 else parser.hostile(Choices(data[1:]), sound)
        with contextlib.suppress(ExpstoreError):
            parser.parse(changed)

    limit_memory()
    atheris.Setup([sys.argv[0], *options], attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
