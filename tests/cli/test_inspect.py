"""expstore inspect."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import expstore
from expstore_cli.main import main


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        for length in (1, 2, 2, 4):
            writer.append(
                {
                    "observation": {"image": np.zeros((length + 1, 8, 8, 3), np.uint8)},
                    "action": np.arange(length),
                    "reward": np.full(length, 0.5),
                    "terminated": np.arange(length) == length - 1,
                },
                seed=length,
                task="[red] push",  # square brackets are markup to some tables
            )
        writer.append(
            {
                "observation": {"image": np.zeros((1, 8, 8, 3), np.uint8)},
                "action": np.array([-3]),
                "reward": np.array([np.nan]),
                "terminated": np.array([False]),
            }
        )
    return tmp_path / "a.exp"


def line_of(output: str, start: str) -> str:
    """The words of the line that begins so, one space apart."""
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    return re.sub(" +", " ", line).strip()


def test_a_table_of_fields(path: Path) -> None:
    output = run(path)

    assert str(path) in output
    assert "5 episodes, 10 steps, " in output
    assert re.search(r"commit 1 of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \d+\.\d s ago", output)
    assert re.match(r"observation/image 8x8x3 uint8 \w+ \S+ k?B 1\.9 kB", line_of(output, "obs"))
    assert re.match(r"action scalar int64 mapped \S+ kB 80 B", line_of(output, "action"))


def test_distributions_and_ends(path: Path) -> None:
    output = run(path)

    assert line_of(output, "length") == "length 1 2 2 4 ██ ▄"
    assert line_of(output, "return").startswith("return 0.5 1 1.125 2 ")
    assert line_of(output, "return").endswith("(1 NaN or infinite, left out)")
    assert "terminated 4 80.0 % ████" in re.sub(" +", " ", output)
    assert "cut 1 20.0 % ██████" in re.sub(" +", " ", output)


def test_as_json(path: Path) -> None:
    found = json.loads(run(path, "--json"))

    assert (found["num_episodes"], found["num_steps"], found["commit"]) == (5, 10, 1)
    assert [field["name"] for field in found["fields"]] == [
        "observation/image",
        "action",
        "reward",
        "terminated",
    ]
    assert found["fields"][0]["shape"] == [8, 8, 3]
    assert found["end_reasons"] == {"terminated": 4, "cut": 1}
    assert found["length"]["counts"] == [2, 2, 0, 1]
    assert found["returns"]["return"]["num_not_finite"] == 1


def test_one_episode(path: Path) -> None:
    output = run(path, "--episode", 3)

    assert f"{path}, episode 3" in output
    assert "4 steps: 5 to 8 of the store" in output
    assert "ended: terminated; observation after the last step: known" in output
    assert "return: 2" in output
    assert "seed: 4" in output
    assert line_of(output, "action") == "action scalar int64 0 1.5 3"
    assert '"task": "[red] push"' in output


def test_one_episode_without_most_things(path: Path) -> None:
    output = run(path, "--episode", 4)

    assert "observation after the last step: not known" in output
    assert "seed: not known" in output
    assert "return: nan" in output
    assert line_of(output, "reward") == "reward scalar float64 - - - 1 NaN or infinite"


def test_one_episode_as_json(path: Path) -> None:
    found = json.loads(run(path, "--episode", 4, "--json"))

    assert (found["number"], found["length"], found["end_reason"]) == (4, 1, "cut")
    assert found["returned"] is None  # NaN, which JSON does not have
    assert found["fields"][1]["min"] == -3


def test_compressed_fields_show_how_much_smaller_they_are(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp", layout={"image": "coded"}) as writer:
        writer.append({"image": np.zeros((400, 64, 64), np.uint8), "reward": np.zeros(400)})

    output = run(tmp_path / "a.exp")

    assert re.search(r"uint8 coded \S+ kB 1\.6 MB \d+ x$", line_of(output, "image"))
    assert line_of(output, "reward").endswith(" kB 3.2 kB")


def test_ragged_fields_have_any_number_of_elements(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"points": [np.zeros((n, 3)) for n in (2, 0)], "words": ["one", ""]})

    output = run(tmp_path / "a.exp")

    assert line_of(output, "points").startswith("points any x 3 float64 ")
    assert line_of(output, "words").startswith("words any text ")
    in_episode = run(tmp_path / "a.exp", "--episode", 0)
    assert line_of(in_episode, "words") == "words any text - - -"


def test_an_empty_store(tmp_path: Path) -> None:
    expstore.Writer(tmp_path / "a.exp").close()

    output = run(tmp_path / "a.exp")

    assert "0 episodes, 0 steps" in output
    assert "no fields yet: the first episode decides them" in output
    assert json.loads(run(tmp_path / "a.exp", "--json"))["length"] is None


def test_a_store_that_is_being_written(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp", commit_interval_s=1000) as writer:
        writer.append({"reward": [1.0]})
        writer.commit()
        writer.append({"reward": [1.0]})

        assert "1 episode, 1 step, " in run(tmp_path / "a.exp")


def test_field_names_are_neither_cut_nor_folded(tmp_path: Path) -> None:
    name = "observation/" + "/".join(["a_rather_long_name"] * 4)
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({name: np.zeros(3), "reward": np.zeros(3)})

    assert name in run(tmp_path / "a.exp")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "there is nothing at "),
        (["a.exp", "--episode", "9"], "episode 9 is not among the 5 episodes"),
    ],
)
def test_errors_are_one_line(path: Path, arguments: list[str], text: str) -> None:
    arguments[0] = str(path.parent / arguments[0])

    result = CliRunner().invoke(main, ["inspect", *arguments])

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {text}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("number", ["-1", "three", "1.5", "²"])
def test_an_episode_has_a_whole_number(path: Path, number: str) -> None:
    result = CliRunner().invoke(main, ["inspect", str(path), "--episode", number])

    assert result.exit_code == 2
    assert f"'{number}' must be a whole number, 0 or more" in result.stderr


def test_a_commit_whose_episodes_were_evicted_is_not_shown_as_if_they_were_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b.exp"
    with expstore.Writer(path, capacity_steps=6, durable=False) as writer:
        for number in range(4):
            writer.append({"reward": np.full(3, number)})
            writer.commit()

    for arguments in ([], ["--episode", "0"]):
        result = CliRunner().invoke(main, ["inspect", str(path), "--at", "2", *arguments])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == (
            f"error: commit 2 of {path} is not there any more: 2 of its 2 episodes were evicted "
            "since, as the store has a capacity; expstore history lists newer commits\n"
        )
    assert "2 of its 3" not in run(path, "--at", "4")
    assert "2 episodes, 6 steps" in run(path)
