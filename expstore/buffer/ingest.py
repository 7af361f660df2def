"""Ingest: from rows as they come to finished episodes in the storage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from expstore.buffer.columns import end_of, one_environment, split_at_flags, to_stored
from expstore.buffer.episode_storage import EpisodeStorage, Finished
from expstore.buffer.journal import Journal, Quarantine, QuarantinedEpisode
from expstore.buffer.open_episodes import OpenEpisode
from expstore.buffer.postprocess import RawEpisode, default_postprocess_fn, to_device
from expstore.buffer.trees import rows_of, spread_defaults
from expstore.buffer.types import EnvMeta, EnvRet, PolicyResponse
from expstore.errors import (
    ArgumentTypeError,
    CapacityError,
    PostprocessError,
    SchemaError,
    UnknownEnvError,
)
from expstore.storage.fingerprint import name_of

logger = logging.getLogger("expstore.buffer")

MIN_ROWS = 2  # a reset and what the first step led to: one transition


class FirstError:
    """Goes on after episodes that are in quarantine, and raises the first error at the end."""

    def __init__(self) -> None:
        self.first: PostprocessError | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except PostprocessError as error:
            self.first = self.first or error

    def __enter__(self) -> FirstError:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self.first is not None:
            raise self.first


@dataclass
class Report:
    """What a buffer left out, split or noticed; nothing of it is silent.

    Attributes:
        empty_episodes: cut before their first step, and so not stored.
        split_episodes: more than the cuts, since a stream went on after a flag.
        replaced_half_rows: an EnvRet came before the last one was answered.
        eval_rows: rows given with `is_eval`.
        messages: what opening found: lost or recovered episodes, changed functions.
    """

    empty_episodes: int = 0
    split_episodes: int = 0
    replaced_half_rows: int = 0
    eval_rows: int = 0
    messages: list[str] = field(default_factory=list)

    def note(self, message: str) -> None:
        self.messages.append(message)
        logger.warning(message)


class Ingest:
    """The open episodes of all environments, and the way of finished ones into the storage.

    Args:
        functions: the customisation points by name.
        journal: None to keep open episodes in memory only.
        fingerprint: of the postprocess function, for the metadata.
    """

    def __init__(
        self,
        storage: EpisodeStorage,
        functions: Mapping[str, Callable[..., Any]],
        journal: Journal | None,
        report: Report,
        *,
        auto: bool,
        device: torch.device,
        fingerprint: str,
    ) -> None:
        self._storage, self._journal, self.report = storage, journal, report
        self._auto, self._device, self._fingerprint = auto, device, fingerprint
        self._functions = functions
        self._preprocess = functions["preprocess_fn"]
        self._points = tuple(
            functions[name]
            for name in (
                "obs_preprocessor",
                "reward_preprocessor",
                "env_ret_preprocess_fn",
                "policy_resp_preprocess_fn",
            )
        )
        self._open: dict[str, OpenEpisode] = {}
        self._pending: dict[str, dict[str, Any]] = {}  # half-rows: env -> row
        self._ended: set[str] = set()  # environments whose last episode is cut already
        self._known: dict[str, int] = {}  # env -> num_envs, where metadata was given
        self._uncommitted: list[str] = []  # uids whose journal goes after the next commit
        self.quarantine = Quarantine(storage.directory / "quarantine")

    # -- environments ----------------------------------------------------------------------------

    def know(self, metas: list[EnvMeta]) -> None:
        """Environments, and how many each steps at once; others are refused from now on."""
        self._known.update({meta.env_id: meta.num_envs for meta in metas})

    def num_envs_of(self, env_id: str) -> int:
        """How many environments step under this id.

        Raises:
            UnknownEnvError: metadata was given, but not for this one.
        """
        if not self._known:
            return 1
        if env_id in self._known:
            return self._known[env_id]
        parent, _, at = env_id.rpartition("/")
        if parent in self._known and at.isdecimal() and int(at) < self._known[parent]:
            return 1
        raise UnknownEnvError(
            f"env {env_id!r} is not among {', '.join(map(repr, self._known))}, which init was "
            "given; add its EnvMeta"
        )

    @property
    def open_rows(self) -> dict[str, int]:
        """Rows of each open episode."""
        return {env_id: episode.num_rows for env_id, episode in self._open.items()}

    # -- rows ------------------------------------------------------------------------------------

    def add(
        self,
        env_ret: EnvRet,
        policy_resp: PolicyResponse | None,
        *,
        cut: bool,
        end_reason: str = "cut",
    ) -> None:
        """A row; without an answer of the policy it is the last one of its episode."""
        env_id = env_ret.env_id
        if env_id in self._pending:
            raise SchemaError(
                f"env {env_id!r} has an EnvRet waiting for its answer; answer it with "
                "add_data_async first"
            )
        if not cut and not env_ret.is_first and policy_resp is not None:
            self._add_row(env_id, self._row(env_id, env_ret, policy_resp))
            return
        with FirstError() as errors:
            if env_ret.is_first:
                with errors.kept():
                    self.cut(env_id)
            row = self._row(env_id, env_ret, policy_resp)
            with errors.kept():
                self._add_row(env_id, row, is_final=policy_resp is None)
            if cut or policy_resp is None:
                with errors.kept():
                    self.cut(env_id, end_reason=end_reason)

    def add_half(self, env_id: str, half: Any, *, cut: bool) -> None:
        """An EnvRet, or the policy's answer to it."""
        if isinstance(half, EnvRet):
            if half.is_first and env_id not in self._pending:
                self.cut(env_id)
            row = self._row(env_id, half, None)
            if env_id in self._pending:
                self._replace_pending(env_id, half)
            self._pending[env_id] = row
        elif isinstance(half, PolicyResponse):
            if env_id not in self._pending:
                raise SchemaError(
                    f"the PolicyResponse of env {env_id!r} answers nothing: there is no EnvRet "
                    "before it, or it was answered already"
                )
            row = dict(self._pending[env_id])
            self._add_row(env_id, self._row(env_id, None, half, row))
            self._pending.pop(env_id, None)
        else:
            raise ArgumentTypeError(
                f"data must be an EnvRet or a PolicyResponse, got {type(half).__name__}"
            )
        if cut:
            self.cut(env_id)

    def _replace_pending(self, env_id: str, half: EnvRet) -> None:
        """A second EnvRet without an answer: the first is the last row of its episode, or lost."""
        pending = self._pending[env_id]
        ended = any(_any(pending.get(key)) for key in ("last_terminated", "last_truncated"))
        if ended or half.is_first:
            self.cut(env_id)
            return
        self.report.replaced_half_rows += 1
        logger.warning(
            "an EnvRet of env %r replaces one that no PolicyResponse has answered", env_id
        )

    def _row(
        self,
        env_id: str,
        env_ret: EnvRet | None,
        policy_resp: PolicyResponse | None,
        row: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One row, preprocessed."""
        num_envs = self.num_envs_of(env_id)
        observe, reward, of_env, of_policy = self._points
        if env_ret is not None:
            reward = self._counting(reward, env_id, num_envs)
        row = self._preprocess(
            {} if row is None else row, env_ret, policy_resp, observe, reward, of_env, of_policy
        )
        if not isinstance(row, dict) or not row:
            raise SchemaError(f"a preprocess function must return a row's fields, got {row!r}")
        return row

    def _counting(self, reward: Any, env_id: str, num_envs: int) -> Any:
        """The reward preprocessor without the dummy rewards of resets in its statistics."""
        if not hasattr(reward, "frozen"):
            return reward
        ids = [env_id]
        if num_envs > 1 and self._auto:
            ids = [f"{env_id}/{at}" for at in range(num_envs)]
        counted = [i in self._open and not self._open[i].at_start for i in ids]
        if all(counted):
            return reward
        if any(counted):
            return partial(reward.masked, counted=counted)
        return reward.frozen

    def _add_row(self, env_id: str, row: dict[str, Any], *, is_final: bool = False) -> None:
        num_envs = self.num_envs_of(env_id)
        if num_envs == 1 or not self._auto:
            self._add_one(env_id, row, num_envs, is_final)
            return
        rows = {f"{env_id}/{at}": own for at, own in enumerate(rows_of(row, num_envs, env_id))}
        for sub, own in rows.items():
            if sub in self._open and not is_final:
                self._open[sub].check(own)
        with FirstError() as errors:
            for sub, own in rows.items():
                with errors.kept():
                    self._add_one(sub, own, 1, is_final)

    def _add_one(self, env_id: str, row: dict[str, Any], num_envs: int, is_final: bool) -> None:
        episode = self._open.get(env_id)
        if episode is not None and self._auto and episode.ends:
            self.cut(env_id)  # it ended before, but could not be stored
            episode = None
        if episode is None:
            episode = OpenEpisode(env_id, num_envs)
        if is_final and episode.num_rows:
            whole = episode.completed(row)
            episode.policy_valid = len(whole) == len(row)
            row = whole
        ended = episode.check(row)
        if self._journal is not None:
            self._journal.add(episode, row)
        episode.append(row, ended)
        self._open[env_id] = episode
        if ended is not None and self._auto:
            self.cut(env_id)

    # -- cuts ------------------------------------------------------------------------------------

    def check_cut(self, env_id: str) -> None:
        """Refuse to cut where nothing is open, and nothing has just ended by itself.

        Raises:
            UnknownEnvError: names the environment.
        """
        known = {env_id, *self._subs(env_id)}
        if env_id in self._pending or known & (self._open.keys() | self._ended):
            return
        raise UnknownEnvError(
            f"env {env_id!r} has no open episode; add a row first, or cut with missing_ok=True"
        )

    def cut(self, env_id: str, *, end_reason: str = "cut", missing_ok: bool = True) -> None:
        """End the episode of an environment, or those of its sub-environments.

        Raises:
            UnknownEnvError: there is none, and it must not be missing.
            PostprocessError: it is in quarantine.
            CapacityError: it has no room, and stays open.
        """
        if not missing_ok:
            self.check_cut(env_id)
        with FirstError() as errors:
            pending = self._pending.pop(env_id, None)
            if pending is not None and self._targets(env_id):
                with errors.kept():
                    self._add_row(env_id, pending, is_final=True)
            elif pending is not None:
                self.report.empty_episodes += 1
            for target in self._targets(env_id):
                with errors.kept():
                    self._finish(target, end_reason)

    def has_open(self, env_id: str) -> bool:
        """Whether there is something to cut."""
        return env_id in self._pending or bool(self._targets(env_id))

    def forget_end(self, env_id: str) -> None:
        """The caller has cut it: a second cut without rows in between is a mistake."""
        self._ended -= {env_id, *self._subs(env_id)}

    def cut_all(self, end_reason: str = "cut") -> None:
        """End every open episode."""
        with FirstError() as errors:
            for env_id in list({**self._open, **self._pending}):
                with errors.kept():
                    self.cut(env_id, end_reason=end_reason)

    def drop_open(self) -> None:
        """Forget every open episode."""
        for episode in self._open.values():
            if self._journal is not None:
                self._journal.remove(episode.uid)
        self._open.clear()
        self._pending.clear()

    def _subs(self, env_id: str) -> list[str]:
        return [f"{env_id}/{at}" for at in range(self._known.get(env_id, 0))]

    def _targets(self, env_id: str) -> list[str]:
        return [name for name in (env_id, *self._subs(env_id)) if name in self._open]

    def _finish(self, env_id: str, end_reason: str) -> None:
        """Postprocess and store an open episode; it is forgotten only then."""
        episode = self._open[env_id]
        finished: list[Finished] = []
        failed: list[tuple[OpenEpisode, str, Exception]] = []
        pieces = list(episode.pieces(end_reason))
        for num_envs, raw in pieces:
            try:
                finished += self._processed(raw, num_envs)
            except Exception as error:
                own = episode if len(pieces) == 1 else _episode_of(raw, num_envs)
                failed.append((own, raw.end_reason, error))
        try:
            if finished:
                self._storage.push(finished)
        except CapacityError:
            raise
        except SchemaError as error:
            failed = [(episode, end_reason, error)]
        errors = [self._to_quarantine(*failure) for failure in failed]
        self.report.split_episodes += max(0, len(pieces) - max(1, episode.num_envs))
        del self._open[env_id]
        self._ended.add(env_id)
        self._uncommitted.append(episode.uid)
        if self._journal is not None:
            self._journal.close(episode.uid)
        if errors:
            raise errors[0]

    def _processed(self, raw: RawEpisode, num_envs: int) -> list[Finished]:
        if raw.num_rows < MIN_ROWS:
            self.report.empty_episodes += 1
            return []
        if num_envs > 1:
            spread_defaults(raw)
        columns = self._postprocessed(raw)
        if num_envs == 1:
            return [self._finished(columns, raw, raw.env_id)]
        parts = [one_environment(columns, at, num_envs) for at in range(num_envs)]
        return [self._finished(p, raw, f"{raw.env_id}/{at}") for at, p in enumerate(parts)]

    def _postprocessed(self, raw: RawEpisode) -> Any:
        function = self._functions["postprocess_fn"]
        if function is default_postprocess_fn and self._device.type == "cpu":
            return default_postprocess_fn(raw)
        columns = function(to_device(raw, self._device))
        if not isinstance(columns, Mapping) or not columns:
            raise SchemaError(f"it must return a dict of columns, got {columns!r}")
        return columns

    def _finished(self, columns: Mapping[str, Any], raw: RawEpisode, env_id: str) -> Finished:
        metadata = {"uid": raw.uid, "env_id": env_id, "postprocess": self._fingerprint}
        return Finished(columns, end_of(columns, raw.end_reason), metadata)

    def add_finished(
        self, episode: Mapping[str, Any], num_envs: int, env_id: str | None, reason: str
    ) -> None:
        """An episode that needs no processing; one with flags inside is split there."""
        to_stored(episode)  # refuses what is no mapping of columns
        wholes = [episode]
        if num_envs > 1:
            wholes = [one_environment(episode, at, num_envs) for at in range(num_envs)]
        finished = []
        for at, whole in enumerate(wholes):
            name = f"{env_id}/{at}" if env_id is not None and num_envs > 1 else env_id
            metadata = {} if name is None else {"env_id": name}
            parts = split_at_flags(whole)
            self.report.split_episodes += len(parts) - 1
            finished += [Finished(part, end_of(part, reason), metadata) for part in parts]
        self._storage.push(finished)

    # -- quarantine and journal ------------------------------------------------------------------

    def _to_quarantine(
        self, episode: OpenEpisode, end_reason: str, error: Exception
    ) -> PostprocessError:
        function = name_of(self._functions["postprocess_fn"])
        self.quarantine.add(episode, end_reason, function, error)
        raised = PostprocessError(
            f"{function} failed on the episode {episode.uid} of env {episode.env_id!r} with "
            f"{episode.num_rows} rows: {type(error).__name__}: {error}; its rows are in "
            "quarantine: mend the function and call retry_quarantine()"
        )
        raised.__cause__ = error
        return raised

    def retry(self, kept: QuarantinedEpisode, function: Callable[..., Any] | None) -> None:
        """Store an episode out of the quarantine, by another function if one is given."""
        before = self._functions
        if function is not None:
            self._functions = {**before, "postprocess_fn": function}
        try:
            pieces = kept.episode.pieces(kept.end_reason)
            finished = [f for num_envs, raw in pieces for f in self._processed(raw, num_envs)]
            if finished:
                self._storage.push(finished)
        except CapacityError:
            raise
        except Exception as error:
            name = name_of(self._functions["postprocess_fn"])
            raise PostprocessError(
                f"{name} failed again on the episode {kept.uid} of env {kept.env_id!r}: "
                f"{type(error).__name__}: {error}; it stays in quarantine"
            ) from error
        finally:
            self._functions = before

    def recover(self, episode: OpenEpisode) -> None:
        """Store an episode of the journal as incomplete; in quarantine if that fails."""
        self._open[episode.env_id] = episode
        try:
            self._finish(episode.env_id, "incomplete")
        except CapacityError as error:
            del self._open[episode.env_id]
            raise self._to_quarantine(episode, "incomplete", error) from error
        self._ended.clear()

    def close(self) -> None:
        """Let the files go."""
        if self._journal is not None:
            self._journal.close_all()

    def committed(self) -> None:
        """What was pushed is in the store: its journals are not needed any more."""
        if self._journal is not None:
            for uid in self._uncommitted:
                self._journal.remove(uid)
        self._uncommitted.clear()


def _episode_of(raw: RawEpisode, num_envs: int) -> OpenEpisode:
    episode = OpenEpisode(raw.env_id, num_envs)
    for at in range(raw.num_rows):
        episode.add({key: values[at] for key, values in raw.items()})
    episode.policy_valid = raw.policy_valid
    return episode


def _any(flag: Any) -> bool:
    if isinstance(flag, Mapping):
        return bool(flag) and all(map(_any, flag.values()))
    if flag is None or isinstance(flag, bool):
        return bool(flag)
    return bool(torch.as_tensor(flag).any())
