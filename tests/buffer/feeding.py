"""Buffers, and the rows that tests feed them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expstore.buffer import (
    DataBuffer,
    EnvMeta,
    EnvRet,
    PolicyResponse,
    ReplayBuffer,
    build_data_buffer,
)

Functions = dict[str, Any]


def config(type: str = "ReplayBuffer", capacity: int = 1000, **options: Any) -> dict[str, Any]:
    storage = {
        name: options.pop(name)
        for name in ("mode", "unit", "device", "commit_interval_s")
        if name in options
    }
    return {"type": type, "capacity": capacity, "storage": storage, **options}


def opened(
    path: Path | None,
    type: str = "ReplayBuffer",
    *,
    functions: Functions | None = None,
    metas: list[EnvMeta] | None = None,
    journal: bool | None = None,
    **options: Any,
) -> DataBuffer:
    buffer = build_data_buffer(
        type, config(type, **options), **(functions or {}), path=path, journal=journal
    )
    buffer.init(metas)
    return buffer


def env_ret(number: float, env_id: str = "env", end: str = "", **more: Any) -> EnvRet:
    """An observation [number, number], and a reward of the same number."""
    flags = {"last_terminated": end == "terminated", "last_truncated": end == "truncated"}
    observation = np.array([number, number], np.float32)
    return EnvRet(env_id, observation, last_reward=float(number), **flags, **more)


def response(number: int, env_id: str = "env", **more: Any) -> PolicyResponse:
    return PolicyResponse(env_id, action=int(number), **more)


def feed(
    buffer: DataBuffer,
    numbers: Iterable[float],
    env_id: str = "env",
    *,
    end: str = "",
    cut: bool = False,
    **more: Any,
) -> None:
    """Rows with these numbers; the last one has the flag `end`, or is cut inline."""
    numbers = list(numbers)
    for number in numbers:
        is_last = number == numbers[-1]
        buffer.add_transition(
            env_id,
            env_ret(number, env_id, end if is_last else ""),
            response(int(number), env_id, **more),
            truncated=cut and is_last,
        )


def feed_episode(buffer: DataBuffer, first: int, length: int, env_id: str = "env") -> None:
    """An episode of `length` transitions with the numbers from `first` on."""
    feed(buffer, range(first, first + length + 1), env_id, cut=True)


def numbers_of(buffer: DataBuffer, key: str = "observation") -> list[float]:
    """The first number of each transition's `key`, in order."""
    rows = buffer.get_all()[key]
    return list(rows.reshape(len(rows), -1)[:, 0].tolist())


def tensors(**columns: Any) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(values) for name, values in columns.items()}


def replay(path: Path, **options: Any) -> DataBuffer:
    buffer = opened(path, **options)
    assert isinstance(buffer, ReplayBuffer)
    return buffer
