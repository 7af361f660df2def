"""expstore compact, merge and history."""

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
            writer.append({"reward": np.ones(length)})
    expstore.delete(tmp_path / "a.exp", [1])
    return tmp_path / "a.exp"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_compact(path: Path, tmp_path: Path) -> None:
    result = run("compact", path, tmp_path / "b.exp")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"wrote {tmp_path}/b.exp: 2 episodes, 8 steps; 1 deleted episode left out\n"
    )
    assert expstore.open(tmp_path / "b.exp").episodes["length"].tolist() == [3, 5]


def test_compact_as_json_with_a_layout(path: Path, tmp_path: Path) -> None:
    arguments = ("--layout", "coded", "--chunk-steps", 64, "--json")
    result = run("compact", path, tmp_path / "b.exp", *arguments)

    found = json.loads(result.stdout)
    assert (found["num_episodes"], found["sources"]) == (2, [str(path)])
    assert found["store_id"] == expstore.inspect(tmp_path / "b.exp").store_id
    assert expstore.open(tmp_path / "b.exp").fields["reward"].layout == "coded"


def test_merge(path: Path, tmp_path: Path) -> None:
    result = run("merge", path, path, tmp_path / "b.exp")

    assert result.stdout == (
        f"wrote {tmp_path}/b.exp: 4 episodes, 16 steps; 2 deleted episodes left out\n"
    )
    assert result.exit_code == 0


@pytest.mark.parametrize("command", ["compact", "merge"])
def test_a_target_that_is_taken_is_an_error_in_one_line(path: Path, command: str) -> None:
    result = run(command, path, path)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: there is something at {path} already; give a path that is free\n"
    )


def test_history(path: Path) -> None:
    result = run("history", path)

    lines = [line.split() for line in result.stdout.splitlines() if line[:1] != "─"]
    assert [line for line in lines if line[0] == "commit"] == [
        ["commit", "time", "episodes", "steps", "deleted", "evicted"]
    ]
    rows = [[line[0], *line[3:]] for line in lines if line[0].isdigit()]
    assert rows == [["0", "0", "0"], ["1", "3", "10"], ["2", "2", "8", "1"]]


def test_history_as_json_of_the_newest_commits(path: Path) -> None:
    found = json.loads(run("history", path, "--last", 1, "--json").stdout)

    assert [commit["number"] for commit in found] == [2]
    assert (found[0]["num_episodes"], found[0]["num_deleted"]) == (2, 1)


def test_inspect_shows_an_older_commit(path: Path) -> None:
    before = json.loads(run("inspect", path, "--at", 1, "--json").stdout)
    after = json.loads(run("inspect", path, "--json").stdout)

    assert (before["num_episodes"], before["num_deleted"]) == (3, 0)
    assert (after["num_episodes"], after["num_deleted"]) == (2, 1)
    assert (
        "1 deleted episode, whose space expstore compact gives back" in run("inspect", path).stdout
    )
    assert run("inspect", path, "--episode", 1).exit_code == 1
    assert run("inspect", path, "--episode", 1, "--at", 1).exit_code == 0
    assert "has no commit 7" in run("inspect", path, "--at", 7).stderr
