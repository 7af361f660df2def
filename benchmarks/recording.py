"""Recording: rows handed over one by one, and environments that are recorded while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from benchmarks.experience import NEVER_S, Columns, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Goal, Mismatch, Result, ratio
from benchmarks.run import Run

ENV_ID, NUM_ENVS = "HalfCheetah-v5", 8
BUFFER = "expstore DataBuffer.add_transition"
STREAM = "expstore Writer.episode().add"
TORCHRL = "TorchRL ReplayBuffer.add, LazyMemmapStorage"
CPPRB = "cpprb ReplayBuffer.add, in memory"
BARE, RECORDED = "environments alone", "environments in expstore RecordExperience"


@dataclass(frozen=True)
class Size:
    """What a turn hands over, and how often."""

    num_episodes: int
    episode_steps: int
    env_steps: int  # of all environments together, in a turn
    rounds: int


SIZES = {
    "full": Size(10, 1000, 500, rounds=7),
    "quick": Size(5, 1000, 200, rounds=4),
    "tiny": Size(2, 20, 5, rounds=1),
}


def run_step_by_step(folder: Path, run: Run) -> Result:
    """Steps per second of episodes that come row by row, until they are committed."""
    size = run.of(SIZES)
    episodes = list(vectors(size.num_episodes * size.episode_steps, size.episode_steps).episodes())
    closing = ExitStack()
    contestants: dict[str, Callable[[], Any]] = {
        BUFFER: into_buffer(episodes, folder / "buffer.exp", closing),
        STREAM: into_stream(episodes, folder / "stream.exp", closing),
    }
    if run.wants("torchrl"):
        contestants[TORCHRL] = into_torchrl(episodes[:1], folder / "torchrl")
    if run.wants("cpprb"):
        contestants[CPPRB] = into_cpprb(episodes)
    with closing:
        seconds = timed_in_turns(contestants, rounds=size.rounds)
    check_stored(folder / "buffer.exp", episodes, BUFFER)
    check_stored(folder / "stream.exp", episodes, STREAM)
    num_steps = size.num_episodes * size.episode_steps
    counts = dict.fromkeys(contestants, num_steps) | {TORCHRL: size.episode_steps}
    figures = [
        Figure.of(n, [counts[n] / s for s in values], "steps/s") for n, values in seconds.items()
    ]
    goal = Goal("add_transition", figures[0].median, 100_000, at_most=False, unit="steps/s")
    about = (
        f"{size.num_episodes} episodes of {size.episode_steps:,} steps, 17+6 float32, reward, two "
        "flags, row by row; a turn ends with a commit"
    )
    return Result("step-by-step", about, figures, [goal])


def into_buffer(episodes: list[Columns], path: Path, closing: ExitStack) -> Callable[[], Any]:
    """Rows as an environment and a policy give them, made before the clock starts."""
    from expstore.buffer import EnvRet, PolicyResponse, ReplayBuffer

    buffer = ReplayBuffer({"type": "ReplayBuffer", "capacity": 1 << 30}, path=path)
    buffer.init()
    closing.callback(buffer.close)
    handed = [list(rows_of(episode, EnvRet, PolicyResponse)) for episode in episodes]

    def add() -> int:
        for rows in handed:
            for env_ret, answer in rows:
                buffer.add_transition("env", env_ret, answer)
            buffer.truncate_one_episode("env")
        return buffer.size()

    return add


def rows_of(episode: Columns, env_ret: Any, answer: Any) -> Any:
    """T + 1 rows: each with the reward and the flags of the step before it.

    The observation after the last step is the last one again: it makes the row of the last step.
    """
    observation, action, reward = (episode[n] for n in ("observation", "action", "reward"))
    for t in range(len(reward) + 1):
        at, before = min(t, len(reward) - 1), max(t - 1, 0)
        is_end = bool(t and episode["truncated"][before])
        row = env_ret(
            "env",
            observation[at],
            last_reward=float(reward[before]) if t else 0.0,
            last_terminated=False,
            last_truncated=is_end,
        )
        yield row, answer("env", action=action[at])


def into_stream(episodes: list[Columns], path: Path, closing: ExitStack) -> Callable[[], Any]:
    writer = closing.enter_context(expstore.Writer(path, commit_interval_s=NEVER_S))
    handed = [by_row(episode) for episode in episodes]

    def add() -> int:
        for rows in handed:
            with writer.episode() as episode:
                for row in rows:
                    episode.add(row)
        return writer.commit()

    return add


def into_torchrl(episodes: list[Columns], folder: Path) -> Callable[[], Any]:
    import torch

    from benchmarks.peers.torchrl import quiet

    with quiet():
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, ReplayBuffer

        buffer = ReplayBuffer(storage=LazyMemmapStorage(1_000_000, scratch_dir=folder))
    rows = [
        TensorDict({name: torch.as_tensor(value) for name, value in row.items()}, [])
        for episode in episodes
        for row in by_row(episode)
    ]

    def add() -> None:
        for row in rows:
            buffer.add(row)

    return add


def into_cpprb(episodes: list[Columns]) -> Callable[[], Any]:
    import cpprb

    described = {n: {"shape": c.shape[1:] or 1, "dtype": c.dtype} for n, c in episodes[0].items()}
    buffer = cpprb.ReplayBuffer(1_000_000, described)
    handed = [by_row(episode) for episode in episodes]

    def add() -> None:
        for rows in handed:
            for row in rows:
                buffer.add(**row)
            buffer.on_episode_end()

    return add


def by_row(episode: Columns) -> list[dict[str, Any]]:
    return [{n: c[t] for n, c in episode.items()} for t in range(len(episode["reward"]))]


def check_stored(path: Path, episodes: list[Columns], name: str) -> None:
    """The episodes of the first turn are in the store.

    Raises:
        Mismatch: names the contestant and the field.
    """
    store = expstore.open(path)
    for number, episode in enumerate(episodes):
        found = store.episode(number)
        for field in ("observation", "action", "reward"):
            rows = found[field][: len(episode[field])]
            if not np.array_equal(rows, episode[field]):
                raise Mismatch(f"{name} does not store field {field!r} of episode {number}")


def run_record(folder: Path, run: Run) -> Result:
    """Vectorised MuJoCo environments stepped, without and with recording."""
    size = run.of(SIZES)
    about = f"{NUM_ENVS} {ENV_ID} in a vector, {size.env_steps:,} steps of all per turn"
    recorder = recording_wrapper()
    if recorder is None:
        print("  there is no RecordExperience; left out", file=sys.stderr)
        return Result("record", about, [], [])
    bare, recorded = environments(), recorder(environments(), folder / "recorded.exp")
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (size.env_steps, NUM_ENVS, 6)).astype(np.float32)
    for each in (bare, recorded):
        each.reset(seed=0)
    seconds = timed_in_turns(
        {BARE: lambda: stepped(bare, actions), RECORDED: lambda: stepped(recorded, actions)},
        rounds=size.rounds,
    )
    recorded.close()
    bare.close()
    num_steps = size.env_steps * NUM_ENVS
    figures = [Figure.of(n, [num_steps / s for s in v], "steps/s") for n, v in seconds.items()]
    times = [Figure.of(n, v, "s") for n, v in seconds.items()]
    return Result("record", about, figures, ratio("recorded / alone", times, RECORDED, BARE, 1.1))


def recording_wrapper() -> Any:
    try:
        from expstore.ingest import RecordExperience  # type: ignore[attr-defined]
    except ImportError:
        return None
    return RecordExperience


def environments() -> Any:
    import gymnasium

    return gymnasium.make_vec(ENV_ID, NUM_ENVS, vectorization_mode="sync")


def stepped(environment: Any, actions: Any) -> None:
    for action in actions:
        environment.step(action)
