"""Recorder: an environment of gymnasium that stores what passes through it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import (
    ExpstoreError,
    MissingExtraError,
    SchemaError,
    SourceError,
    StorageError,
    WriterStateError,
    how_to_install,
)
from expstore.ingest.environments import versions_of
from expstore.ingest.recorded_rows import RecordedRows
from expstore.ingest.recorder import Leaf, leaves
from expstore.storage.writer import Writer

try:
    import gymnasium
    from gymnasium.vector import VectorEnv, VectorWrapper
except ImportError as error:
    raise MissingExtraError(f"recording needs gymnasium; {how_to_install('gym')}") from error

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # as gymnasium spells them
FLAGS = ("terminated", "truncated")


class Buffer(Protocol):
    """A Data Buffer, as far as a recorder needs it."""

    def add_recorded(self, env_id: str, episode: Mapping[str, Any], end_reason: str) -> None:
        """Take in an episode: observations have T + 1 rows, everything else T."""
        ...


def record(
    env: Any,
    target: Writer | Buffer,
    *,
    info: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """See `expstore.ingest.Recorder`."""
    kind = VectorRecorder if isinstance(env, VectorEnv) else SingleRecorder
    return kind(env, target, info=info, metadata=metadata)


def record_to(path: str | os.PathLike[str], env: Any, **options: Any) -> Any:
    """See `expstore.ingest.RecordExperience`."""
    writer_options = {k: v for k, v in options.items() if k not in ("info", "metadata")}
    own = {k: v for k, v in options.items() if k in ("info", "metadata")}
    writer = Writer(path, **writer_options)
    try:
        recorder = record(env, writer, **own)
    except BaseException:
        writer.close()
        raise
    recorder.recording.owned = writer
    return recorder


@dataclass(frozen=True)
class Finished:
    """An episode of an environment, ready to be stored."""

    env: int
    data: dict[str, NDArray[Any]]
    reason: str
    metadata: dict[str, Any]


class Recording:
    """The open episodes of E environments that step together, and where finished ones go.

    Attributes:
        num_episodes: stored so far.
        owned: a writer to be closed with the environment.
    """

    def __init__(
        self,
        env: Any,
        target: Writer | Buffer,
        spaces: tuple[Any, Any],
        num_envs: int | None,
        info: Iterable[str],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.observed = leaves("observation", spaces[0])
        self.acted = [
            replace(leaf, dtype=_space_of(spaces[1], leaf).dtype.name)
            for leaf in leaves("action", spaces[1])
        ]
        self.info = tuple(info)
        self.owned: Writer | None = None
        self.num_episodes = 0
        self.row = 0  # that comes next
        count = 1 if num_envs is None else num_envs
        self.rows = RecordedRows(count)
        self._is_vector = num_envs is not None
        self._target = target
        self._start = np.full(count, -1)  # first row of the open episode, -1 if none is
        self._began = [0.0] * count
        self._given: list[dict[str, Any]] = [{} for _ in range(count)]
        self._unsaved: list[Finished] = []
        self._metadata: dict[str, Any] = {"versions": versions_of(env), **(metadata or {})}
        if (spec := getattr(env, "spec", None)) is not None:
            self._metadata["env_id"] = spec.id

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """(E,) whether an episode is open."""
        return np.asarray(self._start >= 0)

    def begin(
        self,
        which: NDArray[np.bool_],
        observation: Sequence[NDArray[Any]],
        given: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Open episodes with their first observations, one array (E, *shape) for each leaf."""
        for env in np.flatnonzero(which & self.is_open).tolist():
            self.end(env, "cut")
        self._make_room()
        for leaf, values in zip(self.observed, observation, strict=True):
            self.rows.put(self.row, leaf.field, values, None if which.all() else which)
        self.opened(which, given)

    def opened(
        self, which: NDArray[np.bool_], given: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Open episodes whose first observations are in their places."""
        now = time.monotonic()
        for env in np.flatnonzero(which).tolist():
            self._start[env], self._began[env] = self.row, now
            self._given[env] = {} if given is None else given[env]

    def act(self, actions: Sequence[NDArray[Any]]) -> None:
        """What is done next; before the environments step, which may change it."""
        self._make_room()
        for leaf, values in zip(self.acted, actions, strict=True):
            self.rows.put(self.row, leaf.field, values)

    def step(self, observation: Sequence[NDArray[Any]], others: Mapping[str, NDArray[Any]]) -> None:
        """What came of it, (E, *shape) each: rewards, flags, info, and what is observed then."""
        for name, values in others.items():
            self.rows.put(self.row, name, values)
        self.row += 1
        for leaf, values in zip(self.observed, observation, strict=True):
            self.rows.put(self.row, leaf.field, values)

    def end(self, env: int, reason: str, final: Mapping[str, Any] | None = None) -> None:
        """Store the open episode of an environment; one without steps is none.

        Args:
            env: its position.
            reason: why it ended, as in `Writer.append`.
            final: the last observation by field, where it is not the newest row; and the info
                of the last step.
        """
        start, self._start[env] = int(self._start[env]), -1
        if start == self.row:
            return
        observed = {leaf.field for leaf in self.observed}
        data: dict[str, Any] = {}
        for name in self.rows.names:
            column = self.rows.column(name, env, start, self.row + (name in observed))
            if final is not None and name in final:
                column = np.array(column)
                column[-1] = final[name]
            data[name] = column
        metadata = {**self._metadata, **self._given[env]}
        if self._is_vector:
            metadata["env_number"] = env
        metadata["wall_time_s"] = round(time.monotonic() - self._began[env], 6)
        self._save(Finished(env, data, reason, metadata))

    def end_all(self, reason: str) -> None:
        """Store all that is open."""
        for env in np.flatnonzero(self.is_open).tolist():
            self.end(env, reason)

    def close(self) -> None:
        """Store what is open as cut, and close a writer of its own."""
        try:
            self.end_all("cut")
            self._save_unsaved()
        finally:
            if self.owned is not None:
                self.owned.close()

    def _save(self, episode: Finished) -> None:
        """Store it, after those that could not be written before."""
        self._unsaved.append(episode)
        try:
            self._save_unsaved()
        except StorageError:
            if self._unsaved:  # its rows will be written over; these are copies
                self._unsaved[-1] = replace(
                    episode, data={name: np.array(rows) for name, rows in episode.data.items()}
                )
            raise

    def _save_unsaved(self) -> None:
        while self._unsaved:
            try:
                self._store(self._unsaved[0])
            except StorageError:
                raise
            except BaseException:
                del self._unsaved[0]  # it will never fit
                raise
            self._stored()

    def _stored(self) -> None:
        del self._unsaved[0]
        self.num_episodes += 1

    def _store(self, episode: Finished) -> None:
        if not isinstance(self._target, Writer):
            self._target.add_recorded(f"env-{episode.env}", episode.data, episode.reason)
            return
        before = self._target.num_episodes
        try:
            self._target.append(episode.data, end_reason=episode.reason, **episode.metadata)
        except StorageError:
            if self._target.num_episodes > before:  # it was the commit after it that failed
                self._stored()
            raise

    def _make_room(self) -> None:
        starts = self._start[self._start >= 0]
        self.rows.make_room(self.row + 1, int(starts.min()) if len(starts) else self.row)


class SingleRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment; also one that resets itself, by gymnasium's `Autoreset`."""

    def __init__(self, env: Any, target: Any, *, info: Iterable[str], metadata: Any) -> None:
        super().__init__(env)
        spaces = env.observation_space, env.action_space
        self.recording = Recording(env, target, spaces, None, info, metadata)
        self._resets_itself = _has_autoreset(env)
        self._is_over = False  # and the next step resets

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._begin(observation, _given(seed, options))
        return observation, info

    def _begin(self, observation: Any, given: dict[str, Any]) -> None:
        self._is_over = False
        values = [v[None] for v in _values(self.recording.observed, observation)]
        self.recording.begin(np.ones(1, bool), values, [given])

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        recording = self.recording
        if self._is_over:  # the action is not used
            result = self.env.step(action)
            self._begin(result[0], {})
            return result
        if not recording.is_open[0]:
            raise WriterStateError("no episode is open to be recorded; call reset() first")
        recording.act([v[None] for v in _values(recording.acted, action)])
        try:
            result = self.env.step(action)
        except BaseException:
            recording.end_all("incomplete")
            raise
        observation, reward, terminated, truncated, info = result
        others = {
            "reward": np.array([reward], np.float64),
            "terminated": np.array([terminated], np.bool_),
            "truncated": np.array([truncated], np.bool_),
        }
        for name in recording.info:
            if name not in info:
                raise _missing(name, info)
            others[f"info/{name}"] = np.asarray(info[name])[None]
        recording.step([v[None] for v in _values(recording.observed, observation)], others)
        if terminated or truncated:
            self._is_over = self._resets_itself
            recording.end(0, "terminated" if terminated else "truncated")
        return result

    def close(self) -> None:
        """Store the open episode as cut, then close the environment."""
        try:
            self.recording.close()
        finally:
            self.env.close()


class VectorRecorder(VectorWrapper[Any, Any, Any, Any, Any]):
    """Several environments that step together, in any of gymnasium's autoreset modes."""

    def __init__(self, env: Any, target: Any, *, info: Iterable[str], metadata: Any) -> None:
        super().__init__(env)
        self._mode = _mode_of(env)
        spaces = env.single_observation_space, env.single_action_space
        self.recording = Recording(env, target, spaces, env.num_envs, info, metadata)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # A mask is used up by the environment.
        mask = None if options is None else options.get("reset_mask")
        which = np.ones(self.num_envs, bool) if mask is None else np.array(mask, bool)
        shown = {k: v for k, v in (options or {}).items() if k != "reset_mask"}
        observation, info = self.env.reset(seed=seed, options=options)
        seeds = _seeds(seed, self.num_envs)
        given = [_given(one, shown or None) for one in seeds]
        self.recording.begin(which, _values(self.recording.observed, observation), given)
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        recording = self.recording
        steps = recording.is_open  # the others are reset, whatever the action
        if not steps.any() and self._mode != NEXT_STEP:
            raise WriterStateError("no episode is open to be recorded; call reset() first")
        recording.act(_values(recording.acted, actions))
        try:
            result = self.env.step(actions)
        except BaseException:
            recording.end_all("incomplete")
            raise
        observation, reward, terminated, truncated, infos = result
        over = steps & (np.asarray(terminated, bool) | np.asarray(truncated, bool))
        others = {
            "reward": np.asarray(reward, np.float64),
            "terminated": np.asarray(terminated, np.bool_),
            "truncated": np.asarray(truncated, np.bool_),
        }
        shown = steps & ~over if self._mode == SAME_STEP else steps
        for name in recording.info:
            others[f"info/{name}"] = _column(infos, name, shown)
        recording.step(_values(recording.observed, observation), others)
        errors = []
        for env in np.flatnonzero(over).tolist():
            try:
                final = self._final(infos, env) if self._mode == SAME_STEP else None
                recording.end(env, "terminated" if terminated[env] else "truncated", final)
            except ExpstoreError as error:  # the others have ended, too
                errors.append(error)
        if self._mode == SAME_STEP:
            recording.opened(over)
        elif self._mode == NEXT_STEP:
            recording.opened(~steps)
        if errors:
            raise errors[0]
        return result

    def _final(self, infos: dict[str, Any], env: int) -> dict[str, Any]:
        """The last observation and info of an episode whose step gave those of the next one."""
        observation = _of_one(infos["final_obs"], env)
        names = [leaf.field for leaf in self.recording.observed]
        final = dict(zip(names, _values(self.recording.observed, observation), strict=True))
        info = _of_one(infos.get("final_info", {}), env)
        for name in self.recording.info:
            if name not in info:
                raise _missing(name, info)
            final[f"info/{name}"] = np.asarray(info[name])
        return final

    def close(self, **kwargs: Any) -> None:
        """Store the open episodes as cut, then close the environments."""
        try:
            self.recording.close()
        finally:
            self.env.close(**kwargs)


def _space_of(space: Any, leaf: Leaf) -> Any:
    for key in leaf.keys:
        space = space[key]
    return space


def _values(parts: Sequence[Leaf], value: Any) -> list[NDArray[Any]]:
    """The value of each leaf of a space, as an array."""
    found = []
    for leaf in parts:
        part = value
        for key in leaf.keys:
            part = part[key]
        found.append(np.asarray(part, leaf.dtype))
    return found


def _of_one(batched: Any, env: int) -> Any:
    """What belongs to one environment: of an array of objects, or of arrays within dicts."""
    if isinstance(batched, Mapping):
        return {
            k: _of_one(v, env)
            for k, v in batched.items()
            if not str(k).startswith("_") and _is_known(batched, k, env)
        }
    if isinstance(batched, tuple):
        return tuple(_of_one(part, env) for part in batched)
    return batched[env]


def _is_known(infos: Mapping[str, Any], name: str, env: int) -> bool:
    mask = infos.get(f"_{name}")
    return mask is None or bool(np.asarray(mask)[env])


def _column(infos: Mapping[str, Any], name: str, steps: NDArray[np.bool_]) -> NDArray[Any]:
    """An entry of vectorized infos (E, *shape), which must be there for these environments."""
    known = np.asarray(infos.get(f"_{name}", name in infos), bool)
    if name not in infos or not np.broadcast_to(known, steps.shape)[steps].all():
        if not steps.any() and name in infos:
            return np.asarray(infos[name])
        raise _missing(name, infos)
    return np.asarray(infos[name])


def _missing(name: str, info: Mapping[str, Any]) -> SchemaError:
    there = ", ".join(str(key) for key in info if not str(key).startswith("_")) or "nothing"
    return SchemaError(
        f"info {name!r} is to be recorded, and this step's info has {there}; record only what "
        "every step has"
    )


def _given(seed: Any, options: dict[str, Any] | None) -> dict[str, Any]:
    """What a reset was asked for, as metadata."""
    given: dict[str, Any] = {} if seed is None else {"seed": int(seed)}
    if options:
        given["options"] = {str(k): _plain(v) for k, v in options.items()}
    return given


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _seeds(seed: Any, num_envs: int) -> list[Any]:
    """The seed of each environment, as gymnasium gives them out."""
    if seed is None:
        return [None] * num_envs
    return list(range(seed, seed + num_envs)) if isinstance(seed, (int, np.integer)) else list(seed)


def _mode_of(env: Any) -> str:
    """How a vector environment resets, as it says itself."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    spelled = str(getattr(mode, "value", mode))
    if spelled not in (NEXT_STEP, SAME_STEP, DISABLED):
        raise SourceError(
            f"{env} does not say how its environments reset; put the mode that it has into "
            'env.metadata["autoreset_mode"], one of gymnasium.vector.AutoresetMode'
        )
    return spelled


def _has_autoreset(env: Any) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return True
        env = env.env
    return False
