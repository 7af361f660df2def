"""A few hostile files of every kind; `scripts/fuzz` tries as many as one wants."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expstore.errors import ExpstoreError
from tests.fuzz.parsers import PARSERS
from tests.fuzz.targets import NEEDS, TARGETS, Bench

ROUNDS = dict.fromkeys(TARGETS, 3) | {"root": 8, "history": 6, "pointer": 30, "npz": 10}
UNHURRIED = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def bench_of(name: str, directory: Path) -> Bench:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    return Bench(name, directory)


@pytest.mark.parametrize("name", ["root", "pointer", "npz", "d4rl", "minari"])
def test_what_is_sound_is_not_refused(tmp_path: Path, name: str) -> None:
    """Else every hostile file would be refused for a reason of its own."""
    bench_of(name, tmp_path).use_sound()


@pytest.mark.parametrize("name", TARGETS)
def test_a_hostile_file_is_read_or_refused_and_nothing_else(tmp_path: Path, name: str) -> None:
    bench = bench_of(name, tmp_path)

    @settings(UNHURRIED, max_examples=ROUNDS[name])
    @given(st.randoms(use_true_random=False))
    def attempt(rng: Random) -> None:
        bench.try_one(rng)

    attempt()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_gives_a_value_or_one_of_our_errors(name: str) -> None:
    parser = PARSERS[name]
    sound = parser.sound()
    if name != "history":
        parser.parse(sound)

    @settings(UNHURRIED, max_examples=100)
    @given(st.randoms(use_true_random=False))
    def attempt(rng: Random) -> None:
        with contextlib.suppress(ExpstoreError):
            parser.parse(parser.hostile(rng, sound))

    attempt()
