"""Flashbax Vault: arrays of environments and time, of which the user decides what a row is.

Nothing in a vault says whether a row's action led to its observation or was chosen on it, so the
import asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install
from expstore.formats.json_files import read_object
from expstore.formats.keyed import last_only, scalars
from expstore.formats.provenance import folder_provenance
from expstore.formats.rings import Cut, Lane, RingSource
from expstore.formats.source import Format, SourceEpisode

METADATA, MANIFEST = "metadata.json", "manifest.ocdbt"
INDEX = "vault_index"
CACHE_BYTES = 64 << 20  # of decoded chunks, each of which has the rows of many episodes
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError)
NAMES = {"obs": "observation", "observations": "observation"}
NAMES |= {"actions": "action", "rewards": "reward"}
TERMINATED = ("terminated", "terminals", "terminal", "terminations", "termination")
TRUNCATED = ("truncated", "truncations", "truncation", "timeouts")
DONE = ("done", "dones")
ALIGNMENTS = {
    "step": "action, reward and flags of a row belong to its observation",
    "arrival": "a row's action belongs to its observation, its reward and flags to arriving there",
    "previous": "a row's action, reward and flags belong to the observation of the row before",
}
FINAL = {"arrival": "the last row of an episode, whose action led nowhere"}
FINAL |= {"previous": "the first row of an episode, whose action and reward are of no step"}
LOOKS_FOR = (
    f"a vault of Flashbax: a folder with {METADATA}, which has structure_shape, and {MANIFEST}; "
    "or the folder above it"
)


class VaultFolder(RingSource):
    """The episodes of a vault; keys count from 0, `row of the batch/number` for several."""

    def __init__(self, path: Path, *, alignment: str | None = None) -> None:
        super().__init__(str(path.resolve()))
        folder = _folder(path)
        if folder is None:
            raise SourceError(f"{path} is no vault; looked for {LOOKS_FOR}")
        if alignment not in ALIGNMENTS:
            meanings = ", ".join(f"{name} ({text})" for name, text in ALIGNMENTS.items())
            given = "" if alignment is None else f", got {alignment!r}"
            raise SourceError(
                f"{path} does not say which observation an action belongs to; give "
                f"--alignment (alignment=), one of {meanings}{given}"
            )
        self._folder, self._alignment = folder, alignment
        self.final_rows = int(alignment in FINAL)
        self._metadata = read_object(folder / METADATA)
        self._arrays = self._open_arrays()
        self._names = {name: _field(name) for name in self._arrays}
        self._flags = {
            kind: next((name for name in self._names if name in names), None)
            for kind, names in (
                ("terminated", TERMINATED),
                ("truncated", TRUNCATED),
                ("done", DONE),
            )
        }
        ends = [name for name in self._flags.values() if name is not None]
        if not ends:
            raise SourceError(
                f"{path} does not say where an episode ends; looked for "
                f"{', '.join((*TERMINATED, *TRUNCATED, *DONE))}, found {', '.join(self._arrays)}"
            )
        self.boundary_rule = f"an episode ends with the row that has {' or '.join(ends)} set"
        self.boundary_rule += f"; {ALIGNMENTS[alignment]} (alignment {alignment})"
        self.cut(self._lanes(), self._end_rows)

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"Flashbax vault {self.name}: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        rows = {name: self._rows(name, cut) for name in self._arrays}
        num_steps = cut.stop - cut.start - self.final_rows
        data: dict[str, Any] = {}
        for kind, old in self._flags.items():
            if old is None:
                continue
            is_set = bool(self._all_set(old, rows[old])[-1])
            self.account.found(old, is_set)
            if kind != "done":
                data[kind] = last_only(is_set, num_steps)
            if kind == "done" or rows[old].ndim > 1:  # of several agents, or of no one kind
                data["dones" if old == "done" else f"{old}_of_agents"] = self._of_steps(rows[old])
            del rows[old]
        for old, values in rows.items():
            name = self._names[old]
            if name == "reward":
                values = scalars(name, values, self.account)
            is_observation = name.split("/")[0] == "observation"
            data[name] = values if is_observation else self._of_steps(values, name)
        if self._alignment in FINAL:
            self.account.drop(1, FINAL[self._alignment])
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=self.end_of(cut, data) if num_steps else None,
            metadata=self._dataset,
            provenance={
                "format": FORMAT.name,
                "environment": cut.lane.number,
                "rows": [cut.start, cut.stop],
                **self._where,
            },
        )

    @cached_property
    def _where(self) -> dict[str, Any]:
        return folder_provenance(self._folder)

    @property
    def _dataset(self) -> dict[str, Any]:
        found = {
            name: value
            for name, value in self._metadata.items()
            if not name.startswith("structure_") and name != "version"
        }
        return {"dataset": found} if found else {}

    def _of_steps(self, values: NDArray[Any], name: str = "") -> NDArray[Any]:
        """The rows that are steps; of actions and the rest it is not the same ones."""
        if self._alignment == "step":
            return values
        if self._alignment == "arrival" and name.split("/")[0] not in ("reward", ""):
            return values[:-1]
        return values[1:]

    def _rows(self, name: str, cut: Cut) -> NDArray[Any]:
        try:
            found = self._arrays[name][cut.lane.number, cut.start : cut.stop].read().result()
        except UNREADABLE as error:
            text = " ".join(str(error).split())
            raise SourceError(f"its rows of {name} cannot be read: {text}") from error
        return np.asarray(found)

    def _open_arrays(self) -> dict[str, Any]:
        """Leaf -> array of environments and time, its path joined by `/`."""
        arrays: dict[str, Any] = {}
        try:
            self._num_rows = int(_open(self._folder, INDEX).read().result()[0])
            for name in _leaves(self._metadata["structure_shape"]):
                array = _open(self._folder, name.replace("/", ".") + ".")
                if len(array.shape) < 2 or 0 in array.shape:
                    self.account.left_out[name] = f"has the shape {array.shape}"
                else:
                    arrays[name] = array
                    self._check_chunks(name, array)
        except UNREADABLE as error:
            text = " ".join(str(error).split())
            raise SourceError(f"{self._folder} cannot be opened as a vault: {text}") from error
        return arrays

    def _check_chunks(self, name: str, array: Any) -> None:
        """Report chunks that are not there; they would be read as zeros."""
        chunk = array.chunk_layout.read_chunk.shape
        lengths = (array.shape[0], self._num_rows, *array.shape[2:])
        expected = math.prod(
            -(-length // size) for length, size in zip(lengths, chunk, strict=True)
        )
        found = [k for k in array.kvstore.list().result() if not k.startswith(b".")]
        if self._num_rows and len(found) < expected:
            text = f"{expected - len(found):,} chunks of {name} are not there; they are read as 0"
            self.account.remark(text)

    def _lanes(self) -> list[Lane]:
        batches = {array.shape[0] for array in self._arrays.values()}
        if len(batches) != 1:
            raise SourceError(f"the arrays of {self._folder} have different batches, {batches}")
        count = batches.pop()
        stretch = ((0, self._num_rows),) if self._num_rows else ()
        return [Lane(str(n) if count > 1 else "", n, stretch) for n in range(count)]

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        ends = np.zeros(lane.num_rows, bool)
        whole = Cut(lane, 0, lane.num_rows, is_finished=False)
        for name in self._flags.values():
            if name is not None and lane.num_rows:
                ends |= self._all_set(name, self._rows(name, whole))
        return ends

    def _all_set(self, name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
        """One flag a row; an episode of several agents ends with the last of them."""
        if values.dtype != bool and not ((values == 0) | (values == 1)).all():
            raise SourceError(f"{name} must hold nothing but 0 and 1")
        return np.asarray(values.reshape(len(values), -1).astype(bool).all(axis=1))


def _open(folder: Path, name: str) -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise MissingExtraError(
            f"vaults of Flashbax need tensorstore; {how_to_install('vault')}"
        ) from error
    store = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": name}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    spec = {"driver": "zarr", "kvstore": store}
    return tensorstore.open(spec, open=True, read=True, context=context).result()


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of the arrays."""
    found: list[str] = []
    for name, node in tree.items():
        path = f"{prefix}{name}"
        found += _leaves(node, f"{path}/") if isinstance(node, Mapping) else [path]
    return found


def _field(name: str) -> str:
    first, *rest = name.split("/")
    return "/".join([NAMES.get(first, first), *rest])


def _folder(path: Path) -> Path | None:
    """The vault: itself, or the only one in a folder."""
    if _is_vault(path):
        return path
    if not path.is_dir():
        return None
    found = sorted(entry for entry in path.iterdir() if _is_vault(entry))
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:8])
        raise SourceError(f"{path} has several vaults, {names}; give the folder of one")
    return found[0] if found else None


def _is_vault(path: Path) -> bool:
    if not (path / METADATA).is_file() or not (path / MANIFEST).is_file():
        return False
    try:
        return isinstance(read_object(path / METADATA).get("structure_shape"), Mapping)
    except SourceError:
        return False


def _sniff(path: Path) -> bool:
    return _folder(path) is not None


FORMAT = Format(
    name="flashbax",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=VaultFolder,
    options=frozenset({"alignment"}),
)
