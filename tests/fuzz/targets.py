"""What is fuzzed: which files are replaced by hostile ones, and everything that then reads them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import expstore
from expstore.errors import ExpstoreError
from expstore.storage import files
from expstore.storage.coded import encode
from expstore.storage.layout import PRIORITIES_KEY, ROOT_KEY, canonical_json
from expstore.storage.priorities import load_state, read_pointer
from tests.fuzz.limits import limited_time
from tests.fuzz.made import episode, make_priorities, make_store
from tests.fuzz.mutations import mutated_bytes, mutated_file

MOST_STEPS = 1000  # read at a time, of however many there are said to be


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
        make: puts something sound into an empty directory.
        files: those in it that are to be replaced.
        hostile: a hostile version of a file's bytes.
        use: reads the directory, in every way or in those that are chosen at random; may raise
            nothing but an `ExpstoreError`.
    """

    make: Callable[[Path], Any]
    files: Callable[[Path], list[Path]]
    hostile: Callable[[Random, bytes], bytes]
    use: Callable[[Path, Random | None], None]


class Bench:
    """A sound directory of a target, in which one file after the other is replaced."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.target = name, TARGETS[name]
        self.directory = directory
        self._sound = directory / "sound"
        self._sound.mkdir(parents=True)
        self.target.make(self._sound)
        self._files = self.target.files(self._sound)
        assert self._files, name

    def use_sound(self) -> None:
        """Nothing is replaced, and nothing may be refused."""
        self._use(self._copied(), None)

    def try_one(self, rng: Random) -> bool:
        """One hostile file; whether it was refused. Anything but an `ExpstoreError` passes on."""
        file = rng.choice(self._files)
        data = self.target.hostile(rng, file.read_bytes())
        copy = self._copied()
        hostile = copy / file.relative_to(self._sound)
        hostile.write_bytes(data)
        try:
            self._use(copy, rng)
        except ExpstoreError:
            return True
        except BaseException as error:
            error.add_note(f"{self.name}: {hostile.name} was replaced by {data[:3000]!r}")
            raise
        return False

    def _copied(self) -> Path:
        # A fresh directory: what is mapped must not change, and some uses write.
        copy = Path(tempfile.mkdtemp(dir=self.directory)) / "copy"
        shutil.copytree(self._sound, copy)
        return copy

    def _use(self, copy: Path, rng: Random | None) -> None:
        try:
            with limited_time():
                self.target.use(copy, rng)
        finally:
            shutil.rmtree(copy.parent, ignore_errors=True)


# -- reading all of a store ------------------------------------------------------------------------


@contextmanager
def refused(errors: list[ExpstoreError]) -> Iterator[None]:
    """Go on after what is refused: other ways to read may be not."""
    try:
        yield
    except ExpstoreError as error:
        str(error)
        errors.append(error)


def use_store(path: Path, rng: Random | None) -> None:
    """Open it, and then one of the other things that people do with a store, or all of them.

    Raises:
        ExpstoreError: the first refusal, at the end.
    """
    errors: list[ExpstoreError] = []
    with refused(errors):
        read_store(expstore.open(path))
    for use in [rng.choice(USES)] if rng is not None else USES:
        with refused(errors):
            use(path)
    if errors:
        raise errors[0]


def read_older(path: Path) -> None:
    errors: list[ExpstoreError] = []
    for commit in expstore.history(path)[-3:]:
        with refused(errors):
            read_store(expstore.open(path, at=commit.number))
    if errors:
        raise errors[0]


def write_more(path: Path) -> None:
    with expstore.Writer(path, durable=False) as writer:
        writer.append(episode(1))


USES: list[Callable[[Path], Any]] = [
    expstore.inspect,
    expstore.verify,
    read_older,
    lambda path: expstore.delete(path, 'length > 3 and policy == "p1"', durable=False),
    write_more,
    lambda path: expstore.compact(path, path.with_name("compacted.exp")),
    expstore.repair,
]


def read_store(store: expstore.Store) -> None:
    repr(store)
    errors: list[ExpstoreError] = []
    with refused(errors):
        for row in store.episodes[:5]:
            dict(row)
        for name in ("length", "end_reason", "seed"):
            store.episodes[name]
    with refused(errors):
        len(store.filter(lambda row: row.get("policy") == "p1"))
    numbers = store.episode_numbers[:3]
    for number in numbers.tolist():
        with refused(errors):
            if store.spans.length.max() < MOST_STEPS:
                store.episode(number)
    steps = np.concatenate([store.spans.start[:MOST_STEPS], store.spans.start[-3:]])
    for name in [*store.fields, *(f"next_{name}" for name in store.fields), "has_next", "done"]:
        with refused(errors):
            store.read(steps, [name])
    if errors:
        raise errors[0]


def use_priorities(path: Path, rng: Random | None) -> None:
    read_pointer(path)
    load_state(path)


def use_source(path: Path, rng: Random | None) -> None:
    """Read a foreign file as an import does; what is left out was refused, too."""
    store = path.with_name("imported.exp")
    whole = [file for file in path.iterdir() if file.suffix == ".hdf5"]
    report = expstore.ingest_from(whole[0] if whole else path, store)
    read_store(expstore.open(store))
    if report.failures:
        raise expstore.errors.SourceError(report.failures[0].reason)


# -- checksums put right ---------------------------------------------------------------------------


def sealed_root(document: Any) -> Any:
    with suppress(KeyError, TypeError, AttributeError, RecursionError):
        commit = document["attributes"][ROOT_KEY]["commit"]
        commit.pop("crc32c", None)
        commit["crc32c"] = files.crc32c(canonical_json(document))
    return document


def sealed_pointer(document: Any) -> Any:
    with suppress(KeyError, TypeError, AttributeError, RecursionError):
        ours = document["attributes"][PRIORITIES_KEY]
        ours.pop("crc32c", None)
        ours["crc32c"] = files.crc32c(canonical_json(document))
    return document


def hostile_root(rng: Random, data: bytes) -> bytes:
    return mutated_file(rng, data, sealed_root)


def hostile_pointer(rng: Random, data: bytes) -> bytes:
    return mutated_file(rng, data, sealed_pointer)


def hostile_json(rng: Random, data: bytes) -> bytes:
    return mutated_file(rng, data, None)


def hostile_history(rng: Random, data: bytes) -> bytes:
    """Bytes or one line, whose checksum holds then."""
    if rng.randrange(3) == 0:
        return mutated_bytes(rng, data)
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line = mutated_file(rng, lines[at].rpartition(b" ")[0], None)
    lines[at] = line + b" %08x\n" % files.crc32c(line)
    return b"".join(lines)


def hostile_shard(rng: Random, data: bytes) -> bytes:
    """Bytes, the index at the end, or an inner chunk; their checksums hold then."""
    kind, index_bytes = rng.randrange(3), 16  # the shards here hold one inner chunk
    if kind == 0:
        return mutated_bytes(rng, data)
    body, index = data[: -index_bytes - 4], data[-index_bytes - 4 : -4]
    if kind == 1:
        index = mutated_bytes(rng, index)
    else:
        frame = mutated_bytes(rng, body[:-4])
        body = frame + files.crc32c(frame).to_bytes(4, "little")
        index = np.array([0, len(body)], "<u8").tobytes()
    return body + index + files.crc32c(index).to_bytes(4, "little")


def hostile_bomb(rng: Random, data: bytes) -> bytes:
    """An inner chunk that is a frame of far more than its rows."""
    body = encode(np.zeros(rng.choice((1, 1 << 16, 1 << 26)), np.uint8))
    index = np.array([0, len(body)], "<u8").tobytes()
    return body + index + files.crc32c(index).to_bytes(4, "little")


# -- foreign files ---------------------------------------------------------------------------------


def make_npz(path: Path) -> None:
    for number in range(2):
        data = episode(number)
        np.savez_compressed(
            path / f"ep{number}.npz",
            observation=data["observation"]["state"],
            action=data["action"],
            reward=data["reward"],
            terminated=data["terminated"],
            seed=np.array(number),
            end_reason=np.array("terminated"),
        )


def make_d4rl(path: Path) -> None:
    import h5py

    with h5py.File(path / "d4rl.hdf5", "w") as file:
        rows = [episode(number) for number in range(4)]
        for name, key in (
            ("actions", "action"),
            ("rewards", "reward"),
            ("terminals", "terminated"),
        ):
            file[name] = np.concatenate([row[key] for row in rows])
        file["observations"] = np.concatenate([row["observation"]["state"][1:] for row in rows])
        file["timeouts"] = np.zeros(len(file["rewards"]), bool)


def make_minari(path: Path) -> None:
    import h5py

    folder = path / "data"
    folder.mkdir()
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-9.0] * 3, "high": [9.0] * 3}
    two = {**box, "shape": [2], "low": [-9.0] * 2, "high": [9.0] * 2}
    metadata = {
        "dataset_id": "fuzz/x-v0",
        "total_episodes": 2,
        "total_steps": 8,
        "data_format": "hdf5",
        "observation_space": json.dumps(box),
        "action_space": json.dumps(two),
        "minari_version": "0.5.3",
        "dataset_size": 0.1,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for number, at in enumerate((0, 2)):
            data = episode(at)
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, total_steps=len(data["reward"]), seed=at)
            group["observations"] = data["observation"]["state"]
            group["actions"] = data["action"]
            group["rewards"] = data["reward"]
            group["terminations"] = data["terminated"]
            group["truncations"] = np.zeros(len(data["reward"]), bool)


def _named(*names: str) -> Callable[[Path], list[Path]]:
    return lambda path: [path / name for name in names]


def _all_below(top: str, pattern: str) -> Callable[[Path], list[Path]]:
    return lambda path: sorted(f for f in (path / top).rglob(pattern) if f.is_file())


def _source(make: Callable[[Path], None], pattern: str, hostile: Any = mutated_bytes) -> Target:
    return Target(make, _all_below("", pattern), hostile, use_source)


TARGETS = {
    "root": Target(make_store, _named("zarr.json"), hostile_root, use_store),
    "root copy": Target(make_store, _named("__expstore/root"), hostile_root, use_store),
    "history": Target(make_store, _named("__expstore/commits"), hostile_history, use_store),
    "notes": Target(
        make_store, _named("__expstore/writing", "__expstore/holder"), mutated_bytes, use_store
    ),
    "array metadata": Target(make_store, _all_below("steps", "zarr.json"), hostile_json, use_store),
    "shard": Target(
        make_store, _all_below("steps/observation/frame", "c.*"), hostile_shard, use_store
    ),
    "bomb": Target(
        make_store, _all_below("steps/observation/frame", "c.*"), hostile_bomb, use_store
    ),
    "rows": Target(make_store, _all_below("", "c.*"), mutated_bytes, use_store),
    "episode metadata": Target(
        make_store, _named("episodes/metadata/values/c.0"), mutated_bytes, use_store
    ),
    "pointer": Target(
        lambda path: make_priorities(path, ["0" * 32]),
        _named("zarr.json"),
        hostile_pointer,
        use_priorities,
    ),
    "npz": _source(make_npz, "*.npz"),
    "d4rl": _source(make_d4rl, "*.hdf5"),
    "minari": _source(make_minari, "*.hdf5"),
    "minari metadata": _source(make_minari, "metadata.json", hostile_json),
}
# Packages that are not always installed.
NEEDS = {name: ("h5py",) for name in ("d4rl", "minari", "minari metadata")}
