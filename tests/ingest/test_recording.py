"""Recorder: exactly the true transitions, of single and vector environments in every mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

import expstore  # noqa: E402
from expstore.errors import SchemaError, SourceError, StorageError, WriterStateError  # noqa: E402
from expstore.ingest import Recorder, RecordExperience  # noqa: E402
from expstore.storage import files  # noqa: E402

MODES = list(AutoresetMode)


class Counting(gymnasium.Env[Any, Any]):
    """Observes 100 * number + 10 * episode + step; the reward is that of the observation."""

    action_space = spaces.Discrete(1000)

    def __init__(self, number: int, length: int, *, ends: str = "terminated", nested: bool = False):
        box = spaces.Box(0, 10_000, (1,), np.float32)
        self.number, self.length, self.ends, self.nested = number, length, ends, nested
        self.observation_space = spaces.Dict({"a": box, "b": spaces.Discrete(9)}) if nested else box
        self.episode, self.t = -1, 0

    def _now(self) -> Any:
        value = np.array([100 * self.number + 10 * self.episode + self.t], np.float32)
        return {"a": value, "b": self.t} if self.nested else value

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.t = self.episode + 1, 0
        return self._now(), {"place": -1}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length
        reward = float(100 * self.number + 10 * self.episode + self.t)
        is_end = self.ends == "terminated"
        return self._now(), reward, over and is_end, over and not is_end, {"place": self.t}


def vector(mode: AutoresetMode, **options: Any) -> Any:
    makers = [
        lambda: Counting(1, 2, **options),
        lambda: Counting(2, 3, **{**options, "ends": "truncated"}),
    ]
    return SyncVectorEnv(makers, autoreset_mode=mode, copy=False)


def run(env: Any, num_steps: int, mode: AutoresetMode | None) -> None:
    env.reset(seed=7)
    for step in range(num_steps):
        _, _, terminated, truncated, _ = env.step(np.full(2, step))
        over = terminated | truncated
        if mode == AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_exactly_the_true_transitions(
    tmp_path: Path, mode: AutoresetMode, nested: bool
) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        env = Recorder(vector(mode, nested=nested), writer, info=["place"])
        run(env, 12, mode)
        env.close()
    store = expstore.open(tmp_path / "a.exp")

    num_steps = {0: 0, 1: 0}
    for row in store.episodes:
        env_number, length = row["env_number"], (2, 3)[row["env_number"]]
        episode = store.episode(row["number"])
        first = 100 * (env_number + 1) + 10 * sum(
            r["env_number"] == env_number for r in store.episodes[: row["number"]]
        )
        observed = episode["observation"]["a"] if nested else episode["observation"]
        assert observed[:, 0].tolist() == [first + t for t in range(row["length"] + 1)]
        assert episode["reward"].tolist() == [first + t for t in range(1, row["length"] + 1)]
        assert episode["info"]["place"].tolist() == list(range(1, row["length"] + 1))
        if nested:
            assert episode["observation"]["b"].tolist() == list(range(row["length"] + 1))
        ended = row["length"] == length
        reason = ("terminated", "truncated")[env_number] if ended else "cut"
        assert row["end_reason"] == reason
        flag = episode["terminated" if env_number == 0 else "truncated"]
        assert flag.tolist() == [False] * (row["length"] - 1) + [ended]
        num_steps[env_number] += row["length"]
        assert np.all(np.diff(episode["action"]) == 1)  # those that were really taken
    # NEXT_STEP burns a step per episode: lengths 2 and 3 take 3 and 4 steps.
    burnt = mode == AutoresetMode.NEXT_STEP
    assert num_steps == ({0: 8, 1: 9} if burnt else {0: 12, 1: 12})
    assert store.episodes[0]["seed"] == 7 and store.episodes[1]["seed"] in (7, 8)


@pytest.mark.parametrize("mode", MODES)
def test_what_passes_through_is_not_changed(tmp_path: Path, mode: AutoresetMode) -> None:
    plain, recorded = vector(mode), RecordExperience(vector(mode), tmp_path / "a.exp")
    for env in (plain, recorded):
        env.reset(seed=1)
    for step in range(8):
        ours, theirs = recorded.step(np.full(2, step)), plain.step(np.full(2, step))
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            assert np.array_equal(one, other)
        over = theirs[2] | theirs[3]
        if mode == AutoresetMode.DISABLED and over.any():
            for env in (plain, recorded):
                env.reset(options={"reset_mask": over.copy()})
    recorded.close()


def test_a_vector_that_does_not_say_how_it_resets_is_refused(tmp_path: Path) -> None:
    env = vector(AutoresetMode.SAME_STEP)
    env.metadata = {k: v for k, v in env.metadata.items() if k != "autoreset_mode"}
    with pytest.raises(SourceError, match=r"does not say how its environments reset; put"):
        RecordExperience(env, tmp_path / "a.exp")
    expstore.Writer(tmp_path / "a.exp").close()  # nobody holds it


def test_a_single_environment(tmp_path: Path) -> None:
    env = RecordExperience(
        Counting(1, 3, nested=True), tmp_path / "a.exp", info=["place"], metadata={"policy": "p"}
    )
    env.reset(seed=5, options={"level": np.int64(2)})
    for step in range(3):
        env.step(step)
    with pytest.raises(WriterStateError, match=r"call reset\(\) first"):
        env.step(0)
    env.reset()
    env.step(8)
    env.reset()  # breaks it off
    env.reset()  # nothing to store
    env.step(9)
    env.close()
    env.close()
    store = expstore.open(tmp_path / "a.exp")
    assert store.episodes["end_reason"].tolist() == ["terminated", "cut", "cut"]
    assert store.episodes["length"].tolist() == [3, 1, 1]
    first = store.episodes[0]
    assert (first["seed"], first["options"], first["policy"]) == (5, {"level": 2}, "p")
    assert first["wall_time_s"] >= 0
    assert store.episode(0)["observation"]["a"][:, 0].tolist() == [100, 101, 102, 103]
    assert store.episode(2)["observation"]["b"].tolist() == [0, 1]
    assert store.fields["action"].dtype == "int64"


def test_a_single_environment_that_resets_itself(tmp_path: Path) -> None:
    env = RecordExperience(gymnasium.wrappers.Autoreset(Counting(1, 2)), tmp_path / "a.exp")
    env.reset()
    for step in range(6):
        env.step(step)
    env.close()
    store = expstore.open(tmp_path / "a.exp")
    assert store.read(range(4))["observation"][:, 0].tolist() == [100, 101, 110, 111]
    assert store.read(range(4))["action"].tolist() == [0, 1, 3, 4]


def test_what_an_environment_had_given_before_it_failed_is_kept(tmp_path: Path) -> None:
    class Failing(Counting):
        def step(self, action: Any) -> Any:
            if self.t == 2:
                raise RuntimeError("the simulator died")
            return super().step(action)

    env = RecordExperience(Failing(1, 9), tmp_path / "a.exp")
    env.reset()
    env.step(0), env.step(1)
    with pytest.raises(RuntimeError, match="the simulator died"):
        env.step(2)
    env.reset()
    env.step(3)
    env.close()
    store = expstore.open(tmp_path / "a.exp")
    assert store.episodes["end_reason"].tolist() == ["incomplete", "cut"]
    assert store.episode(0)["observation"][:, 0].tolist() == [100, 101, 102]


def test_an_episode_that_could_not_be_written_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = RecordExperience(Counting(1, 2), tmp_path / "a.exp", commit_interval_s=1e9)
    env.reset()
    env.step(0)
    with monkeypatch.context() as patch:

        def full(*args: Any, **metadata: Any) -> Any:
            raise StorageError(28, "no space left on device")

        patch.setattr(expstore.Writer, "append", full)
        with pytest.raises(StorageError):
            env.step(1)
    env.reset()
    env.step(2), env.step(3)
    env.close()
    store = expstore.open(tmp_path / "a.exp")
    assert store.read(range(4))["observation"][:, 0].tolist() == [100, 101, 110, 111]
    assert store.read(range(4))["action"].tolist() == [0, 1, 2, 3]


def test_long_and_short_episodes_side_by_side(tmp_path: Path) -> None:
    env = SyncVectorEnv([lambda: Counting(1, 1), lambda: Counting(2, 700)])
    recorder = RecordExperience(env, tmp_path / "a.exp")
    recorder.reset()
    for step in range(1500):
        recorder.step(np.full(2, step % 1000))
    recorder.close()
    store = expstore.open(tmp_path / "a.exp")
    assert sorted(set(store.episodes["length"].tolist())) == [1, 98, 700]
    long = store.filter(lambda row: row["env_number"] == 1)
    for number in long.episode_numbers.tolist():
        assert np.all(np.diff(store.episode(number)["observation"][:, 0]) == 1)


def test_info_that_is_not_always_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"info 'speed' is to be recorded, .* has place"):
        env = RecordExperience(Counting(1, 2), tmp_path / "a.exp", info=["speed"])
        env.reset()
        env.step(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_gets_the_rows(tmp_path: Path, mode: AutoresetMode) -> None:
    pytest.importorskip("torch")
    from expstore.buffer import ReplayBuffer

    buffer = ReplayBuffer(
        {"type": "ReplayBuffer", "capacity": 1000},
        path=tmp_path / "a.exp",
        obs_preprocessor=lambda observation: observation * 2,
    )
    buffer.init()
    env = Recorder(vector(mode), buffer)
    run(env, 12, mode)
    env.close()
    found = {
        (buffer[at]["observation"].item(), buffer[at]["next_observation"].item())
        for at in range(len(buffer))
    }
    assert all(following == before + 2 for before, following in found)
    assert len(buffer) == (17 if mode == AutoresetMode.NEXT_STEP else 24)
    buffer.close()


def test_stable_baselines_trains_through_it(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    env = RecordExperience(gymnasium.make("CartPole-v1"), tmp_path / "a.exp", durable=False)
    sb3.PPO("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=1, seed=0).learn(128)
    env.close()
    store = expstore.open(tmp_path / "a.exp")
    assert store.num_steps == 128
    assert set(store.episodes["end_reason"][:-1].tolist()) == {"terminated"}
    assert store.episodes[0]["env_id"] == "CartPole-v1"


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_reach_a_buffer_as_the_true_transitions(
    tmp_path: Path, mode: AutoresetMode
) -> None:
    pytest.importorskip("torch")
    from expstore.buffer import ReplayBuffer

    buffer = ReplayBuffer({"type": "ReplayBuffer", "capacity": 1000}, path=tmp_path / "a.exp")
    buffer.init()
    env = Recorder(vector(mode, nested=True), buffer)
    run(env, 12, mode)
    env.close()
    for at in range(len(buffer)):
        row = buffer[at]
        assert row["next_observation"]["a"].item() == row["observation"]["a"].item() + 1
        assert row["next_observation"]["b"].item() == row["observation"]["b"].item() + 1
        assert row["reward"].item() == row["next_observation"]["a"].item()
    assert len(buffer) == (17 if mode == AutoresetMode.NEXT_STEP else 24)
    buffer.close()


def test_a_loop_of_one_file_records_through_it(tmp_path: Path) -> None:
    """The shape of CleanRL's scripts: `RecordEpisodeStatistics`, a vector, arrays of (T, E)."""
    envs = gymnasium.make_vec(
        "CartPole-v1",
        2,
        vectorization_mode="sync",
        wrappers=[gymnasium.wrappers.RecordEpisodeStatistics],
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    envs = RecordExperience(envs, tmp_path / "a.exp", durable=False)
    rng = np.random.default_rng(0)
    rewards = np.zeros((100, envs.num_envs))
    dones = np.zeros((100, envs.num_envs), bool)
    returns = []
    envs.reset(seed=1)
    for step in range(100):
        action = rng.integers(0, 2, envs.num_envs)
        _, rewards[step], terminations, truncations, infos = envs.step(action)
        dones[step] = terminations | truncations
        if "final_info" in infos:
            episode = infos["final_info"]["episode"]
            returns += episode["r"][infos["final_info"]["_episode"]].tolist()
    envs.close()

    store = expstore.open(tmp_path / "a.exp")
    ended = store.episodes["end_reason"] != "cut"
    assert store.num_steps == rewards.size
    assert ended.sum() == dones.sum() == len(returns) > 2
    assert store.episodes["return"][ended].tolist() == returns


KILLED = """
import gymnasium, os, signal, sys
from expstore.ingest import RecordExperience
env = RecordExperience(gymnasium.make("CartPole-v1"), sys.argv[1], commit_interval_s=0)
env.reset(seed=0)
while env.recording.num_episodes < 3:
    if any(env.step(0)[2:4]):
        env.reset()
env.step(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_every_finished_episode(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a.exp")], check=False)
    store = expstore.open(tmp_path / "a.exp")
    assert store.num_episodes == 3
    assert set(store.episodes["end_reason"].tolist()) == {"terminated"}


def test_nothing_is_left_open_in_the_system(tmp_path: Path) -> None:
    env = RecordExperience(Counting(1, 2), tmp_path / "a.exp")
    env.close()
    assert files.size(tmp_path / "a.exp/zarr.json")
    expstore.Writer(tmp_path / "a.exp").close()
