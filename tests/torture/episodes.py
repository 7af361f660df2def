"""Known episodes, a pure function of (seed, number), and every array a store of them must hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTHS = (1, 1, 2, 3, 5, 8, 17, 33, 64, 101)
END_REASONS = ("terminated", "truncated", "cut", "incomplete")  # spelled out: this is the oracle
SMALL = 396  # 17, 17, 1 and 5 steps: no next values, some with gaps, and final observations
LAYOUTS = ("auto", "auto", "mapped", "coded")
EXCEPTIONAL_REWARDS = (np.nan, np.inf)
TEXT = "text"  # the dtype of a ragged field; its columns are arrays of str objects
LETTERS = tuple("ab é中\n🦉")  # of one to four bytes


@dataclass(frozen=True)
class Chunks:
    """How small the chunks of a test's store are, so that borders are hit often."""

    rows: int  # most of a chunk or shard
    inner_rows: int  # of an inner chunk
    write_bytes: int  # rows are collected up to this size before they are written
    page_bytes: int  # a chunk is a multiple of it; below the real page, files are read one by one


@dataclass(frozen=True)
class Plan:
    """What all episodes of one store have in common."""

    seed: int
    fields: dict[str, tuple[tuple[int, ...], str]]  # field -> shape, dtype
    layouts: dict[str, str]  # what the writer is asked for
    has_next_reward: bool
    has_noise: bool  # so that screens cannot be compressed
    chunk_steps: int
    chunks: Chunks  # of every other array

    @staticmethod
    @lru_cache(maxsize=64)
    def of(seed: int) -> Plan:
        """The plan of a store; seed `SMALL` has few arrays, one of each kind, and tiny chunks."""
        return Plan._small() if seed == SMALL else Plan._random(seed)

    @staticmethod
    def _small() -> Plan:
        return Plan(
            SMALL,
            {"observation": ((32, 32), "uint8"), "reward": ((), "float64")},
            {"observation": "auto"},  # which will be coded
            has_next_reward=False,
            has_noise=False,
            chunk_steps=16,
            chunks=Chunks(rows=16, inner_rows=8, write_bytes=1, page_bytes=64),
        )

    @staticmethod
    def _random(seed: int) -> Plan:
        rng = np.random.default_rng([seed])
        fields: dict[str, tuple[tuple[int, ...], str]] = {"observation/state": ((3,), "float32")}
        if rng.random() < 0.7:
            fields["observation/image"] = ((8, 8), "uint8")
        if rng.random() < 0.5:
            fields["observation/deep/er/still"] = ((), "float16")
        if rng.random() < 0.6:
            fields["observation/screen"] = ((32, 32), "uint8")
        if rng.random() < 0.5:
            fields["action"] = ((2,), "float64")
        else:
            fields["action/choice"] = ((), "int64")
            fields["action/frame"] = ((1024,), "uint8")
        fields["reward"] = ((), "float64") if rng.random() < 0.5 else ((1,), "float32")
        fields["terminated"] = fields["truncated"] = ((), "bool")
        if rng.random() < 0.3:
            fields["observation/words"] = ((), TEXT)
        return Plan(
            seed,
            fields,
            {name: str(rng.choice(LAYOUTS)) for name in fields},
            has_next_reward=bool(rng.random() < 0.3),
            has_noise=bool(rng.random() < 0.3),
            chunk_steps=int(2 ** rng.integers(2, 10)),
            chunks=Chunks(
                rows=int(2 ** rng.integers(3, 13)),
                inner_rows=int(2 ** rng.integers(2, 7)),
                write_bytes=int(rng.choice([1, 1000, 256 << 10])),
                page_bytes=int(rng.choice([64, 4096])),
            ),
        )

    @property
    def next_fields(self) -> list[str]:
        """Fields of which the value after the last step is stored where it is known."""
        return observations(self.fields) + ["reward"] * self.has_next_reward


@dataclass(frozen=True)
class Known:
    """One episode: what it is made of, and how it is brought."""

    number: int
    columns: dict[str, NDArray[Any]]  # field -> (T, *shape)
    final: dict[str, NDArray[Any]]  # field -> (*shape): brought as row T + 1
    following: dict[str, NDArray[Any]]  # field -> (T, *shape): brought as next_<field>
    end_reason: str
    asked_reason: str | None  # what `append` is told
    metadata: dict[str, Any]  # with the seed, if it has one

    def __len__(self) -> int:
        return len(self.columns["reward"])

    @property
    def data(self) -> dict[str, Any]:
        """What `append` is given."""
        flat: dict[str, Any] = dict(self.columns)
        for name, value in self.final.items():
            flat[name] = stacked([*flat[name], value], flat[name])
        flat.update({f"next_{name}": rows for name, rows in self.following.items()})
        return _nested({n: c.tolist() if c.dtype == object else c for n, c in flat.items()})

    def steps(self) -> Iterator[dict[str, Any]]:
        """What `EpisodeStream.add` is given, the final observation included."""
        flat = {**self.columns, **{f"next_{name}": rows for name, rows in self.following.items()}}
        for t in range(len(self)):
            yield _nested({name: rows[t] for name, rows in flat.items()})
        if self.final:
            yield _nested(self.final)

    @property
    def can_be_streamed(self) -> bool:
        """A stream takes the final value of all observations or of none."""
        return not self.final or len(self.final) == len(observations(self.columns))

    @property
    def seed(self) -> int:
        return self.metadata.get("seed", -1)

    @cached_property
    def json(self) -> bytes:
        """The metadata as it is stored: the seed has a column of its own."""
        rest = {key: value for key, value in self.metadata.items() if key != "seed"}
        return json.dumps(rest, separators=(",", ":")).encode() if rest else b""

    @property
    def total_reward(self) -> NDArray[np.float64]:
        return self.columns["reward"].astype(np.float64).sum(axis=0)

    def next_value(self, name: str, t: int) -> Any | None:
        """The value after step t, None where nobody said what it is."""
        if name in self.following:
            return self.following[name][t]
        if t + 1 < len(self):
            return self.columns[name][t + 1]
        return self.final.get(name)

    def exceptions(self, name: str) -> list[tuple[int, bool, Any]]:
        """(offset, present, value) where the next value is not the next row, and at the end."""
        rows = self.columns[name]
        found: list[tuple[int, bool, Any]] = []
        for t in range(len(self)):
            value = self.next_value(name, t)
            if t + 1 == len(self):
                found.append((t, value is not None, nothing(rows) if value is None else value))
            elif value is not None and bytes_of(value) != bytes_of(rows[t + 1]):
                found.append((t, True, value))
        return found


def bytes_of(value: Any) -> bytes:
    """What is stored of a value."""
    return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()


def nothing(rows: NDArray[Any]) -> Any:
    """What is read where a column has no value."""
    return "" if rows.dtype == object else np.zeros(rows.shape[1:], rows.dtype)


def stacked(values: Sequence[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Values of one step each as a column."""
    column = np.empty((len(values), *like.shape[1:]), like.dtype)
    for t, value in enumerate(values):
        column[t] = value
    return column


def observations(names: Iterable[str]) -> list[str]:
    """Those that may have one row more than there are steps."""
    return [name for name in names if name.split("/")[0] == "observation"]


@lru_cache(maxsize=512)
def known_episode(seed: int, number: int) -> Known:
    """Episode `number` of the store `seed`."""
    plan = Plan.of(seed)
    rng = np.random.default_rng([seed, number])
    length = int(rng.choice(LENGTHS))
    columns = {
        name: _values(rng, (length, *shape), dtype) for name, (shape, dtype) in plan.fields.items()
    }
    for name in {"observation", "observation/screen"} & columns.keys():
        if not plan.has_noise:
            columns[name] &= 1
    reason = END_REASONS[rng.integers(4)]
    for flag in {"terminated", "truncated"} & columns.keys():
        columns[flag][:] = False
        columns[flag][-1] = reason == flag
    columns["reward"] = rng.integers(-9, 9, columns["reward"].shape).astype(columns["reward"].dtype)
    if rng.random() < 0.1:
        columns["reward"].reshape(-1)[0] = rng.choice(EXCEPTIONAL_REWARDS)
    final, following = _next_values(rng, plan, columns, number)
    asked = reason if reason not in ("cut", *columns) or rng.random() < 0.2 else None
    return Known(number, columns, final, following, reason, asked, _metadata(rng, number))


def _next_values(
    rng: np.random.Generator, plan: Plan, columns: dict[str, NDArray[Any]], number: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    observed = observations(columns)
    kind = rng.choice(["none", "final", "one final", "given", "gaps"])
    final: dict[str, NDArray[Any]] = {}
    following: dict[str, NDArray[Any]] = {}
    if kind in ("final", "one final"):
        for name in observed if kind == "final" else observed[:1]:
            final[name] = _values(rng, (1, *columns[name].shape[1:]), dtype_of(columns[name]))[0]
    elif kind in ("given", "gaps"):
        for name in observed:
            rows, dtype = columns[name], dtype_of(columns[name])
            last = _values(rng, (1, *rows.shape[1:]), dtype)
            following[name] = np.concatenate([rows[1:], last])
            if kind == "gaps":
                at = rng.random(len(rows)) < 0.3
                following[name][at] = _values(rng, rows.shape, dtype)[at]
    # The first episode decides which fields besides observations have next values.
    if plan.has_next_reward and (number == 0 or rng.random() < 0.5):
        following["reward"] = columns["reward"] + columns["reward"].dtype.type(1)
    return final, following


def dtype_of(column: NDArray[Any]) -> str:
    return TEXT if column.dtype == object else column.dtype.name


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Any bits, NaNs and denormals included; booleans are 0 or 1, texts may be empty."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == TEXT:
        letters = [rng.integers(len(LETTERS), size=size) for size in rng.integers(0, 9, shape)]
        return np.array(["".join(LETTERS[i] for i in row) for row in letters], object)
    kind = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(rng.bytes(num_bytes), kind).reshape(shape).copy()


def _metadata(rng: np.random.Generator, number: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if rng.random() < 0.7:
        metadata["policy"] = f"policy-{number}"
    if rng.random() < 0.3:
        metadata["note"] = {"text": "é" * int(rng.integers(300)), "list": [1, None, 2.5]}
    if rng.random() < 0.6:
        metadata["seed"] = int(rng.integers(1 << 40))
    return metadata


def expected_arrays(plan: Plan, episodes: Sequence[Known]) -> dict[str, NDArray[Any]]:
    """Every array of a store by path, except the checksums, which `verify` recomputes."""
    lengths = np.array([len(episode) for episode in episodes], "<i8")
    starts = np.cumsum([0, *lengths])[:-1].astype("<i8")
    arrays: dict[str, NDArray[Any]] = {}
    for name, (shape, dtype) in plan.fields.items():
        columns = [e.columns[name] for e in episodes]
        if dtype == TEXT:
            arrays.update(_text_arrays(f"steps/{name}", [v for rows in columns for v in rows]))
        else:
            arrays[f"steps/{name}"] = _joined(columns, shape, dtype)
    arrays["steps/done"] = np.zeros(lengths.sum(), bool)
    arrays["steps/done"][starts + lengths - 1] = True
    arrays["steps/episode"] = np.repeat(np.arange(len(episodes)), lengths)
    arrays["episodes/start"], arrays["episodes/length"] = starts, lengths
    arrays["episodes/end_reason"] = np.array(
        [END_REASONS.index(e.end_reason) for e in episodes], "u1"
    )
    arrays["episodes/seed"] = np.array([e.seed for e in episodes], "<i8")
    arrays["episodes/metadata/values"] = np.frombuffer(b"".join(e.json for e in episodes), "u1")
    arrays["episodes/metadata/end"] = np.cumsum([len(e.json) for e in episodes]).astype("<i8")
    arrays["episodes/return"] = _joined(
        [e.total_reward[None] for e in episodes], plan.fields["reward"][0], "<f8"
    )
    for name in plan.next_fields:
        arrays.update(_next_arrays(plan, name, episodes, starts))
    return arrays


def _next_arrays(
    plan: Plan, name: str, episodes: Sequence[Known], starts: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    found = [
        (start + offset, present, value)
        for episode, start in zip(episodes, starts, strict=True)
        for offset, present, value in episode.exceptions(name)
    ]
    values, (shape, dtype) = [value for _, _, value in found], plan.fields[name]
    arrays = {
        f"next/{name}/step": np.array([step for step, _, _ in found], "<i8"),
        f"next/{name}/present": np.array([present for _, present, _ in found], bool),
    }
    if dtype == TEXT:
        return {**arrays, **_text_arrays(f"next/{name}/value", values)}
    return {**arrays, f"next/{name}/value": stacked(values, np.empty((0, *shape), dtype))}


def _text_arrays(path: str, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)])[1:].astype("<i8")
    return {f"{path}/values": np.frombuffer(b"".join(encoded), "u1"), f"{path}/end": ends}


def live_ranges(
    plan: Plan, arrays: dict[str, NDArray[Any]], first: int
) -> dict[str, tuple[int, int]]:
    """The live range of every dimension where episode `first` is the oldest that is held.

    Args:
        arrays: what `expected_arrays` says of all episodes that ever were, at least one.
    """
    step = int(arrays["episodes/start"][first])
    ranges = {
        "step": (step, len(arrays["steps/done"])),
        "episode": (first, len(arrays["episodes/start"])),
        "episode/metadata/values": _elements(arrays, "episodes/metadata", first),
    }
    for name in plan.next_fields:
        steps = arrays[f"next/{name}/step"]
        ranges[f"next/{name}"] = int((steps < step).sum()), len(steps)
    for name in (n for n, (_, dtype) in plan.fields.items() if dtype == TEXT):
        ranges[f"{name}/values"] = _elements(arrays, f"steps/{name}", step)
        row, _ = ranges[f"next/{name}"]
        ranges[f"next/{name}/values"] = _elements(arrays, f"next/{name}/value", row)
    return ranges


def _elements(arrays: dict[str, NDArray[Any]], path: str, row: int) -> tuple[int, int]:
    """Which elements a ragged array has from a row on."""
    return int(arrays[f"{path}/end"][row - 1]) if row else 0, len(arrays[f"{path}/values"])


def _joined(parts: list[NDArray[Any]], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.concatenate([np.empty((0, *shape), dtype), *parts]).astype(dtype, copy=False)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        group = nested
        *parents, last = name.split("/")
        for parent in parents:
            group = group.setdefault(parent, {})
        group[last] = value
    return nested
