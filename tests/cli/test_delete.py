"""expstore delete."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import expstore
from expstore_cli.main import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        for length in (3, 2, 5):
            writer.append({"reward": np.ones(length)}, policy="sac" if length > 2 else "random")
    return tmp_path / "a.exp"


def run(*arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, ["delete", *map(str, arguments)], input=answer)


def kept(path: Path) -> list[int]:
    return expstore.open(path).episode_numbers.tolist()


def test_it_asks_and_deletes_what_it_asked_about(path: Path) -> None:
    result = run(path, "--where", "return < 4", answer="y\n")

    assert (result.exit_code, result.stdout) == (
        0,
        "deleted 2 episodes with 5 steps, 1 episode left\n",
    )
    assert result.stderr.startswith("delete 2 episodes with 5 steps? [y/N]: ")
    assert kept(path) == [2]


@pytest.mark.parametrize("answer", ["n\n", "\n", None])
def test_without_a_yes_nothing_is_deleted(path: Path, answer: str | None) -> None:
    result = run(path, 0, answer=answer)

    assert (result.exit_code, result.stdout) == (1, "")
    assert kept(path) == [0, 1, 2]


def test_numbers_and_yes(path: Path) -> None:
    result = run(path, 2, 0, "--yes", "--json")

    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["episodes"], found["num_steps"], found["dry_run"]) == ([0, 2], 8, False)
    assert (found["kept_episodes"], found["commit"]) == (1, 2)
    assert kept(path) == [1]


def test_a_dry_run_lists_the_numbers_and_deletes_nothing(path: Path) -> None:
    result = run(path, "--where", 'policy == "sac"', "--dry-run")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "episode 0, 3 steps, cut, return 3",
        "episode 2, 5 steps, cut, return 5",
        "would delete 2 episodes with 8 steps, 1 episode left",
    ]
    assert kept(path) == [0, 1, 2]


def test_a_dry_run_of_many_lists_the_first_ones(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "b.exp", durable=False) as writer:
        for _ in range(60):
            writer.append({"observation": np.zeros((2, 1))})
    result = run(tmp_path / "b.exp", "--where", "length >= 1", "--dry-run")

    lines = result.stdout.splitlines()
    assert lines[0] == "episode 0, 2 steps, cut"
    assert lines[49:] == [
        "episode 49, 2 steps, cut",
        "and 10 others, which --json lists",
        "would delete 60 episodes with 120 steps, 0 episodes left",
    ]


def test_a_dry_run_of_nothing_lists_nothing(path: Path) -> None:
    result = run(path, "--where", "length > 1000", "--dry-run")
    assert result.stdout == "would delete 0 episodes with 0 steps, 3 episodes left\n"


def test_nothing_to_delete_is_no_question(path: Path) -> None:
    result = run(path, "--where", "return > 100")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "deleted 0 episodes with 0 steps, 3 episodes left\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "give numbers of episodes, or --where"),
        ([0, "--where", "return < 1"], 2, "give numbers of episodes, or --where"),
        (["x"], 2, "'x' must be a whole number"),
        ([3], 1, "error: episode 3 is not among the 3 episodes here"),
        (["--where", "return <"], 1, "error: 'return <' is no condition, it ends too early"),
        (["--where", "polcy == 'sac'"], 1, "error: no episode has 'polcy'"),
    ],
)
def test_errors(path: Path, arguments: list[object], code: int, text: str) -> None:
    result = run(path, *arguments, "--yes")

    assert result.exit_code == code
    assert text in result.stderr
    assert kept(path) == [0, 1, 2]
