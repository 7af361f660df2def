"""Experience made from seeds: dense, every byte written, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import expstore

Columns = dict[str, NDArray[Any]]  # field -> (T, *shape)
NEVER_S = 1e9  # no commit but those asked for


@dataclass(frozen=True)
class Experience:
    """Steps in episodes of equal length, each of which ends truncated."""

    columns: Columns  # field -> (N, *shape)
    episode_steps: int

    @property
    def num_steps(self) -> int:
        return len(self.columns["reward"])

    def rows(self, anchors: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """(B, W) the steps of windows that begin at `anchors` and repeat an episode's last step."""
        last = anchors // self.episode_steps * self.episode_steps + self.episode_steps - 1
        rows: NDArray[np.int64] = np.minimum(anchors[:, None] + np.arange(length), last[:, None])
        return rows

    def episodes(self) -> Iterator[Columns]:
        """Each episode without a final observation, as views."""
        for start in range(0, self.num_steps, self.episode_steps):
            yield {
                name: rows[start : start + self.episode_steps]
                for name, rows in self.columns.items()
            }

    def write(self, path: Path, layout: str = "mapped", *, durable: bool = True) -> expstore.Store:
        """A store of it."""
        with expstore.Writer(
            path, layout=layout, commit_interval_s=NEVER_S, durable=durable
        ) as writer:
            for episode in self.episodes():
                writer.append(episode)
        return expstore.open(path)


def vectors(num_steps: int, episode_steps: int, seed: int = 0) -> Experience:
    """17 + 6 float32, a float32 reward and two flags."""
    rng = np.random.default_rng(seed)
    return Experience(
        {
            "observation": rng.standard_normal((num_steps, 17), np.float32),
            "action": rng.standard_normal((num_steps, 6), np.float32),
            "reward": rng.standard_normal(num_steps, np.float32),
            **flags(num_steps, episode_steps),
        },
        episode_steps,
    )


def scalars(num_steps: int, episode_steps: int, seed: int = 0) -> Experience:
    """One float32 as action, a float32 reward and two flags: small where steps are many."""
    rng = np.random.default_rng(seed)
    return Experience(
        {
            "action": rng.standard_normal((num_steps, 1), np.float32),
            "reward": rng.standard_normal(num_steps, np.float32),
            **flags(num_steps, episode_steps),
        },
        episode_steps,
    )


def frames(num_steps: int, episode_steps: int, seed: int = 0) -> Experience:
    """Frames of 64 x 64 x 3 bytes, a discrete action, a float32 reward and two flags."""
    rng = np.random.default_rng(seed)
    return Experience(
        {
            "observation": rng.integers(0, 256, (num_steps, 64, 64, 3), np.uint8),
            "action": rng.integers(0, 18, num_steps),
            "reward": rng.standard_normal(num_steps, np.float32),
            **flags(num_steps, episode_steps),
        },
        episode_steps,
    )


GAMES = ("Pong", "Breakout", "MsPacman", "Seaquest")


def atari(num_steps: int, episode_steps: int, seed: int = 0) -> Experience:
    """Real frames of four games under random actions, sampled down to 64 x 64 x 3.

    A stretch of `episode_steps` frames counts as one episode.
    """
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    rows, columns = (np.linspace(0, n - 1, 64).astype(int) for n in (210, 160))
    observation = np.empty((num_steps, 64, 64, 3), np.uint8)
    action = np.empty(num_steps, np.int64)
    reward = np.empty(num_steps, np.float32)
    num_stretches = num_steps // episode_steps
    shares = np.array_split(np.arange(num_stretches), len(GAMES))
    for game, share in zip(GAMES, shares, strict=True):
        with gymnasium.make(f"ALE/{game}-v5") as env:
            env.action_space.seed(seed)
            frame, _ = env.reset(seed=seed)
            start = int(share[0]) * episode_steps if len(share) else 0
            for step in range(start, start + len(share) * episode_steps):
                observation[step] = frame[rows][:, columns]
                action[step] = env.action_space.sample()
                frame, reward[step], terminated, truncated, _ = env.step(action[step])
                if terminated or truncated:
                    frame, _ = env.reset()
    filled = num_stretches * episode_steps
    data = {"observation": observation, "action": action, "reward": reward}
    return Experience(
        {**{n: a[:filled] for n, a in data.items()}, **flags(filled, episode_steps)},
        episode_steps,
    )


def flags(num_steps: int, episode_steps: int) -> Columns:
    """Never terminated, truncated at the end of every episode."""
    truncated = np.zeros(num_steps, bool)
    truncated[episode_steps - 1 :: episode_steps] = True
    return {"terminated": np.zeros(num_steps, bool), "truncated": truncated}


def cheetahs(num_episodes: int, episode_steps: int, seed: int = 0) -> list[Columns]:
    """Episodes as HalfCheetah-v5 gives them, with the final observation."""
    rng = np.random.default_rng(seed)
    return [
        {
            "observation": rng.standard_normal((episode_steps + 1, 17)),
            "action": rng.uniform(-1, 1, (episode_steps, 6)).astype(np.float32),
            "reward": rng.standard_normal(episode_steps),
            **flags(episode_steps, episode_steps),
        }
        for _ in range(num_episodes)
    ]
