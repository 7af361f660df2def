"""expstore ingest."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import expstore
from expstore_cli.main import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ingest", *map(str, arguments)])


def report_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def line_of(output: str, start: str) -> str:
    """What the report says of it."""
    (line,) = [line for line in output.splitlines() if line[:20].strip() == start]
    return line[20:]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder of four episodes: one empty, one without its final observation."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    for number, length in enumerate((3, 0, 2, 5)):
        np.savez(
            folder / f"ep{number}.npz",
            **{"observation/state": np.zeros((length + (number != 2), 2), np.float32)},
            action=np.arange(length),
            terminated=np.arange(length) == length - 1,
        )
    return folder


def test_the_closing_report(recorded: Path, tmp_path: Path) -> None:
    result = run(recorded, tmp_path / "a.exp")

    assert (result.exit_code, result.stderr) == (0, "")
    output = result.stdout
    assert output.startswith(f"4 .npz files in {recorded}")
    assert line_of(output, "episodes") == "3 (3 terminated)"
    assert re.match(r"10 in \S+ s: [\d,]+ steps/s, \S+ MB/s", line_of(output, "steps"))
    assert line_of(output, "rows dropped") == "none"
    assert line_of(output, "episodes skipped") == "1 (no steps in it)"
    assert line_of(output, "boundaries").startswith("each file is one episode")
    assert line_of(output, "final observations") == (
        "2 of 3 episodes have one; the source does not have the others"
    )
    assert line_of(output, "dtypes") == "as in the source"
    assert line_of(output, "store") == f"{tmp_path / 'a.exp'}: 3 episodes, 10 steps, commit 1"
    assert output.endswith(f"next: expstore inspect {tmp_path / 'a.exp'}\n")


def test_what_comes_next_can_be_pasted(recorded: Path, tmp_path: Path) -> None:
    store = tmp_path / "two words.exp"

    output = run(recorded, store).stdout

    assert output.endswith(f"next: expstore inspect '{store}'\n")


def test_as_json(recorded: Path, tmp_path: Path) -> None:
    report = report_of(recorded, tmp_path / "a.exp")

    assert report["num_episodes"] == report["source_episodes"] == report["store_episodes"] == 3
    assert report["num_steps"] == 10
    assert report["skipped_episodes"] == {"no steps in it": 1}
    assert report["final_observations"] == 2
    assert report["source"] == str(recorded)
    assert (report["failures"], report["is_interrupted"]) == ([], False)


def test_files_that_cannot_be_read_are_named_and_the_exit_code_is_1(
    recorded: Path, tmp_path: Path
) -> None:
    (recorded / "ep2.npz").write_bytes((recorded / "ep2.npz").read_bytes()[:100])
    np.savez(recorded / "ep4.npz", action=np.arange(2), terminated=np.zeros(2, bool))

    result = run(recorded, tmp_path / "a.exp")

    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: ep2.npz: cannot be read: File is not a zip file",
        "error: ep4.npz: field 'observation/state' is missing in episode 2; every episode must "
        "bring it",
    ]
    assert line_of(result.stdout, "not imported") == "2 parts, named below"
    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [3, 5]


def test_the_expected_number_of_episodes(recorded: Path, tmp_path: Path) -> None:
    result = run(recorded, tmp_path / "a.exp", "--expect-episodes", 4)

    assert result.exit_code == 1
    assert result.stderr == (
        f"error: expected 4, but {tmp_path / 'a.exp'} has 3 episodes of {recorded}; the data "
        "stays there\n"
    )
    assert expstore.open(tmp_path / "a.exp").num_episodes == 3
    again = run(recorded, tmp_path / "a.exp", "--resume", "--expect-episodes", 3)
    assert (again.exit_code, again.stderr) == (0, "")


def test_a_store_that_has_the_source_is_refused_without_resume(
    recorded: Path, tmp_path: Path
) -> None:
    run(recorded, tmp_path / "a.exp")

    result = run(recorded, tmp_path / "a.exp")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path / 'a.exp'} has 3 episodes of {recorded} ")
    assert "--resume" in result.stderr
    assert result.stderr.count("\n") == 1


def test_resume_appends_new_files(recorded: Path, tmp_path: Path) -> None:
    run(recorded, tmp_path / "a.exp")
    (recorded / "ep9.npz").write_bytes((recorded / "ep3.npz").read_bytes())

    result = run(recorded, tmp_path / "a.exp", "--resume")

    assert line_of(result.stdout, "episodes") == (
        "1 (1 terminated), after 3 that were there before"
    )


def test_a_number_of_episodes(recorded: Path, tmp_path: Path) -> None:
    assert report_of(recorded, tmp_path / "a.exp", "--episodes", 2)["num_episodes"] == 2


def test_a_range_of_episodes_and_chosen_fields(recorded: Path, tmp_path: Path) -> None:
    report_of(
        *(recorded, tmp_path / "a.exp", "--episodes", "2:"),
        *("--map", "observation/state=observation", "--drop", "terminated"),
    )

    store = expstore.open(tmp_path / "a.exp")
    assert store.episodes["length"].tolist() == [2, 5]
    assert set(store.fields) == {"observation", "action"}


def test_a_function_runs_on_each_episode(recorded: Path, tmp_path: Path) -> None:
    for number, length in enumerate((3, 0, 2, 5)):
        with np.load(recorded / f"ep{number}.npz") as file:
            np.savez(recorded / f"ep{number}.npz", **file, reward=np.ones(length))
    result = run(recorded, tmp_path / "a.exp", "--postprocess", "returns:gamma=0.5")

    assert (result.exit_code, result.stderr) == (0, "")
    said = line_of(result.stdout, "postprocess")
    assert re.fullmatch(r"\S+:DiscountedReturn\(gamma=0.5, value=None\)#\w+ on every episode", said)
    assert expstore.open(tmp_path / "a.exp").episode(0)["returns"].tolist() == [1.75, 1.5, 1.0]
    report = report_of(
        recorded, tmp_path / "a.exp", "--postprocess", "returns:gamma=0.5", "--resume"
    )
    assert said.startswith(report["postprocess"])

    other = run(recorded, tmp_path / "a.exp", "--postprocess", "n_step", "--resume")
    assert other.exit_code == 1 and "give the same one, or another store" in other.stderr
    failed = run(recorded, tmp_path / "b.exp", "--postprocess", "gae")
    assert failed.exit_code == 1 and "must be a field 'value'" in failed.stderr
    unknown = run(recorded, tmp_path / "c.exp", "--postprocess", "gea")
    assert unknown.exit_code == 1 and "one of gae, returns" in unknown.stderr


def test_errors_speak_of_flags_alone(recorded: Path, tmp_path: Path) -> None:
    run(recorded, tmp_path / "a.exp")

    again = run(recorded, tmp_path / "a.exp")
    unknown = run(recorded, tmp_path / "b.exp", "--done-mode", 0)
    twice = run(recorded, tmp_path / "c.exp", "--map", "action=terminated")

    assert "after them with --resume, or give another store" in again.stderr
    assert "is of format npz, which has no --done-mode; leave it out" in unknown.stderr
    assert "--map gives the name terminated to two fields" in twice.stderr
    assert "=" not in again.stderr + unknown.stderr


def test_a_cast_is_allowed_by_name(recorded: Path, tmp_path: Path) -> None:
    np.savez(
        recorded / "ep4.npz",
        **{"observation/state": np.zeros((3, 2), np.float16)},
        action=np.arange(2),
        terminated=np.zeros(2, bool),
    )

    refused = run(recorded, tmp_path / "a.exp")
    allowed = run(recorded, tmp_path / "b.exp", "--cast")

    assert refused.exit_code == 1
    assert "must have dtype float32, got float16" in refused.stderr
    assert allowed.exit_code == 0
    assert line_of(allowed.stdout, "dtypes").startswith("observation/state cast to the store's ")


def test_a_format_can_be_named(recorded: Path, tmp_path: Path) -> None:
    assert report_of(recorded, tmp_path / "a.exp", "--format", "npz")["num_episodes"] == 3
    assert run(recorded, tmp_path / "b.exp", "--format", "zip").exit_code == 2


@pytest.mark.parametrize(
    "option",
    [
        ("--episodes", "-1"),
        ("--episodes", "1.5"),
        ("--episodes", "5:3"),
        ("--episodes", "1:2:3"),
        ("--map", "action"),
        ("--map", "=action"),
        ("--steps", "many"),
        ("--seed", "-1"),
        ("--expect-episodes", "x"),
        ("--no-such-option",),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    recorded: Path, tmp_path: Path, option: tuple[str, ...]
) -> None:
    result = run(recorded, tmp_path / "a.exp", *option)

    assert result.exit_code == 2
    assert not (tmp_path / "a.exp").exists()


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ("nowhere", (), "there is nothing at "),
        ("empty", (), "looked for "),
        ("recorded", ("--steps", 5), "--steps is for gym:ENV_ID"),
        ("gym:CartPole-v1", (), "say how much of gym:CartPole-v1 to record"),
        ("gym:", ("--steps", 1), "gym: needs an environment"),
    ],
)
def test_errors_are_one_line(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: tuple[object, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()

    result = run(source, "a.exp", *options)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "a.exp").exists()


def test_a_store_that_is_being_written_is_an_error_in_one_line(
    recorded: Path, tmp_path: Path
) -> None:
    with expstore.Writer(tmp_path / "a.exp"):
        result = run(recorded, tmp_path / "a.exp")

    assert result.exit_code == 1
    assert "is being written by process" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_directory_of_something_else_is_left_alone(recorded: Path) -> None:
    before = sorted(recorded.iterdir())

    result = run(recorded, recorded)

    assert result.exit_code == 1
    assert "is not an expstore store" in result.stderr
    assert sorted(recorded.iterdir()) == before


class TestRecording:
    """`gym:` sources, in real environments."""

    @pytest.fixture(autouse=True)
    def _gymnasium(self) -> None:
        pytest.importorskip("gymnasium")

    def test_episodes(self, tmp_path: Path) -> None:
        pytest.importorskip("mujoco")

        report = report_of("gym:HalfCheetah-v5", tmp_path / "a.exp", "--episodes", 2)

        assert (report["num_episodes"], report["num_steps"]) == (2, 2000)
        assert report["end_reasons"] == {"truncated": 2}
        assert report["final_observations"] == 2
        assert report["num_bytes"] == 2 * (1001 * 17 * 8 + 1000 * (6 * 4 + 8 + 2))

    def test_steps_seed_and_policy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my_policies.py").write_text("def right(observation):\n    return 1\n")

        result = run(
            *("gym:CartPole-v1", "a.exp", "--steps", 25, "--seed", 9),
            *("--policy", "my_policies:right"),
        )

        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("CartPole-v1, policy my_policies:right, seeds from 9 on")
        store = expstore.open("a.exp")
        assert store.num_steps == 25
        assert store.episodes["seed"].tolist() == list(range(9, 9 + store.num_episodes))
        assert store.episodes["end_reason"].tolist()[-1] == "cut"
        assert set(store.read(np.arange(25), ["action"])["action"].tolist()) == {1}

    def test_another_seed_is_another_source(self, tmp_path: Path) -> None:
        report_of("gym:CartPole-v1", tmp_path / "a.exp", "--episodes", 2)

        report = report_of("gym:CartPole-v1", tmp_path / "a.exp", "--episodes", 2, "--seed", 100)

        assert (report["episodes_before"], report["store_episodes"]) == (0, 4)

    def test_another_seed_is_not_resumed(self, tmp_path: Path) -> None:
        report_of("gym:CartPole-v1", tmp_path / "a.exp", "--episodes", 2)

        result = run(
            *("gym:CartPole-v1", tmp_path / "a.exp", "--episodes", 4, "--resume", "--seed", 7)
        )

        assert result.exit_code == 1
        assert "but of gym:CartPole-v1 seed=0 policy=random; give its seed" in result.stderr
        assert expstore.open(tmp_path / "a.exp").num_episodes == 2

    def test_another_environment_does_not_fit(self, tmp_path: Path) -> None:
        report_of("gym:CartPole-v1", tmp_path / "a.exp", "--episodes", 1)

        result = run("gym:Acrobot-v1", tmp_path / "a.exp", "--episodes", 1)

        assert result.exit_code == 1
        assert "field 'observation' must have shape (4,), got (6,)" in result.stderr
        assert result.stderr.count("\n") == 1

    def test_atari(self, tmp_path: Path) -> None:
        pytest.importorskip("ale_py")

        report = report_of("gym:ALE/Pong-v5", tmp_path / "a.exp", "--steps", 4)

        assert report["num_bytes"] == 5 * 210 * 160 * 3 + 4 * (8 + 8 + 2)
