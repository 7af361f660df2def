"""A second reader of format 1, written from `docs/format.md` and nothing else.

It has JSON, numpy, a CRC and zstd, and imports nothing of expstore: what it agrees with the first
reader about, the document says.
Numbers in comments are sections of the document.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def canonical(value: Any) -> str:
    """Canonical JSON (5.1)."""
    if isinstance(value, dict):
        members = (f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(map(escaped, value)) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def escaped(character: str) -> str:
    if character in ESCAPES:
        return ESCAPES[character]
    if " " <= character <= "~":
        return character
    words = character.encode("utf-16-be")
    return "".join(f"\\u{words[i : i + 2].hex()}" for i in range(0, len(words), 2))


def crc32c(data: Any, before: int = 0) -> int:
    return int(google_crc32c.extend(before, bytes(data)))


def unpacked_shard(data: bytes, num_chunks: int) -> bytes:
    """The rows of a shard, up to the last inner chunk that is there (6.2)."""
    trailer, crc = data[-16 * num_chunks - 4 : -4], data[-4:]
    assert crc32c(trailer) == int.from_bytes(crc, "little")
    rows = b""
    for offset, size in np.frombuffer(trailer, "<u8").reshape(-1, 2).tolist():
        if size < 2**64 - 1:
            frame, crc = data[offset : offset + size - 4], data[offset + size - 4 : offset + size]
            assert crc32c(frame) == int.from_bytes(crc, "little")
            rows += zstd.decompress(frame)
    return rows


class FormatReader:
    """A store as of its newest commit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        document = json.loads((path / "zarr.json").read_bytes())
        self.expstore = document["attributes"]["expstore"]
        assert self.expstore["format"] == 1
        crc = self.expstore["commit"].pop("crc32c")
        assert crc == crc32c(canonical(document).encode()), "5.2"
        self.members = document["consolidated_metadata"]["metadata"]
        self.fields = self.expstore["schema"]["fields"]
        self.dims = self.expstore["commit"]["dims"]

    def array(self, name: str) -> NDArray[Any]:
        """The live rows of an array (4.1, 5, 6)."""
        about = self.members[name]
        start, stop = self.dims[about["dimension_names"][0]]
        assert about["shape"][0] == stop
        dtype = np.dtype(about["data_type"]).newbyteorder("<")
        chunk_rows, *row = about["chunk_grid"]["configuration"]["chunk_shape"]
        assert row == about["shape"][1:]
        parts = [np.empty((0, *row), dtype)]
        for chunk in range(start // chunk_rows, -(-stop // chunk_rows)):
            file = self.path / name / ".".join(["c", str(chunk), *["0"] * len(row)])
            data, (codec, *_) = file.read_bytes(), about["codecs"]
            num_bytes = chunk_rows * int(np.prod(row, dtype=int)) * dtype.itemsize
            if codec["name"] == "sharding_indexed":
                inner_rows = codec["configuration"]["chunk_shape"][0]
                data = unpacked_shard(data, chunk_rows // inner_rows).ljust(num_bytes, b"?")
            assert len(data) == num_bytes, "6.1"
            first = chunk * chunk_rows
            rows = np.frombuffer(data, dtype).reshape(chunk_rows, *row)
            parts.append(rows[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def column(self, field: str, path: str) -> Any:
        """The rows of a field's array, or a list of one array per row if it is ragged (7.3)."""
        if not self.fields[field]["ragged"]:
            return self.array(path)
        dimension = self.members[f"{path}/values"]["dimension_names"][0]
        values, ends = self.array(f"{path}/values"), self.array(f"{path}/end")
        edges = [0, *(ends - self.dims[dimension][0]).tolist()]
        assert edges[-1] == len(values)
        return [values[low:high] for low, high in pairwise(edges)]

    def next_values(self, field: str) -> tuple[Any, NDArray[np.bool_]]:
        """The next value of every step, and whether there is one (7.1)."""
        rows, done = self.column(field, f"steps/{field}"), self.array("steps/done")
        values = [*rows[1:], rows[0]]
        present = np.ones(len(rows), bool)
        if self.fields[field]["next"]:
            steps = self.array(f"next/{field}/step") - self.dims["step"][0]
            assert (np.diff(steps) > 0).all()
            assert np.isin(np.flatnonzero(done), steps).all()
            for step, value in zip(steps, self.column(field, f"next/{field}/value"), strict=True):
                values[step] = value
            present[steps] = self.array(f"next/{field}/present")
        else:
            for step in np.flatnonzero(done):
                is_ragged = self.fields[field]["ragged"]
                values[step] = rows[0][:0] if is_ragged else np.zeros_like(rows[0])
            present = ~done
        return values, present

    def has_next(self) -> NDArray[np.bool_]:
        """7.1"""
        with_next = [name for name, field in self.fields.items() if field["next"]]
        if not with_next:
            return ~self.array("steps/done")
        answer = np.ones(len(self.array("steps/done")), bool)
        for name in with_next:
            answer &= self.next_values(name)[1]
        return answer

    def end_reasons(self) -> list[str]:
        names = self.members["episodes/end_reason"]["attributes"]["names"]
        return [names[reason] for reason in self.array("episodes/end_reason")]

    def seeds(self) -> list[int | None]:
        missing = self.members["episodes/seed"]["attributes"]["missing"]
        return [None if seed == missing else int(seed) for seed in self.array("episodes/seed")]

    def metadata_bytes(self) -> list[bytes]:
        """The JSON of each episode (8)."""
        values = self.array("episodes/metadata/values").tobytes()
        first = self.dims["episode/metadata/values"][0]
        ends = [0, *(self.array("episodes/metadata/end") - first)]
        return [values[low:high] for low, high in pairwise(ends)]

    def metadata(self) -> list[dict[str, Any]]:
        return [json.loads(text) if text else {} for text in self.metadata_bytes()]

    def deleted(self) -> list[int]:
        """Numbers of the deleted episodes, checked (8.2)."""
        if "deleted" not in self.dims:
            return []
        columns = [self.array(f"deleted/{n}") for n in ("episode", "length", "crc32c")]
        rows = zip(*columns, strict=True)
        for row, (episode, length, crc) in enumerate(rows, self.dims["deleted"][0]):
            assert crc == crc32c(np.array([row, episode, length], "<i8").tobytes())
        return sorted(n for n in columns[0].tolist() if n >= self.dims["episode"][0])

    def field_checksums(self, field: str) -> list[int]:
        """Recomputed (8.1)."""
        rows = self.column(field, f"steps/{field}")
        sums = [self._checksum(field, rows[part]) for part in self._episodes()]
        if not self.fields[field]["next"]:
            return sums
        step = self.array(f"next/{field}/step") - self.dims["step"][0]
        present = self.array(f"next/{field}/present")
        value = self.column(field, f"next/{field}/value")
        for episode, part in enumerate(self._episodes()):
            exceptions = 0
            for i in np.flatnonzero((part.start <= step) & (step < part.stop)):
                offset = np.array(step[i] - part.start, "<i8")
                exceptions = crc32c(offset.tobytes() + present[i].tobytes(), exceptions)
                exceptions = self._checksum(field, value[i : i + 1], exceptions)
            sums[episode] = crc32c(np.array(exceptions, "<u4").tobytes(), sums[episode])
        return sums

    def _checksum(self, field: str, rows: Any, before: int = 0) -> int:
        if not self.fields[field]["ragged"]:
            return crc32c(rows.tobytes(), before)
        for row in rows:
            before = crc32c(np.array(len(row), "<i8").tobytes() + row.tobytes(), before)
        return before

    def index_checksums(self) -> list[int]:
        """Recomputed (8.1)."""
        columns = [self.array(f"episodes/{n}") for n in ("start", "length", "end_reason", "seed")]
        if "reward" in self.fields:
            returns = self.array("episodes/return")
        else:
            returns = np.empty((len(columns[0]), 0), "<f8")
        checksums = [
            self.array(f"episodes/crc32c/{field}")
            for field in sorted(self.fields)
            if "added" not in self.fields[field]
        ]
        return [
            crc32c(
                b"".join(np.array(column[e], "<i8").tobytes() for column in columns)
                + returns[e].tobytes()
                + b"".join(column[e].tobytes() for column in checksums)
                + metadata
            )
            for e, metadata in enumerate(self.metadata_bytes())
        ]

    def history(self) -> list[dict[str, Any]]:
        """Lines of `__expstore/commits` whose checksum holds (10)."""
        found = []
        for line in (self.path / "__expstore/commits").read_bytes().splitlines():
            text, _, crc = line.rpartition(b" ")
            assert crc == b"%08x" % crc32c(text)
            assert text == canonical(json.loads(text)).encode()
            found.append(json.loads(text))
        return found

    def _episodes(self) -> list[slice]:
        """The rows of each episode (8)."""
        start = self.array("episodes/start") - self.dims["step"][0]
        length = self.array("episodes/length")
        stops = start + length
        assert start.tolist() == [0, *stops[:-1]][: len(start)]
        return [slice(int(s), int(e)) for s, e in zip(start, stops, strict=True)]


def saved_priorities(path: Path) -> dict[str, Any]:
    """The state of a saved set (16)."""
    document = json.loads((path / "zarr.json").read_bytes())
    ours = document["attributes"]["expstore_priorities"]
    assert ours["format"] == 1
    crc = ours.pop("crc32c")
    assert crc == crc32c(canonical(document).encode())
    for place, crc in ours["arrays"].items():
        name = f"{ours['generation']}/{place}"
        about = document["consolidated_metadata"]["metadata"][name]
        num_rows, *row = about["shape"]
        chunk_rows = about["chunk_grid"]["configuration"]["chunk_shape"][0]
        dtype = np.dtype(about["data_type"]).newbyteorder("<")
        data = b""
        for chunk in range(-(-num_rows // chunk_rows)):
            file = path / name / ".".join(["c", str(chunk), *["0"] * len(row)])
            data += file.read_bytes()
            assert (
                len(data)
                == (chunk + 1) * chunk_rows * int(np.prod(row, dtype=int)) * dtype.itemsize
            )
        num_values = int(np.prod(about["shape"], dtype=int))
        rows = np.frombuffer(data, dtype, num_values).reshape(about["shape"])
        assert crc == crc32c(rows.tobytes())
        *parents, last = place.split("/")
        here = ours["state"]
        for key in parents:
            here = here[int(key)] if isinstance(here, list) else here[key]
        assert here[last] is None
        here[last] = rows
    return ours["state"]
