"""Numbers and JSON as the commands print them."""

import doctest
import json
import math

import pytest

from expstore_cli import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1000, "1,000"),
        (-345.1194518, "-345.1"),
        (0.000123456, "0.0001235"),
        (123456.78, "123,457"),
        (1e300, "1e+300"),
        (-0.5, "-0.5"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (None, "-"),
    ],
)
def test_numbers_have_the_digits_that_matter(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_960, "10.0 kB"),
        (123_456, "123 kB"),
        (5e15, "5,000 TB"),
    ],
)
def test_bytes_come_in_units(num_bytes: float, shown: str) -> None:
    assert text.size(num_bytes) == shown


def test_a_bar_is_empty_only_where_nothing_is() -> None:
    assert text.bars([0, 1, 1000]) == " ▁█"


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 steps"), (1, "1 step"), (2000, "2,000 steps")]
)
def test_counts_have_their_noun(number: int, shown: str) -> None:
    assert text.count(number, "step") == shown


def test_json_has_null_for_what_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    text.echo_json({"a": math.nan, "b": (1, [math.inf]), 3: "x"})

    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, [None]], "3": "x"}


def test_the_examples_run() -> None:
    assert doctest.testmod(text).failed == 0
