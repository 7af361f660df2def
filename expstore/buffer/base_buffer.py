"""DataBuffer: rows in, finished episodes on disk, batches out."""

from __future__ import annotations

import atexit
import copy
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic as now
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.buffer.config import BufferConfig, SamplerConfig
from expstore.buffer.episode_storage import EpisodeStorage
from expstore.buffer.ingest import FirstError, Ingest, Report
from expstore.buffer.journal import Journal, Quarantine, read_rows
from expstore.buffer.postprocess import default_postprocess_fn
from expstore.buffer.preprocess import DEFAULTS, check_exclusion, check_same_env
from expstore.buffer.recorded import rows_of
from expstore.buffer.registry import BUFFERS
from expstore.buffer.sampler import AnySampler, build_sampler, check_positions, is_native
from expstore.buffer.saved_state import load_state, save_state
from expstore.buffer.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from expstore.errors import (
    ArgumentTypeError,
    PostprocessError,
    SchemaError,
    StateError,
    StepRangeError,
    WriterStateError,
)
from expstore.sampling.priority import reduce_priorities
from expstore.spans import Spans
from expstore.storage import files
from expstore.storage.fingerprint import fingerprint
from expstore.storage.store import absolute

logger = logging.getLogger("expstore.buffer")

OPEN_FILE = "open.json"
Function = Callable[..., Any]


@BUFFERS.register("DataBuffer")
class DataBuffer:
    """Records what environments and policies hand over, and gives batches of transitions.

    A row is an observation, what led to it, and the answer to it; N + 1 rows of an episode become
    N transitions when it is cut. The buffer's data is a store at `path`, which any number of
    readers may open at the same time; a buffer that is opened again at the same path goes on.

    Args:
        config: a `BufferConfig`, or a mapping of its keys.
        obs_preprocessor: observation -> observation, for each row.
        reward_preprocessor: reward -> reward, for each row.
        env_ret_preprocess_fn: (row, env_ret, obs_preprocessor, reward_preprocessor) -> row.
        policy_resp_preprocess_fn: (row, policy_resp) -> row.
        preprocess_fn: the whole step: (row, env_ret, policy_resp, obs_preprocessor,
            reward_preprocessor, env_ret_preprocess_fn, policy_resp_preprocess_fn) -> row.
        postprocess_fn: an episode's rows, a list for each key, -> columns (N, ...) to be stored.
        path: the store's directory; by default that of the configuration, else a temporary one,
            which is removed when the buffer is closed.
        journal: write the rows of open episodes down, so that a kill does not lose them; by
            default as the configuration says.

    Raises:
        SchemaError: a function is given together with one that would bypass it.

    >>> with DataBuffer({"type": "DataBuffer", "capacity": 100, "sampler": "uniform"}) as buffer:
    ...     buffer.init()
    ...     for step in range(4):
    ...         env_ret = EnvRet("env-0", [float(step)], last_reward=1.0)
    ...         _ = buffer.add_transition("env-0", env_ret, PolicyResponse("env-0", action=step))
    ...     buffer.truncate_one_episode("env-0")
    ...     buffer.size(), buffer.sample(2)[0]["observation"].shape
    (3, torch.Size([2, 1]))
    """

    default_sampler: ClassVar[str | None] = None

    def __init__(
        self,
        config: BufferConfig | Mapping[str, Any],
        obs_preprocessor: Function | None = None,
        reward_preprocessor: Function | None = None,
        env_ret_preprocess_fn: Function | None = None,
        policy_resp_preprocess_fn: Function | None = None,
        preprocess_fn: Function | None = None,
        postprocess_fn: Function | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        journal: bool | None = None,
    ) -> None:
        self.config = copy.deepcopy(BufferConfig.of(config))
        given = {
            "obs_preprocessor": obs_preprocessor,
            "reward_preprocessor": reward_preprocessor,
            "env_ret_preprocess_fn": env_ret_preprocess_fn,
            "policy_resp_preprocess_fn": policy_resp_preprocess_fn,
            "preprocess_fn": preprocess_fn,
        }
        self.functions: dict[str, Function] = {
            name: DEFAULTS[name] if function is None else function
            for name, function in given.items()
        }
        check_exclusion(self.functions)
        self.functions["postprocess_fn"] = postprocess_fn or default_postprocess_fn
        if path is not None:
            self.config.storage.path = os.fspath(path)
        if journal is not None:
            self.config.storage.journal = journal
        self.report = Report()
        self.device = torch.device(self.config.storage.device)
        self._storage: EpisodeStorage | None = None
        self._ingest: Ingest | None = None
        self._sampler: AnySampler = None
        self._saved: dict[str, Any] = {}  # states of former samplers and functions
        self._is_closed = False
        self._temporary: Any = None
        self._due_at = now() + self.config.storage.commit_interval_s

    # -- opening and closing ---------------------------------------------------------------------

    def init(
        self,
        env_meta_list: Iterable[EnvMeta] | None = None,
        env_ids: Iterable[str] | None = None,
    ) -> None:
        """Open the store and build the sampler; a second call keeps data and sampler.

        Args:
            env_meta_list: how many environments step under each id; ids that are not among
                them are refused then. Without it, each id is one environment.
            env_ids: need not be complete.

        Raises:
            StoreLockedError: another buffer, or writer, has the store open.
        """
        if self._is_closed:
            raise WriterStateError("the buffer is closed; build a new one with the same path")
        if self._sampler is None:
            self._sampler = self._built_sampler()
        if self._storage is None:
            self._open()
        if env_meta_list is not None:
            self._ready[1].know(list(env_meta_list))

    def _built_sampler(self) -> AnySampler:
        config = self.config.sampler
        if config is None and self.default_sampler is not None:
            config = SamplerConfig(self.default_sampler)
        return None if config is None else build_sampler(config)

    def _open(self) -> None:
        storage = EpisodeStorage(
            self._directory(), self.config.capacity, is_fixed=self.config.storage.mode == "fixed"
        )
        try:
            self._start(storage)
        except BaseException:
            storage.writer.close()
            raise

    def _start(self, storage: EpisodeStorage) -> None:
        prints = {name: fingerprint(function) for name, function in self.functions.items()}
        self._notice_changes(storage.document.functions, prints)
        storage.document.functions = prints
        storage.document.config = self.config.to_dict()
        files.make_directory(storage.directory / "journal")
        directory = storage.directory / "journal"
        journal = Journal(directory) if self.config.storage.journal else None
        self._ingest = Ingest(
            storage,
            self.functions,
            journal,
            self.report,
            auto=self.config.auto_truncate_episode,
            device=self.device,
            fingerprint=prints["postprocess_fn"],
        )
        self._storage = storage
        self._load_state()
        self._bind()
        self._recover(storage, Journal(directory))
        storage.write_document()
        self._note_open()
        atexit.register(_close_at_exit, weakref.ref(self))

    def _directory(self) -> Path:
        path = self.config.storage.path
        if path is not None:
            return absolute(path)
        directory = tempfile.mkdtemp(prefix="expstore-buffer-")
        self._temporary = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        logger.info("the buffer is at %s until it is closed; give path= to keep it", directory)
        return Path(directory) / "buffer.exp"

    def _notice_changes(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        for name, old in before.items():
            new = after.get(name, "")
            if old != new:
                self.report.note(
                    f"{name} is {new}, but the episodes so far were made with {old}: they differ "
                    "if the functions do"
                )

    def _recover(self, storage: EpisodeStorage, journal: Journal) -> None:
        """Store what a killed process left in its journal, and say what it lost."""
        assert self._ingest is not None
        journaled = set()
        for path in journal.left_behind():
            header, episode = read_rows(path)
            journaled.add(episode.env_id)
            if episode.num_rows and not storage.has_uid(episode.uid):
                try:
                    self._ingest.recover(episode)
                    what = "stored as incomplete"
                except PostprocessError as error:
                    what = f"in quarantine: {error}"
                self.report.note(
                    f"the open episode of env {header['env_id']!r} with {episode.num_rows} rows "
                    f"was left by a process that ended without close(): {what}"
                )
            self._sync()
            files.unlink(path)
        try:
            noted = json.loads(files.read(storage.directory / OPEN_FILE))
        except (FileNotFoundError, ValueError):
            return
        for env_id, num_rows in noted.items():
            if env_id not in journaled:
                self.report.note(
                    f"the open episode of env {env_id!r} is lost, of which {num_rows} rows were "
                    "noted: its process ended without close(); journal=True keeps them"
                )

    @property
    def _ready(self) -> tuple[EpisodeStorage, Ingest]:
        if self._is_closed:
            raise WriterStateError("the buffer is closed; build a new one with the same path")
        if self._storage is None or self._ingest is None:
            raise WriterStateError("the buffer has no storage yet; call init() first")
        return self._storage, self._ingest

    @property
    def path(self) -> Path:
        """The store's directory, for `expstore.open`."""
        return self._ready[0].path

    def save(self) -> None:
        """Make every finished episode, the sampler's state and priorities durable now."""
        storage, _ = self._ready
        self._sync()
        self._save_state()
        self._note_open()
        storage.sync()
        self._due_at = now() + self.config.storage.commit_interval_s

    def close(self) -> None:
        """Cut what is open, make everything durable, and let the store go.

        Raises:
            PostprocessError: an episode that was open is in quarantine. The buffer is closed.
        """
        if self._is_closed or self._storage is None or self._ingest is None:
            self._is_closed = True
            return
        storage, ingest = self._storage, self._ingest
        try:
            with FirstError() as errors:
                with errors.kept():
                    ingest.cut_all()
                self._sync()
                self._save_state()
                files.unlink(storage.directory / OPEN_FILE)
                storage.close()
        finally:
            self._is_closed = True
            ingest.close()
            storage.writer.close()
            if self._temporary is not None:
                self._temporary()

    def __enter__(self) -> DataBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- ingest ----------------------------------------------------------------------------------

    def add_transition(
        self,
        env_id: str,
        env_ret: EnvRet,
        policy_resp: PolicyResponse | None,
        truncated: bool = False,
        *,
        is_eval: bool = False,
    ) -> DataBuffer:
        """Add a row; its arrays are copied.

        Args:
            env_id: the environment.
            env_ret: what it gave.
            policy_resp: the answer; None for a last row that has none, which ends the episode.
            truncated: cut here. This is not a flag of the data.
            is_eval: the row is counted and dropped.

        Raises:
            SchemaError: ids that differ, or fields that differ from those of the episode's first
                row; the row was not added.
            PostprocessError: the episode that it ended is in quarantine.
            CapacityError: the episode that it ended has no room, and stays open.
        """
        ingest = self._ready[1]
        if not isinstance(env_ret, EnvRet):
            raise ArgumentTypeError(f"env_ret must be an EnvRet, got {type(env_ret).__name__}")
        check_same_env(env_id, env_ret.env_id)
        if policy_resp is not None:
            check_same_env(env_id, policy_resp.env_id)
        if is_eval:
            self.report.eval_rows += 1
            return self
        ingest.add(env_ret, policy_resp, cut=truncated)
        if now() >= self._due_at:
            self.save()
        return self

    def add_data_async(
        self, env_id: str, data: EnvRet | PolicyResponse, truncated: bool = False
    ) -> None:
        """Add a half-row: an `EnvRet`, or the `PolicyResponse` that completes it.

        An `EnvRet` that no answer has come for when the episode is cut is its last row.

        Raises:
            ArgumentTypeError: it is neither.
            SchemaError: an answer to nothing, or ids that differ.
        """
        ingest = self._ready[1]
        if isinstance(data, (EnvRet, PolicyResponse)):
            check_same_env(env_id, data.env_id)
        ingest.add_half(env_id, data, cut=truncated)
        if now() >= self._due_at:
            self.save()

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData,
        batched_policy_resp: BatchedData,
        truncations: list[bool] | None = None,
        *,
        is_eval: bool = False,
    ) -> DataBuffer:
        """Add a row for each environment, as `add_transition` does.

        Raises:
            SchemaError: the ids of both are not the same in the same order, or `truncations` has
                another length; nothing was added.
            ArgumentTypeError: `truncations` is no list; nothing was added.
        """
        self._ready  # noqa: B018  raises
        if batched_env_ret.ids != batched_policy_resp.ids:
            raise SchemaError(
                f"both batches must have the same ids in the same order, got "
                f"{list(batched_env_ret.ids)} and {list(batched_policy_resp.ids)}"
            )
        cuts = _checked_cuts(truncations, len(batched_env_ret))
        rows = zip(batched_env_ret, batched_policy_resp.values(), cuts, strict=True)
        with FirstError() as errors:
            for (env_id, env_ret), policy_resp, cut in rows:
                with errors.kept():
                    self.add_transition(env_id, env_ret, policy_resp, cut, is_eval=is_eval)
        return self

    def add_batched_data_async(
        self, batched_data: BatchedData, truncations: list[bool] | bool | None = None
    ) -> None:
        """Add a half-row for each environment; one bool counts for all.

        Raises:
            SchemaError: `truncations` has another length; nothing was added.
            ArgumentTypeError: it is neither a list nor a bool; nothing was added.
        """
        self._ready  # noqa: B018  raises
        if isinstance(truncations, bool):
            truncations = [truncations] * len(batched_data)
        cuts = _checked_cuts(truncations, len(batched_data))
        with FirstError() as errors:
            for (env_id, data), cut in zip(batched_data, cuts, strict=True):
                with errors.kept():
                    self.add_data_async(env_id, data, cut)

    def add_episode(
        self,
        episode: Mapping[str, Any],
        num_envs: int = 1,
        *,
        env_id: str | None = None,
        end_reason: str = "cut",
    ) -> None:
        """Store a finished episode, by neither pre- nor postprocessing.

        Args:
            episode: columns (T, ...), or (T, num_envs, ...) of several environments. With a flag
                before its end it is split there.
            num_envs: how many.
            env_id: kept in the metadata.
            end_reason: of an episode whose flags do not say.

        Raises:
            SchemaError: it does not fit what is stored; nothing was stored.
            CapacityError: it has no room; nothing was stored.
        """
        self._ready[1].add_finished(episode, num_envs, env_id, end_reason)
        if now() >= self._due_at:
            self.save()

    def add_recorded(self, env_id: str, episode: Mapping[str, Any], end_reason: str) -> None:
        """Add the rows of a finished episode, as if they came one by one: for `Recorder`.

        Args:
            env_id: the environment.
            episode: flat columns by field: those of `observation` (T + 1, *shape), `action`,
                `reward`, `terminated` and `truncated` (T, *shape), and any of `info`.
            end_reason: why it ended, where no flag is set.

        Raises:
            PostprocessError: the episode is in quarantine.
            CapacityError: it has no room, and stays open.
        """
        ingest = self._ready[1]
        for env_ret, answer in rows_of(env_id, episode):
            ingest.add(env_ret, answer, cut=False, end_reason=end_reason)
        if now() >= self._due_at:
            self.save()

    def truncate_one_episode(self, item: Any, *, missing_ok: bool = False) -> None:
        """Cut the episode of an environment now, or those of its sub-environments.

        Nothing happens where an episode has just ended by itself.

        Args:
            item: an id, or anything with an `env_id`.
            missing_ok: whether to do nothing where there is no open episode.

        Raises:
            ArgumentTypeError: there is no id.
            UnknownEnvError: there is no open episode.
        """
        self.truncate_episodes([item], missing_ok=missing_ok)

    def truncate_episodes(self, items: Iterable[Any], *, missing_ok: bool = False) -> None:
        """Cut several; all are looked at before the first one is cut."""
        ingest = self._ready[1]
        env_ids = [_env_id_of(item) for item in items]
        if not missing_ok:
            for env_id in env_ids:
                ingest.check_cut(env_id)
        with FirstError() as errors:
            for env_id in env_ids:
                with errors.kept():
                    had_rows = ingest.has_open(env_id)
                    ingest.cut(env_id)
                    if had_rows:
                        ingest.forget_end(env_id)
        if now() >= self._due_at:
            self.save()

    def clear(self, *, open_episodes: bool = False) -> None:
        """Forget the finished episodes, and the open ones if asked to.

        Their space comes back as new episodes come, within the capacity.
        """
        self._clear(write=True)
        if open_episodes:
            self._ready[1].drop_open()

    def _clear(self, *, write: bool) -> None:
        storage = self._sync()
        evicted = self._ids()
        storage.clear()
        self._changed(evicted=evicted.steps_at(np.arange(evicted.num_steps)))
        if write:
            storage.write_document()

    # -- quarantine ------------------------------------------------------------------------------

    @property
    def quarantine(self) -> Quarantine:
        """The episodes that could not be processed or stored."""
        return self._ready[1].quarantine

    def retry_quarantine(self, postprocess_fn: Function | None = None) -> int:
        """Process and store the episodes in quarantine again; returns how many are stored now.

        Args:
            postprocess_fn: to use in place of the buffer's own.

        Raises:
            PostprocessError: it failed again on some, which stay; the others are stored.
        """
        ingest, count = self._ready[1], 0
        with FirstError() as errors:
            for kept in list(ingest.quarantine):
                with errors.kept():
                    ingest.retry(kept, postprocess_fn)
                    self._sync()
                    ingest.quarantine.remove(kept.uid)
                    count += 1
        return count

    # -- what is there ---------------------------------------------------------------------------

    @property
    def num_transitions(self) -> int:
        """Transitions of finished episodes."""
        return self._sync().live.num_steps

    @property
    def num_episodes(self) -> int:
        """Finished episodes."""
        return self._sync().live.num_episodes

    def size(self) -> int:
        """Transitions or episodes, by the unit of the storage."""
        return self.num_episodes if self._is_by_episode else self.num_transitions

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True  # also when it is empty: `buffer or default` must not lose it

    def __getitem__(self, index: Any) -> Any:
        """Entries by position, 0 being the oldest: an integer, a slice or an array.

        Returns:
            Columns of transitions (n, ...), without the first dimension for an integer. In
            episode unit, columns (L, ...) for an integer; (E, L, ...) for several of the same
            length, else a list with the columns of each.

        Raises:
            StepRangeError: there is no such entry.
            ArgumentTypeError: another kind of index.
        """
        if isinstance(index, tuple):
            if len(index) != 2 or index[0] != 0:
                raise StepRangeError(f"there is one storage, 0; got index {index!r}")
            index = index[1]
        return self.get(index)

    def get(self, index: Any) -> Any:
        """As `buffer[index]`; also `{"storage_idx": 0, "indices": index}`."""
        self._ready  # noqa: B018  raises
        if isinstance(index, dict) and set(index) == {"storage_idx", "indices"}:
            return self[index["storage_idx"], index["indices"]]
        positions = _positions_of(index, self.size())
        if np.ndim(positions) == 0:
            return _first(self._read(np.asarray(positions).reshape(1)))
        return self._read(positions)

    def get_all(self) -> Any:
        """Everything, in order."""
        return self.get(slice(None))

    # -- sampling --------------------------------------------------------------------------------

    @property
    def sampler(self) -> AnySampler:
        """What chooses the entries of a batch; assign another one after `init`."""
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: AnySampler) -> None:
        if not (is_native(sampler) or callable(getattr(sampler, "sample", None))):
            raise ArgumentTypeError(
                f"a sampler must be a BaseSampler or one of expstore's, got {sampler!r}"
            )
        if self._storage is None:
            self._sampler = sampler
            return
        self._sync()  # the former one is told what happened under it
        self._sampler = sampler
        self._bind()

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        *,
        return_info: bool = False,
    ) -> Any:
        """A list with one batch, as `get` gives it.

        Args:
            batch_size: entries, in the unit of the storage; None for all.
            shuffle: for samplers that heed it.
            drop_last: kept for several workers, of which there is one.
            return_info: also return a dict with `index` (n,), the ids of the entries for
                `update_priorities`, and `weight` (n,), their importance weights.

        Raises:
            SchemaError: the buffer is empty, or the sampler cannot give so many.
            StateError: there is no sampler.
        """
        size = self.size()
        if self._sampler is None:
            raise StateError(
                f"{type(self).__name__} has no usual sampler; give the configuration "
                "sampler: {type: uniform}, or assign buffer.sampler after init()"
            )
        if not size:
            raise SchemaError("the buffer is empty; cut an episode before sampling")
        if batch_size is not None and (
            isinstance(batch_size, bool)
            or not isinstance(batch_size, int | np.integer)
            or batch_size < 1
        ):
            raise SchemaError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        positions, weight = self._chosen(batch_size, size, shuffle)
        batch = self._read(positions)
        if not return_info:
            return [batch]
        info = {
            "index": torch.from_numpy(self._ids().steps_at(positions)),
            "weight": torch.from_numpy(np.asarray(weight, np.float32)),
        }
        return [batch], info

    def _chosen(
        self, batch_size: int | None, size: int, shuffle: bool
    ) -> tuple[NDArray[np.int64], Any]:
        sampler = self._sampler
        if is_native(sampler):
            seed = self.config.sampler.seed if self.config.sampler else 0
            draw = sampler.draw(self._ids(), size if batch_size is None else batch_size, seed)
            return draw.anchors, draw.weight
        given = sampler.sample(self._asked(batch_size, size), size, shuffle)
        positions, weight = given if isinstance(given, tuple) else (given, None)
        positions = check_positions(positions, size, sampler)
        return positions, np.ones(len(positions)) if weight is None else weight

    def _asked(self, batch_size: int | None, size: int) -> int:
        """What the sampler is asked for."""
        return size if batch_size is None else int(batch_size)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Give entries new priorities, for a sampler that has some.

        Of an entry that comes twice the largest counts; those that have left are ignored.

        Args:
            ids: (n,) as `sample(return_info=True)` gave them.
            priorities: (n,) numbers of at least 0, such as absolute temporal-difference errors.

        Raises:
            SchemaError: another shape or negative numbers; nothing has changed.
            StateError: the sampler has no priorities.
        """
        storage = self._sync()
        chosen, values = (_host(given).reshape(-1) for given in (ids, priorities))
        if len(chosen) != len(values):
            raise SchemaError(f"there are {len(chosen)} ids for {len(values)} priorities")
        if is_native(self._sampler) and hasattr(self._sampler, "update"):
            one = reduce_priorities(chosen.astype(np.int64), values, np.ones(len(values), bool))
            held = one[0] >= (storage.document.cleared_episode if self._is_by_episode
                              else storage.document.cleared_step)  # fmt: skip
            self._sampler.update(self._ids(), one[0][held], one[1][held])
        elif hasattr(self._sampler, "update_priorities"):
            self._sampler.update_priorities(chosen.astype(np.int64), values)
        else:
            raise StateError(
                f"{type(self._sampler).__name__} has no priorities; set sampler: "
                "{type: prioritized}, or assign a sampler that has"
            )

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _is_by_episode(self) -> bool:
        return self.config.storage.unit == "episode"

    def _sync(self) -> EpisodeStorage:
        """Commit what was finished since, and tell the sampler."""
        storage, ingest = self._ready
        if storage.has_pending:
            change = storage.commit()
            pushed, evicted = change.pushed_steps, change.evicted_steps
            if self._is_by_episode:
                pushed, evicted = change.pushed_episodes, change.evicted_episodes
            self._changed(np.array(pushed, np.int64), np.array(evicted, np.int64))
        ingest.committed()
        return storage

    def _ids(self) -> Spans:
        """The ids of all entries in their order; positions are positions in it."""
        storage = self._ready[0]
        if not self._is_by_episode:
            return storage.live
        numbers = storage.live_episodes
        if self._episode_ids is None or not np.array_equal(self._episode_ids.start, numbers):
            self._episode_ids = Spans.laid_out(numbers, np.ones(len(numbers), np.int64))
        return self._episode_ids

    _episode_ids: Spans | None = None

    def _read(self, positions: NDArray[np.int64]) -> Any:
        storage = self._ready[0]
        if not self._is_by_episode:
            return storage.read(storage.live.steps_at(positions), self.device)
        return storage.read_episodes(positions, self.device)

    def _changed(
        self, pushed: NDArray[np.int64] | None = None, evicted: NDArray[np.int64] | None = None
    ) -> None:
        for name, ids in (("on_push", pushed), ("on_evict", evicted)):
            hook = getattr(self._sampler, name, None)
            if hook is not None and ids is not None and len(ids):
                hook(ids)

    def _bind(self) -> None:
        """Tell a new sampler what there is, and give it the state of its predecessor."""
        sampler = self._sampler
        if sampler is None:
            return
        if hasattr(sampler, "bind"):
            sampler.bind(self)
        ids = self._ids()
        self._changed(pushed=ids.steps_at(np.arange(ids.num_steps)))
        saved = self._saved.get("sampler")
        if saved is None or self._saved.get("sampler_class") != type(sampler).__name__:
            return
        if hasattr(sampler, "load_state_dict"):
            del self._saved["sampler"]
            try:
                sampler.load_state_dict(saved)
            except StateError as error:
                self.report.note(f"the sampler begins anew: {error}")

    def _stateful(self) -> dict[str, Any]:
        """The customisation points that have a state, by name."""
        return {n: f for n, f in self.functions.items() if hasattr(f, "state_dict")}

    def _save_state(self) -> None:
        storage = self._ready[0]
        state: dict[str, Any] = {
            "functions": {name: point.state_dict() for name, point in self._stateful().items()}
        }
        if hasattr(self._sampler, "state_dict"):
            state["sampler"] = self._sampler.state_dict()
            state["sampler_class"] = type(self._sampler).__name__
        elif "sampler" in self._saved:  # nobody has taken it yet
            state |= {name: self._saved[name] for name in ("sampler", "sampler_class")}
        save_state(storage, state)

    def _load_state(self) -> None:
        storage = self._ready[0]
        self._saved = load_state(storage, self.report)
        for name, point in self._stateful().items():
            if name in self._saved.get("functions", {}):
                point.load_state_dict(self._saved["functions"][name])

    def _note_open(self) -> None:
        storage, ingest = self._ready
        data = json.dumps(ingest.open_rows).encode()
        files.write_whole(storage.directory / OPEN_FILE, data, durable=False)


def _close_at_exit(reference: weakref.ref[DataBuffer]) -> None:
    buffer = reference()
    if buffer is not None:
        buffer.close()


def _checked_cuts(truncations: Any, count: int) -> list[bool]:
    if truncations is None:
        return [False] * count
    if not isinstance(truncations, list):
        raise ArgumentTypeError(
            f"truncations must be a list with one bool for each of {count} environments, got "
            f"{type(truncations).__name__}"
        )
    if len(truncations) != count:
        raise SchemaError(
            f"truncations must have one entry for each of {count} environments, got "
            f"{len(truncations)}"
        )
    return [bool(cut) for cut in truncations]


def _env_id_of(item: Any) -> str:
    env_id = item if isinstance(item, str) else getattr(item, "env_id", None)
    if not isinstance(env_id, str):
        raise ArgumentTypeError(
            f"give an environment's id or something with an env_id, got {type(item).__name__}"
        )
    return env_id


def _positions_of(index: Any, size: int) -> Any:
    """Positions from 0 to `size - 1`: an integer, or an array (n,)."""
    if isinstance(index, slice):
        return np.arange(size)[index]
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    if isinstance(index, bool) or not isinstance(index, int | np.integer | np.ndarray | list):
        raise ArgumentTypeError(
            f"an index must be an integer, a slice or an array of integers, got "
            f"{type(index).__name__} {index!r}"
        )
    positions = np.asarray(index)
    if positions.dtype == bool and positions.shape == (size,):
        return np.flatnonzero(positions)
    if positions.size == 0:
        return np.empty(0, np.int64)
    if positions.dtype.kind not in "iu" or positions.ndim > 1:
        raise ArgumentTypeError(
            f"an index must be integers of one dimension, got shape {positions.shape} of "
            f"{positions.dtype}"
        )
    positions = positions.astype(np.int64)
    bad = (positions < -size) | (positions >= size)
    if bad.any():
        found = int(np.atleast_1d(positions)[np.atleast_1d(bad)][0])
        raise StepRangeError(f"index {found} is out of range for a buffer of {size} entries")
    return np.where(positions < 0, positions + size, positions)


def _first(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: _first(v) if isinstance(v, dict) else v[0] for k, v in entry.items()}


def _host(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
