"""ExportSource: the episodes of a store as exporters take them, and what is known before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from expstore.episode import flatten
from expstore.errors import SchemaError
from expstore.schema import FLAGS, Field, is_observation
from expstore.storage.store import Store


class Exporter(Protocol):
    """Writes one format."""

    name: str
    is_folder: bool  # whether the target is a directory

    def losses(self, source: ExportSource) -> list[str]:
        """What of the store it cannot express, one line each.

        Raises:
            SchemaError: nothing could be written that the format's readers would take.
        """
        ...

    def write(self, source: ExportSource, target: Path) -> None:
        """Write everything else to a path that is free."""
        ...


@dataclass(frozen=True)
class ExportEpisode:
    """One episode, whole."""

    number: int
    data: dict[str, Any]  # by flat name, as `Store.episode` gives it
    length: int
    end_reason: str
    seed: int | None
    metadata: dict[str, Any]

    def final(self, name: str) -> bool:
        """Whether a field has the row after the last step."""
        return len(self.data[name]) > self.length

    def rows(self, name: str) -> Any:
        """(T, *shape) without that row."""
        return self.data[name][: self.length]

    def next_rows(self, name: str) -> Any:
        """(T, *shape) values after each step; zeros after the last one where it is not known."""
        if f"next_{name}" in self.data:
            return self.data[f"next_{name}"]
        values = self.data[name]
        if self.final(name):
            return values[1:]
        return np.concatenate([values[1:], np.zeros_like(values[:1])])

    def flag(self, name: str) -> Any:
        """(T,) a flag as recorded, or as the end reason has it."""
        if name in self.data:
            return self.data[name]
        flags = np.zeros(self.length, bool)
        flags[-1] = self.end_reason == name
        return flags


class ExportSource:
    """A store or view, with what exporters ask of it before they write anything.

    Args:
        progress: called with (episodes handed out, episodes in all).
    """

    def __init__(self, store: Store, progress: Callable[[int, int], None] | None = None) -> None:
        self.store = store
        self._progress = progress

    @property
    def fields(self) -> dict[str, Field]:
        return self.store.fields

    @property
    def observations(self) -> list[str]:
        """Names of the observations that every format takes: numbers of one shape."""
        return [name for name in self.plain if is_observation(name)]

    @property
    def plain(self) -> list[str]:
        """Names of the fields that are numbers of one shape."""
        return [name for name, f in self.fields.items() if not f.ragged]

    def episodes(self) -> Iterator[ExportEpisode]:
        """Each episode in turn; one is in memory at a time."""
        for done, row in enumerate(self.store.episodes, 1):
            yield ExportEpisode(
                row["number"],
                {n: _widened(v, self.fields.get(n.removeprefix("next_")))
                 for n, v in flatten(self.store.episode(row["number"])).items()},
                row["length"],
                row["end_reason"],
                row["seed"],
                row["metadata"],
            )  # fmt: skip
            if self._progress is not None:
                self._progress(done, self.store.num_episodes)

    # -- what is known before --------------------------------------------------------------------

    @cached_property
    def reasons(self) -> Counter[str]:
        """How many episodes ended in each way."""
        return Counter(np.asarray(self.store.episodes["end_reason"]).tolist())

    @cached_property
    def known_finals(self) -> int:
        """Episodes whose final observation is known."""
        if not self.observations:
            return 0
        last = self.store.spans.start + self.store.spans.length - 1
        return int(np.count_nonzero(self.store.read(last, "has_next")["has_next"]))

    @cached_property
    def gaps(self) -> list[str]:
        """Fields whose next values say more than that there is a final observation."""
        found = []
        for name in (n for n, f in self.fields.items() if f.has_next):
            for snapshot in self.store.snapshots:
                start, stop = snapshot.root.commit.dims[f"next/{name}"]
                episodes = snapshot.stop_episode - snapshot.first_episode
                if stop - start > episodes or not is_observation(name):
                    found.append(name)
                    break
        return found

    def metadata_losses(self, expressed: Callable[[str, Any], bool]) -> list[str]:
        """A line where episodes have keys in their metadata that are not expressed."""
        lost: Counter[str] = Counter()
        for row in self.store.episodes:
            entries = dict(row["metadata"])
            if row["seed"] is not None:
                entries["seed"] = row["seed"]
            lost.update(key for key, value in entries.items() if not expressed(key, value))
        return [f"metadata {key!r} of {count:,} episodes" for key, count in sorted(lost.items())]

    def field_losses(self, expressed: Callable[[str, Field], bool], why: str) -> list[str]:
        """A line for each field that is not expressed."""
        return [
            f"field {name!r}: {why}" for name, f in self.fields.items() if not expressed(name, f)
        ]

    def ragged_losses(self) -> list[str]:
        return self.field_losses(lambda _, f: not f.ragged, "any number of values per step")

    def bfloat16_losses(self) -> list[str]:
        text = "bfloat16 is written as float32"
        return self.field_losses(lambda _, f: f.dtype != "bfloat16", text)

    def gap_losses(self) -> list[str]:
        return [f"next values of field {name!r}, beyond the following step's" for name in self.gaps]

    def final_losses(self) -> list[str]:
        """Of formats whose rows all have a next observation, or none has one."""
        known, total = self.known_finals, self.store.num_episodes
        if known in (0, total):
            return []
        return [f"that {total - known:,} episodes have no final observation; zeros stand there"]

    def reason_losses(self, expressed: Iterable[str]) -> list[str]:
        names = set(expressed)
        return [
            f"that {count:,} episodes ended as {reason!r}"
            for reason, count in sorted(self.reasons.items())
            if reason not in names
        ]

    def flag_losses(self) -> list[str]:
        missing = [flag for flag in FLAGS if flag not in self.fields]
        return [f"that there is no field {flag!r}; end reasons stand there" for flag in missing]

    def require(self, format_name: str, *names: str) -> None:
        """Refuse a store without these fields, or with nothing in them.

        Raises:
            SchemaError: names what is missing.
        """
        missing = [n for n in names if n not in self.plain]
        if missing:
            raise SchemaError(
                f"{format_name} needs fields {', '.join(map(repr, names))} of one shape; the "
                f"store has no {', '.join(map(repr, missing))}, only {', '.join(self.plain)}"
            )


def _widened(values: Any, field: Field | None) -> Any:
    if field is None or field.dtype != "bfloat16" or field.ragged:
        return values
    return (np.asarray(values).astype(np.uint32) << 16).view(np.float32)
