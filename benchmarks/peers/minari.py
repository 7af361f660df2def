"""Minari: whole episodes, of which a window is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experience import Columns, Experience

THEIRS = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}


def storage_of(path: Path, observation: Columns, data_format: str = "hdf5") -> Any:
    """An empty storage for fields of these shapes."""
    from gymnasium.spaces import Box
    from minari.dataset.minari_storage import MinariStorage

    path.mkdir()
    spaces = [
        Box(-np.inf, np.inf, observation[name].shape[1:], observation[name].dtype)
        for name in ("observation", "action")
    ]
    return MinariStorage.new(path, *spaces, data_format=data_format)


def buffer_of(episode: Columns, seed: int, as_given: Any = np.asarray) -> Any:
    """An episode as Minari takes it."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    columns = {theirs: as_given(episode[ours]) for ours, theirs in THEIRS.items()}
    return EpisodeBuffer(seed=seed, **columns)


def columns_of(episode: Any) -> Columns:
    """An episode that Minari gave, by our names."""
    return {ours: np.asarray(episode[theirs]) for ours, theirs in THEIRS.items()}


class Episodes:
    """Reads the episode of each window through its HDF5 storage: it has no smaller unit."""

    def __init__(self, experience: Experience, path: Path, batch_size: int, length: int):
        self.experience = experience
        self.shape = batch_size, length
        self.rng = np.random.default_rng(1)
        self.storage = storage_of(path, experience.columns)
        buffers = [buffer_of(episode, seed) for seed, episode in enumerate(experience.episodes())]
        self.storage.update_episodes(buffers)

    def sample(self) -> Any:
        return self.read(self.rng.integers(0, self.experience.num_steps, self.shape[0]))

    def read(self, anchors: Any) -> Any:
        size = self.experience.episode_steps
        wanted: list[int] = (anchors // size).tolist()
        found = self.storage.get_episodes(wanted)
        rows = self.experience.rows(anchors, self.shape[1]) % size
        windows = [
            {name: column[at] for name, column in columns_of(episode).items()}
            for episode, at in zip(found, rows, strict=True)
        ]
        return anchors, {name: np.stack([w[name] for w in windows]) for name in THEIRS}

    def anchors(self, batch: Any) -> Any:
        return batch[0]

    def columns(self, batch: Any) -> Columns:
        columns: Columns = batch[1]
        return columns
