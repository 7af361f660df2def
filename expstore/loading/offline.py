"""OfflineDataset: a store as transitions, trajectories and goals, under the names of D4RL."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.episode import nest
from expstore.errors import FieldNotFoundError, SchemaError, StepRangeError
from expstore.loading.batch import Batch
from expstore.loading.gather import Gather
from expstore.loading.goals import Goals
from expstore.loading.replay import Replay
from expstore.loading.rows import column, numbers_of
from expstore.loading.scale import Scale
from expstore.loading.statistics import Statistics
from expstore.loading.to_go import ReturnToGo, discounted
from expstore.loading.transitions import FLAGS, Transitions, flag_at, left_out_of, without
from expstore.loading.units import Unit, as_count, as_share
from expstore.sampling.sequence import Sequence
from expstore.sampling.uniform import WithoutReplacement
from expstore.schema import unknown_field
from expstore.spans import Spans
from expstore.storage.reading import resolve
from expstore.storage.store import Store

BLOCK_STEPS = 1 << 16  # most that are read at a time in a pass
BLOCK_BYTES = 32 << 20
Nested = dict[str, Any]


class OfflineDataset:
    """A store, view or union for offline reinforcement learning; nothing is copied.

    Names are those of D4RL: `observations`, `actions`, `rewards`, `next_observations`,
    `terminals` (the task ended) and `timeouts` (it was cut off), as they were recorded: neither
    stands for the other. A store without flags says so by the episodes' end reasons. Nested
    observations come nested. Columns that the store does not have are left out.

    A step is a transition if the observation after it is known, or if it is terminal, so that
    nobody asks for it; `num_left_out` counts the others. `next_observations` is 0 where it is
    not known.

    Args:
        store: what `expstore.open` gave, or a view of it.
        observation: name of a field, or of the group of them.
        action: likewise.
        reward: name of a field.
        fields: further fields, which come under their own names.
        device: where the tensors of batches go.
        prefetch: batches read ahead by a thread.

    Raises:
        FieldNotFoundError: a name that was given, and is none.
        SchemaError: a ragged field, which has no place in a transition.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.zeros((6, 2)), "reward": np.ones(5)})
        >>> data = expstore.OfflineDataset(expstore.open(path))
        >>> data.transitions()["next_observations"].shape
        (5, 2)
        >>> [len(batch["rewards"]) for batch in data.batches(2, epochs=1)]
        [2, 2, 1]
    """

    def __init__(
        self,
        store: Store,
        *,
        observation: str = "observation",
        action: str = "action",
        reward: str = "reward",
        fields: Iterable[str] = (),
        device: str | torch.device = "cpu",
        prefetch: int = 0,
    ) -> None:
        if not isinstance(store, Store):
            raise SchemaError(f"store must be what expstore.open returned, got {store!r}")
        self.store = store
        self.device, self.prefetch = torch.device(device), prefetch
        self._roles = {"observation": observation, "action": action, "reward": reward}
        self._fields = [fields] if isinstance(fields, str) else list(fields)
        self._scales: dict[str, Scale] = {}  # by field
        self._names = self._named()  # what the store calls each column, by its name here

    def _named(self) -> dict[str, str]:
        schema, names = self.store.snapshots[0].schema, dict[str, str]()
        for role, given in self._roles.items():
            if not _has(self.store, given):
                if given != role:
                    raise FieldNotFoundError(
                        f"{role} {given!r}: {unknown_field(given, schema.fields)}"
                    )
                continue
            for name in resolve(schema, [given]):
                rest = name[len(given) :]
                names[f"{role}s{rest}"] = name
                if role == "observation":
                    names[f"next_{role}s{rest}"] = f"next_{name}"
        names.update({key: flag for key, flag in FLAGS.items() if flag in schema.fields})
        names.update({name: name for name in resolve(schema, self._fields)})
        ragged = [n for n in names.values() if resolve(schema, [n])[n].ragged]
        if ragged:
            raise SchemaError(
                f"field {ragged[0]!r} has any number of values per step and cannot be in a "
                "transition; name the others, or read it with Replay"
            )
        return names

    def __repr__(self) -> str:
        return f"OfflineDataset({self.store!r})"

    # -- selecting -------------------------------------------------------------------------------

    def filter(self, which: str | Callable[[Any], Any] | Iterable[Any]) -> OfflineDataset:
        """The data set of some episodes: see `Store.filter`, such as `"return > 3000"`."""
        return self._of(self.store.filter(which))

    def best(self, share: float) -> OfflineDataset:
        """The episodes of the largest returns: a `share` of them, at least one."""
        share = as_share("share", share)
        returns = np.asarray(self.store.episodes["return"], np.float64)
        if returns.ndim != 1 or not len(returns):
            raise SchemaError("returns must be one number per episode; filter by a function")
        count = max(1, round(share * len(returns)))
        order = np.argsort(-returns, kind="stable")[:count]
        return self._of(self.store.filter(self.store.episode_numbers[np.sort(order)].tolist()))

    def split(self, share: float, seed: int = 0) -> tuple[OfflineDataset, OfflineDataset]:
        """Two data sets by whole episodes, such as training and validation; see `Store.split`."""
        one, other = self.store.split(share, seed)
        return self._of(one), self._of(other)

    def normalize(
        self,
        *fields: str,
        statistics: Mapping[str, Statistics] | None = None,
        eps: float = 1e-3,
    ) -> OfflineDataset:
        """The data set with fields brought to mean 0 and standard deviation 1, as float32.

        Args:
            *fields: names in the store, `"observation"` by default; next values follow them.
            statistics: by field, in place of this data set's own: for validation, give those of
                the training data.
            eps: added to each standard deviation.
        """
        names = fields or tuple(n for k, n in self._names.items() if k.startswith("observations"))
        scaled = self._of(self.store)
        for name in names:
            found = (statistics or {}).get(name) or self.statistics(name)
            scaled._scales[name] = Scale.of(found, eps)
        return scaled

    def _of(self, store: Store) -> OfflineDataset:
        made = OfflineDataset(
            store, **self._roles, fields=self._fields, device=self.device, prefetch=self.prefetch
        )
        made._scales = dict(self._scales)
        return made

    # -- what is there ---------------------------------------------------------------------------

    @property
    def num_transitions(self) -> int:
        return self.store.num_steps - self.num_left_out

    def __len__(self) -> int:
        return self.num_transitions

    @property
    def num_left_out(self) -> int:
        """Steps that are no transition: nobody knows what came after them."""
        return len(self._left_out)

    def statistics(self, field: str) -> Statistics:
        """Mean, standard deviation, smallest and largest value, in one pass; then remembered.

        Args:
            field: its name in the store. The values are those recorded, not normalised.
        """
        return Statistics.of(self.store, field)

    def returns_to_go(self, gamma: float = 1.0) -> NDArray[np.float64]:
        """(N,) sum of the rewards from each step of the store to the end of its episode.

        To keep it as a column: `expstore.add_field(path, "to_go", data.returns_to_go())`.
        """
        gamma, spans = as_share("gamma", gamma), self.store.spans
        out = np.empty(spans.num_steps)
        for first, start, length in zip(spans.first, spans.start, spans.length, strict=True):
            steps = np.arange(start, start + length)
            rewards = numbers_of(column(self.store, self._roles["reward"], steps))
            out[first : first + length] = discounted(rewards.astype(np.float64)[None], gamma)[0]
        return out

    @cached_property
    def _left_out(self) -> NDArray[np.int64]:
        """(K,) ascending positions of the steps that are no transition."""
        has_observations = any(name.startswith("next_") for name in self._names)
        return left_out_of(self.store) if has_observations else np.empty(0, np.int64)

    def _runs(self, spans: Spans) -> Spans:
        """The steps that are transitions, in stretches without a gap."""
        return spans if not len(self._left_out) else without(spans, self._left_out)

    # -- in order --------------------------------------------------------------------------------

    def transitions(self) -> Nested:
        """All transitions in order, as arrays (N, *shape); memory holds them and one block."""
        out: dict[str, NDArray[Any]] = {}
        done = 0
        for block in self.blocks():
            for name, rows in block.items():
                if name not in out:
                    out[name] = np.empty((self.num_transitions, *rows.shape[1:]), rows.dtype)
                out[name][done : done + len(rows)] = rows
            done += len(next(iter(block.values())))
        if not out:
            raise StepRangeError("the data set has no transitions; widen the filter")
        return nest(out)

    def blocks(self, num_steps: int | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        """The same block by block, for data that do not fit in memory; names are flat.

        Args:
            num_steps: most of a block; by default about 32 MiB.
        """
        schema = self.store.snapshots[0].schema
        wanted = resolve(schema, self._names.values())
        step_bytes = sum(field.step_bytes for field in wanted.values())
        usual = max(1, min(BLOCK_STEPS, BLOCK_BYTES // max(1, step_bytes)))
        size = usual if num_steps is None else as_count("num_steps", num_steps)
        gather, runs = Gather(wanted), self._runs(self.store.spans)
        for first in range(0, runs.num_steps, size):
            steps = runs.steps_at(np.arange(first, min(first + size, runs.num_steps)))
            rows = {n: numbers_of(t) for n, t in gather.read(self.store, steps).items()}
            block = {key: self._scaled(name, rows[name]) for key, name in self._names.items()}
            block |= {key: flag_at(self.store, key, steps) for key in FLAGS if key not in block}
            yield block

    def episodes(self) -> Iterator[Nested]:
        """Each episode in turn, with all observations that it has: T + 1 where the last is known.

        Names are those of transitions, but for `next_observations`.
        """
        for row in self.store.episodes:
            whole = self.store.episode(row["number"])
            steps = np.arange(row["start"], row["start"] + row["length"])
            episode = {
                key: self._scaled(name, _within(whole, name))
                for key, name in self._names.items()
                if not name.startswith("next_")
            }
            episode |= {key: flag_at(self.store, key, steps) for key in FLAGS if key not in episode}
            yield nest(episode)

    def _scaled(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        scale = self._scales.get(name.removeprefix("next_"))
        return values if scale is None else scale.of_array(values)

    # -- in random order -------------------------------------------------------------------------

    def batches(
        self, batch_size: int, *, seed: int = 0, epochs: int | None = None, drop_last: bool = False
    ) -> Iterator[Nested]:
        """Transitions in random order, each once per epoch, as tensors (B, *shape).

        Args:
            batch_size: B; the last batch of an epoch may be smaller.
            seed: with it, the order is the same every time.
            epochs: None goes on for ever.
            drop_last: leave a smaller last batch out.
        """
        count = -(-self.num_transitions // batch_size) if batch_size > 0 else 0
        if drop_last:
            count = self.num_transitions // max(1, batch_size)
        sampler = Transitions(self._runs, drop_last)
        drawn = self._drawn(batch_size, None, sampler, seed, epochs, count)
        return (nest(self._presented(batch)) for batch in drawn)

    def trajectories(
        self,
        batch_size: int,
        length: int,
        *,
        gamma: float = 1.0,
        seed: int = 0,
        epochs: int | None = None,
    ) -> Iterator[Nested]:
        """Windows of `length` steps for sequence models, each step once per epoch as the first.

        As `batches`, with tensors (B, length, *shape), and besides `returns_to_go` (float32, to
        the end of the episode), `timesteps` (int64, place in the episode) and `mask` (bool): where
        it is False the episode has ended, and all other values are 0.

        Args:
            batch_size: B.
            length: steps of a window.
            gamma: discount of the returns.
            seed: as in `batches`.
            epochs: as in `batches`.
        """
        unit = ReturnToGo(gamma, self._roles["reward"], Sequence(length=length))
        count = -(-self.store.num_steps // batch_size) if batch_size > 0 else 0
        drawn = self._drawn(batch_size, unit, WithoutReplacement(), seed, epochs, count)
        return (nest(self._window(batch)) for batch in drawn)

    def _window(self, batch: Batch) -> dict[str, torch.Tensor]:
        mask = batch.info.validity_mask
        window = self._presented(batch)
        window["returns_to_go"] = batch.fields["return_to_go"]
        window["timesteps"] = batch.info.timestep
        for values in window.values():
            values[~mask] = 0
        return {**window, "mask": mask}

    def goal_batches(
        self,
        batch_size: int,
        *,
        value: tuple[float, float, float] = (0.2, 0.5, 0.3),
        actor: tuple[float, float, float] = (0.0, 1.0, 0.0),
        gamma: float | None = 0.99,
        actor_gamma: float | None = None,
        state: str | None = None,
        seed: int = 0,
        epochs: int | None = None,
    ) -> Iterator[Nested]:
        """Transitions with goals, as OGBench has them; see `Goals`.

        As `batches`, with `value_goals` and `actor_goals` (B, *shape). `rewards` is 0 where the
        value goal is the state of the transition and -1 elsewhere, `masks` 0 and 1 likewise.

        Args:
            batch_size: B.
            value: shares of goals that are the current state, a future one, any state.
            actor: likewise, of the actor's goals.
            gamma: of the distance to future value goals; None for all later states alike.
            actor_gamma: likewise, of the actor's.
            state: field that goals are values of, the observation by default.
            seed: as in `batches`.
            epochs: as in `batches`.
        """
        of = self._roles["observation"] if state is None else state
        inner = Goals("actor_goal", *actor, gamma=actor_gamma, state=of)
        unit = Goals("value_goal", *value, gamma=gamma, state=of, unit=inner)
        count = -(-self.num_transitions // batch_size) if batch_size > 0 else 0
        sampler = Transitions(self._runs, False)
        drawn = self._drawn(batch_size, unit, sampler, seed, epochs, count)
        return (nest(self._with_goals(batch, of)) for batch in drawn)

    def _with_goals(self, batch: Batch, state: str) -> dict[str, torch.Tensor]:
        named, reached = self._presented(batch), batch.info["value_goal_reached"].float()
        for goal in ("value_goal", "actor_goal"):
            values, scale = batch.fields[goal], self._scales.get(state)
            named[f"{goal}s"] = values if scale is None else scale.of_tensor(values)
        return {**named, "rewards": reached - 1, "masks": 1 - reached}

    def _drawn(
        self,
        batch_size: int,
        unit: Unit | None,
        sampler: Any,
        seed: int,
        epochs: int | None,
        num_batches: int,
    ) -> Iterator[Batch]:
        replay = Replay(
            self.store, batch_size, unit=unit, sampler=sampler, fields=self._names.values(),
            device=self.device, prefetch=self.prefetch, seed=seed,
        )  # fmt: skip
        num_epochs = None if epochs is None else as_count("epochs", epochs, least=0)
        return _taken(replay, None if num_epochs is None else num_epochs * num_batches)

    def _presented(self, batch: Batch) -> dict[str, torch.Tensor]:
        out = {}
        for key, name in self._names.items():
            scale = self._scales.get(name.removeprefix("next_"))
            values = batch.fields[name]
            out[key] = values if scale is None else scale.of_tensor(values)
        if missing := [key for key in FLAGS if key not in out]:
            index = batch.info.index.cpu().numpy()
            for key in missing:
                flags = flag_at(self.store, key, index.reshape(-1)).reshape(index.shape)
                out[key] = torch.from_numpy(flags).to(self.device)
        return out


def _taken(replay: Replay, num_batches: int | None) -> Iterator[Batch]:
    with replay:
        yield from itertools.islice(replay, num_batches)


def _has(store: Store, name: str) -> bool:
    return any(known == name or known.startswith(f"{name}/") for known in store.fields)


def _within(nested: Any, name: str) -> NDArray[Any]:
    for part in name.split("/"):
        nested = nested[part]
    return np.asarray(nested)
