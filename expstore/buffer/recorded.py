"""Finished episodes of a recorder, given to a buffer as the rows that they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expstore.buffer.types import EnvRet, PolicyResponse
from expstore.episode import nest


def rows_of(
    env_id: str, episode: Mapping[str, Any]
) -> Iterator[tuple[EnvRet, PolicyResponse | None]]:
    """The T + 1 rows of an episode of T steps; see `DataBuffer.add_recorded`."""
    rows = nest(dict(episode))
    num_steps = len(episode["reward"])
    for step in range(num_steps + 1):
        env_ret = EnvRet(env_id, _row(rows["observation"], step), is_first=step == 0)
        if step:
            env_ret.last_reward = rows["reward"][step - 1]
            env_ret.last_terminated = bool(rows["terminated"][step - 1])
            env_ret.last_truncated = bool(rows["truncated"][step - 1])
            env_ret.info = _row(rows.get("info", {}), step - 1)
        answer = None
        if step < num_steps:
            answer = PolicyResponse(env_id, action=_row(rows["action"], step))
        yield env_ret, answer


def _row(columns: Any, step: int) -> Any:
    if isinstance(columns, Mapping):
        return {name: _row(column, step) for name, column in columns.items()}
    return columns[step]
