"""RLDS data sets, Open X-Embodiment's too, as TFRecord files of TensorFlow Datasets.

A record is an episode of T + 1 rows: `action` and `reward` of a row belong to its observation,
and those of the row with `is_last` are invalid, since it is the final observation. TensorFlow is
not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.episode import nest
from expstore.errors import SourceError
from expstore.formats.jobs import check_jobs
from expstore.formats.json_files import read_object
from expstore.formats.keyed import flags, last_only
from expstore.formats.provenance import HashedFiles
from expstore.formats.rlds_features import BFLOAT16, Feature, leaves, rows_of
from expstore.formats.rlds_folder import FEATURES, INFO, Shard, data_folder, find_shards, steps_of
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode
from expstore.formats.tf_example import Values, parse_example
from expstore.formats.tfrecord import TFRecords

STEPS, OBSERVATION = "steps/", "observation"
FLAGS = ("is_first", "is_last", "is_terminal")
MAX_VALUES = 256  # of what is kept as metadata
LAST_ROW = "the row with is_last, whose action and reward RLDS has as invalid"
LOOKS_FOR = (
    f"a data set of TensorFlow Datasets with steps: a folder with {FEATURES}, {INFO} and TFRecord "
    "files, the folder above it, or one such file"
)


class RldsDataset:
    """The episodes of all splits; a key is the file's name and the number of the record in it."""

    boundary_rule = (
        "each record is one episode; is_terminal on the row with is_last terminated it, and "
        "is_last alone truncated it"
    )
    num_steps = None  # all records would have to be read

    def __init__(self, path: Path, *, keep_encoded: bool = False, jobs: int = 1) -> None:
        folder = data_folder(path)
        if folder is None:
            raise SourceError(f"{path} is not of RLDS; looked for {LOOKS_FOR}")
        self.name = str(path.resolve())
        self.account = Account()
        self._folder, self._keep_encoded, self._jobs = folder, keep_encoded, check_jobs(jobs)
        self._hashes = HashedFiles(folder)
        tree = read_object(folder / FEATURES)
        self._steps = leaves(steps_of(tree))
        self._others = {n: f for n, f in leaves(tree).items() if not n.startswith(STEPS)}
        self._info = read_object(folder / INFO) if (folder / INFO).is_file() else {}
        self._shards = find_shards(path, folder, self._info)

    @property
    def num_episodes(self) -> int | None:
        counts = [shard.num_episodes for shard in self._shards]
        return None if None in counts else sum(count or 0 for count in counts)

    def describe(self) -> str:
        files = "file" if len(self._shards) == 1 else "files"
        count = self.num_episodes
        known = "" if count is None else f", {count:,} episodes"
        return f"RLDS data set {self.name}: {len(self._shards):,} {files}{known}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for shard in self._shards:
            number = 0
            try:
                with (self._folder / shard.name).open("rb") as file:
                    records = TFRecords(file, (self._folder / shard.name).stat().st_size)
                    for number, length in enumerate(records):
                        key = f"{shard.name}/{number}"
                        if key in imported.keys:
                            records.skip(length)
                            continue
                        episode = self._read(key, shard, records, length)
                        if episode is not None:
                            yield episode
                        del episode  # not to be held while the next one is read
                self._count(shard, number + 1)
            except SourceError as error:
                self.account.fail(f"{shard.name} after its record {number}", str(error))
            except OSError as error:
                self.account.fail(shard.name, f"cannot be read: {error.strerror or error}")

    def close(self) -> None:
        pass

    def _read(
        self, key: str, shard: Shard, records: TFRecords, length: int
    ) -> SourceEpisode | None:
        content = None
        try:
            content = records.read(length)
            return self._episode(key, shard, parse_example(content))
        except SourceError as error:
            if content is None and type(error) is SourceError:  # nothing more is found after it
                raise
            self.account.fail(key, str(error))
            return None

    def _episode(self, key: str, shard: Shard, example: Mapping[str, Values]) -> SourceEpisode:
        rows = {
            name: rows_of(
                feature, STEPS + name, example, keep_encoded=self._keep_encoded, jobs=self._jobs
            )
            for name, feature in self._steps.items()
            if self._is_read(name, feature)
        }
        lengths = {name: len(values) for name, values in rows.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SourceError(f"its steps must have equally many rows, got {listed}")
        num_rows = next(iter(lengths.values()), 0)
        given = {n: flags(n, rows.pop(n), Account()) for n in FLAGS if n in rows}
        is_last = given.get("is_last", np.zeros(num_rows, bool))
        is_terminal = given.get("is_terminal", np.zeros(num_rows, bool))
        if is_last[:-1].any() or is_terminal[:-1].any():
            raise SourceError("is_last or is_terminal is set before its last row")
        has_final = bool(num_rows and (is_last[-1] or is_terminal[-1]))
        num_steps = num_rows - has_final
        if has_final:
            self._drop_last(rows)
        data = {
            name: values if _is_observation(name) else values[:num_steps]
            for name, values in rows.items()
        }
        data["terminated"] = last_only(has_final and bool(is_terminal[-1]), num_steps)
        data["truncated"] = last_only(has_final and not is_terminal[-1], num_steps)
        for name, column in (("is_last", is_last), ("is_terminal", is_terminal)):
            self.account.found(name, bool(num_rows and column[-1]))
        if not has_final:
            text = "is_last is not set on the last row, so its action is kept, as incomplete"
            self.account.remark(text, 1)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=None if has_final or not num_rows else "incomplete",
            metadata=self._metadata(shard, example),
            provenance={"format": FORMAT.name, **self._hashes.entries(shard.name)},
        )

    def _drop_last(self, rows: Mapping[str, Any]) -> None:
        self.account.drop(1, LAST_ROW)
        last = [v[-1] for n, v in rows.items() if n == "action" or n.startswith("action/")]
        if any(np.any(value) for value in last):
            self.account.remark("the action of the row with is_last is not zero, yet left out", 1)

    def _is_read(self, name: str, feature: Feature) -> bool:
        """Whether a feature is of a kind that is known; others are reported."""
        if feature.problem:
            self.account.left_out[name] = feature.problem
            return False
        if feature.dtype == BFLOAT16:
            self.account.dtype_changes[name] = "bfloat16 to float32"
        return True

    def _metadata(self, shard: Shard, example: Mapping[str, Values]) -> dict[str, Any]:
        """What the episode says of itself, and the name of its split."""
        values: dict[str, Any] = {}
        for name, feature in self._others.items():
            try:
                if feature.problem:
                    raise SourceError(feature.problem)
                found = rows_of(feature, name, example, keep_encoded=True)
                if feature.kind == "image" or np.size(found) > MAX_VALUES:
                    raise SourceError("is larger than what is kept as metadata")
                values[name] = found[0] if len(found) == 1 else found
            except SourceError as error:
                self.account.left_out[name] = str(error).removeprefix(f"{name} ")
        metadata = nest(values)
        dataset = {k: self._info[k] for k in ("name", "version") if k in self._info}
        if dataset:
            metadata["dataset"] = dataset
        return metadata | ({"split": shard.split} if shard.split else {})

    def _count(self, shard: Shard, num_records: int) -> None:
        if shard.num_episodes not in (None, num_records):
            self.account.fail(
                shard.name, f"has {num_records:,} records, but is to have {shard.num_episodes:,}"
            )


def _is_observation(name: str) -> bool:
    return name == OBSERVATION or name.startswith(f"{OBSERVATION}/")


def _sniff(path: Path) -> bool:
    return data_folder(path) is not None


FORMAT = Format(
    name="rlds",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=RldsDataset,
    options=frozenset({"keep_encoded", "jobs"}),
)
