"""Episodes rolled out in environments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import MissingExtraError, SchemaError, SourceError

gymnasium = pytest.importorskip("gymnasium")

from expstore.formats import Imported  # noqa: E402
from expstore.ingest.environments import make_environment, policy_of  # noqa: E402
from expstore.ingest.recorder import GymSource  # noqa: E402
from tests.ingest import environments  # noqa: E402


def same(one: Any, other: Any) -> bool:
    """Whether two nested episodes have the same bytes."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_an_environment_of_a_module_is_registered_by_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_games.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Mine-v3', entry_point=CartPoleEnv, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = GymSource("my_games:Mine-v3", num_episodes=1)
    assert len(next(iter(source.episodes())).data["reward"]) == 5
    source.close()


def test_an_episode_is_what_the_environment_gave() -> None:
    pytest.importorskip("mujoco")
    source = GymSource("HalfCheetah-v5", num_steps=20, seed=7, policy="random")

    (episode,) = source.episodes()

    environment = gymnasium.make("HalfCheetah-v5")
    observation, _ = environment.reset(seed=7)
    assert episode.data["observation"].shape == (21, 17)
    assert episode.data["observation"].dtype == np.float64
    assert episode.data["action"].dtype == np.float32
    for step in range(20):
        np.testing.assert_array_equal(episode.data["observation"][step], observation)
        observation, reward, *_ = environment.step(episode.data["action"][step])
        assert episode.data["reward"][step] == reward
    np.testing.assert_array_equal(episode.data["observation"][20], observation)


def test_nested_spaces_become_nested_fields(tmp_path: Path) -> None:
    expstore.ingest_from("gym:Nested-v0", tmp_path / "n.exp", episodes=3)

    store = expstore.open(tmp_path / "n.exp")
    assert {name: (f.shape, f.dtype) for name, f in store.fields.items()} == {
        "observation/image": ((2, 2), "uint8"),
        "observation/pair/0": ((), "int64"),
        "observation/pair/1": ((1,), "float32"),
        "action/0": ((), "int64"),
        "action/1": ((2,), "int8"),
        "reward": ((), "float64"),
        "terminated": ((), "bool"),
        "truncated": ((), "bool"),
    }
    episode = store.episode(2)
    # The environment gives one array again and again, with the step's number in it.
    assert episode["observation"]["image"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert episode["observation"]["pair"]["0"].tolist() == [0, 1, 2, 3]


def test_episodes_end_as_the_environment_says_or_at_the_last_step(tmp_path: Path) -> None:
    report = expstore.ingest_from("gym:Nested-v0", tmp_path / "n.exp", steps=8)

    store = expstore.open(tmp_path / "n.exp")
    assert store.episodes["length"].tolist() == [1, 2, 3, 2]
    assert store.episodes["end_reason"].tolist() == [*["terminated"] * 3, "cut"]
    assert len(store.episode(3)["observation"]["image"]) == 3  # the final one of a cut episode, too
    assert report.num_steps == 8
    assert report.boundary_rule.endswith("the last one is cut at 8 steps")


def test_a_budget_that_ends_with_an_episode_cuts_none(tmp_path: Path) -> None:
    report = expstore.ingest_from("gym:Nested-v0", tmp_path / "n.exp", steps=6)

    assert report.end_reasons == {"terminated": 3}


def test_whichever_count_is_reached_first_ends_a_recording(tmp_path: Path) -> None:
    report = expstore.ingest_from("gym:Nested-v0", tmp_path / "n.exp", steps=100, episodes=2)

    assert (report.num_episodes, report.num_steps) == (2, 3)


def test_time_limits_are_truncated(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    expstore.ingest_from("gym:HalfCheetah-v5", tmp_path / "h.exp", episodes=1)

    (row,) = expstore.open(tmp_path / "h.exp").episodes
    assert (row["length"], row["end_reason"]) == (1000, "truncated")


def test_a_seed_may_be_one_of_numpys() -> None:
    (episode,) = GymSource("CartPole-v1", num_episodes=1, seed=np.int64(3)).episodes()  # type: ignore[arg-type]
    (same,) = GymSource("CartPole-v1", num_episodes=1, seed=3).episodes()
    assert episode.metadata == same.metadata
    assert type(episode.metadata["seed"]) is int
    assert np.array_equal(episode.data["observation"], same.data["observation"])


def test_an_episode_depends_on_its_own_seed_only(tmp_path: Path) -> None:
    whole = list(GymSource("CartPole-v1", num_episodes=4, seed=3).episodes())

    rest = list(
        GymSource("CartPole-v1", num_episodes=4, seed=3).episodes(Imported(frozenset({0, 1}), 9))
    )

    assert [episode.key for episode in rest] == [2, 3]
    for one, other in zip(whole[2:], rest, strict=True):
        assert same(one.data, other.data)
        assert one.metadata == other.metadata


def test_random_actions_do_not_repeat_the_noise_of_the_reset() -> None:
    pytest.importorskip("mujoco")
    (episode,) = GymSource("HalfCheetah-v5", num_steps=1, seed=4).episodes()

    # Both are uniform draws: from one seed they would be proportional.
    space = gymnasium.make("HalfCheetah-v5").action_space
    space.seed(4)
    assert not np.array_equal(episode.data["action"][0], space.sample())


def test_metadata_says_how_an_episode_came_about(tmp_path: Path) -> None:
    expstore.ingest_from("gym:CartPole-v1", tmp_path / "c.exp", episodes=2, seed=5)

    row = expstore.open(tmp_path / "c.exp").episodes[1]
    assert row["seed"] == 6
    assert row["env_id"] == "CartPole-v1"
    assert row["policy"] == "random"
    assert row["versions"]["gymnasium"] == gymnasium.__version__
    assert row["source"]["name"] == "gym:CartPole-v1 seed=5 policy=random"
    assert row["source"]["episode"] == 1


@pytest.mark.parametrize("policy", [environments.constant, "tests.ingest.environments:constant"])
def test_a_policy_chooses_the_actions(tmp_path: Path, policy: Any) -> None:
    expstore.ingest_from("gym:CartPole-v1", tmp_path / "c.exp", episodes=1, policy=policy)

    store = expstore.open(tmp_path / "c.exp")
    assert set(store.episode(0)["action"].tolist()) == {1}
    assert store.episodes[0]["policy"] == "tests.ingest.environments:constant"


def test_a_policys_own_error_keeps_the_episodes_before(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        expstore.ingest_from(
            "gym:CartPole-v1", tmp_path / "c.exp", episodes=9, policy=_Fails(after=30)
        )

    kept = expstore.open(tmp_path / "c.exp").num_episodes
    assert kept > 0
    assert f"{kept} whole episodes were kept" in caught.value.__notes__[0]


class _Fails:
    """A policy that makes a mistake after some steps."""

    def __init__(self, after: int) -> None:
        self.steps_left = after

    def __call__(self, observation: Any) -> int:
        self.steps_left -= 1
        return 1 // max(0, self.steps_left and 1)


def test_dtypes_that_change_in_an_episode_are_reported(tmp_path: Path) -> None:
    report = expstore.ingest_from("gym:Careless-v0", tmp_path / "c.exp", episodes=1)

    assert report.dtype_changes == {"observation": "float32 to float64"}


def test_atari_frames_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    expstore.ingest_from("gym:ALE/Pong-v5", tmp_path / "p.exp", steps=5)

    store = expstore.open(tmp_path / "p.exp")
    assert store.fields["observation"].shape == (210, 160, 3)
    assert store.fields["observation"].dtype == "uint8"
    assert store.episode(0)["observation"].shape == (6, 210, 160, 3)
    assert "ale_py" in store.episodes[0]["versions"]


@pytest.mark.parametrize(
    ("env_id", "options", "text"),
    [
        ("", {"num_steps": 1}, "gym: needs an environment"),
        ("CartPole-v1", {}, "--episodes or --steps"),
        ("CartPole-v1", {"num_steps": -1}, "--steps .* must be >= 0, got -1"),
        ("CartPole-v1", {"num_episodes": 1, "seed": -1}, "--seed .* must be >= 0, got -1"),
        ("CartPole-v1", {"num_steps": 1, "policy": "greedy"}, "random or module:function"),
        ("CartPole-v1", {"num_steps": 1, "policy": "no_such_module:f"}, "cannot be imported"),
        ("CartPole-v1", {"num_steps": 1, "policy": "math:nothing"}, "no function 'nothing'"),
        ("CartPole-v1", {"num_steps": 1, "policy": "math:pi"}, "no function 'pi'"),
        ("NoSuchEnvironment-v1", {"num_steps": 1}, "gym:NoSuchEnvironment-v1 cannot be made"),
        ("no_such_module:A-v1", {"num_steps": 1}, "cannot be made"),
    ],
)
def test_a_recording_that_cannot_be_is_refused(
    env_id: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(SourceError, match=text):
        GymSource(env_id, **options)


def test_a_space_without_fixed_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="observation: spaces of type Text"):
        expstore.ingest_from("gym:Worded-v0", tmp_path / "w.exp", episodes=1)
    assert not (tmp_path / "w.exp").exists()


def test_remarks_on_a_model_litter_neither_stderr_nor_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)

    make_environment("HalfCheetah-v5").close()

    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'expstore\[gym\]'"):
        make_environment("CartPole-v1")


def test_without_ale_py_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)

    with pytest.raises(MissingExtraError, match="pip install ale-py"):
        make_environment("ALE/Pong-v5")


def test_a_policy_object_is_named_by_its_class() -> None:
    _, name = policy_of(_Fails(after=1))

    assert name == "tests.ingest.test_recorder:_Fails"
