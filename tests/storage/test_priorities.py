"""Saved priorities as files: the former set or the new one, whole, whatever happens."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

import expstore
from expstore.errors import (
    DamagedError,
    FormatError,
    SchemaError,
    StateError,
    StorageError,
    StoreLockedError,
)
from expstore.storage import files, priorities
from expstore.storage.pointer import Pointer
from expstore.storage.priorities import (
    check_set_name,
    load_state,
    read_pointer,
    save_state,
    set_names,
)
from expstore.storage.states import taken_apart
from tests.format_reader import saved_priorities
from tests.storage.saved import IDS, state_of
from tests.torture.faults import (
    Operation,
    failing,
    frozen,
    interposed,
    recorded,
    shortened,
    unsynced,
)

ROOT = Path(__file__).parents[2]


def number_of(path: Path) -> int | None:
    """Which state is saved, if any; it must be that one in all its parts."""
    state = load_state(path)
    if state is None:
        return None
    number = state["seed"] - 2**70
    assert_same(state, state_of(number))
    return int(number)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    (document, arrays), (expected, theirs) = taken_apart(one), taken_apart(other)
    assert document == expected
    assert list(arrays) == list(theirs)
    for place, array in arrays.items():
        assert (array.dtype, array.shape) == (theirs[place].dtype, theirs[place].shape), place
        assert array.tobytes() == theirs[place].tobytes(), place


def left_behind(path: Path) -> list[str]:
    """What lies in a set beside its pointer, its lock and its newest generation."""
    pointer = read_pointer(path)
    usual = {"zarr.json", "__expstore", pointer.generation if pointer else ""}
    return sorted({entry.name for entry in path.iterdir()} - usual)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.exp" / "priorities" / "run"


@pytest.fixture(autouse=True)
def _one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def together(calls: Iterable[Callable[[], None]]) -> None:
        with ExitStack() as stack:
            for call in reversed(list(calls)):
                stack.callback(call)

    monkeypatch.setattr(files, "together", together)


# -- saved and loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 1024, 1025, 5000])
def test_what_was_saved_comes_back(path: Path, num_steps: int) -> None:
    assert load_state(path) is None

    save_state(path, state_of(3, num_steps), IDS)

    found = load_state(path)
    assert found is not None
    assert_same(found, state_of(3, num_steps))


def test_saving_again_replaces_the_former_generation(path: Path) -> None:
    for number in range(3):
        save_state(path, state_of(number), IDS)
        assert number_of(path) == number
        assert left_behind(path) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "state's a is of type object"),
        (np.array(["x"]), "state's a is of type ndarray"),
        (np.array(1.0), "state's a is of type ndarray"),
        (np.zeros(1, np.complex128), "state's a is of type ndarray"),
        ({"b": [1, {1: 2}]}, "key 1 in a/b/1"),
        ({"../x": 1}, r"key '\.\./x' in a"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_written(
    path: Path, value: Any, text: str
) -> None:
    with pytest.raises(StateError, match=text):
        save_state(path, {"a": value}, IDS)

    assert not path.exists()


def test_numbers_of_numpy_become_those_of_python(path: Path) -> None:
    save_state(path, {"seed": np.int64(7), "beta": np.float32(0.5), "of": (1, np.True_)}, IDS)

    assert load_state(path) == {"seed": 7, "beta": 0.5, "of": [1, True]}


def test_big_endian_and_strided_arrays_come_back_as_the_same_numbers(path: Path) -> None:
    save_state(path, {"raw": np.arange(6, dtype=">f4")[::2], "runs": np.ones((4, 3))[:, 1:]}, IDS)

    found = load_state(path)
    assert found is not None
    assert (found["raw"].tolist(), found["runs"].shape) == ([0, 2, 4], (4, 2))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "__x", "zarr.json", "zarr.json.partial", "x.partial", "a\n",
     "\x7f", "\ud800", "x" * 201, 7, None],
)  # fmt: skip
def test_a_name_that_is_no_directory_is_refused(name: Any) -> None:
    with pytest.raises(SchemaError, match="name of saved priorities"):
        check_set_name(name)


@pytest.mark.parametrize("name", ["per-run-3", ".hidden", "lauf 3 ü", "x" * 200])
def test_other_names_are_names(path: Path, name: str) -> None:
    save_state(path.with_name(check_set_name(name)), state_of(1), IDS)

    assert set_names(path.parent) == [name]


def test_priorities_of_other_stores_are_not_saved_over(path: Path) -> None:
    save_state(path, state_of(1), IDS)

    with pytest.raises(StateError, match=f"of the stores {IDS[0]}, not of c, d; save under"):
        save_state(path, state_of(2), ["c", "d"])

    assert number_of(path) == 1


def test_an_array_of_the_store_is_not_saved_over(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"action": np.arange(3)})
    before = fingerprint(tmp_path)

    with pytest.raises(FormatError, match="no saved priorities; choose another name"):
        save_state(tmp_path / "a.exp" / "steps", state_of(1), IDS)

    assert fingerprint(tmp_path) == before


def fingerprint(path: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() if f.is_file() else b"" for f in sorted(path.rglob("*"))}


# -- as Zarr -------------------------------------------------------------------------------------


def test_any_reader_of_zarr_opens_the_arrays(path: Path) -> None:
    save_state(path, state_of(4, 2000), IDS)
    place = "sampler/parts/1/streams/0"

    group = zarr.open_group(path, mode="r")
    (generation,) = group.group_keys()
    arrays = group[f"{generation}/{place}"]

    assert arrays["raw"][...].tolist() == [4.0] * 2000
    assert arrays["raw"].dtype == np.float32
    assert (arrays["runs"].shape, arrays["runs"].dtype) == ((0, 2), np.int64)
    directory = path / generation / place
    assert zarr.open_array(directory / "raw", mode="r")[1999] == 4.0
    assert [name for name, _ in zarr.open_group(directory, mode="r").members()] == ["raw", "runs"]
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/raw/"}}
    assert tensorstore.open(spec, read=True).result().read().result().sum() == 8000
    dataset = xarray.open_zarr(directory, chunks=None)
    assert dataset["raw"].dims == (f"{place}/raw",)


def test_a_second_reader_finds_what_the_document_says(path: Path) -> None:
    save_state(path, state_of(4), IDS)

    found = saved_priorities(path)

    assert_same(found, state_of(4))


def test_the_data_are_listed_without_priorities(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"action": np.arange(3)})
        writer.commit()
        before = sorted(zarr.open_group(tmp_path / "a.exp", mode="r").keys())
        save_state(tmp_path / "a.exp/priorities/x", state_of(1), IDS)
        writer.append({"action": np.arange(3)})

    assert sorted(zarr.open_group(tmp_path / "a.exp", mode="r").keys()) == before
    with expstore.Writer(tmp_path / "a.exp") as writer:
        assert writer.recovery.removed_files == 0
    assert number_of(tmp_path / "a.exp/priorities/x") == 1
    assert expstore.verify(tmp_path / "a.exp").is_sound


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("former", [None, 1])
def test_a_kill_at_any_operation_leaves_the_former_set_or_the_new_one(
    path: Path, tmp_path: Path, former: int | None
) -> None:
    """What a kill would leave is loaded, and saved over, before and half way through each call."""
    copy = tmp_path / "copy" / "run"
    seen: list[int | None] = []
    last: list[Any] = [None]
    if former is not None:
        save_state(path, state_of(former), IDS)

    def look(operation: Operation) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        if path.exists():
            shutil.copytree(path, copy)
        seen.append(number_of(copy))
        if len(seen) % 5 == 0 or seen[-1] != last[0]:
            with interposed(unsynced(lambda _, perform, __: perform())):
                save_state(copy, state_of(9), IDS)
            assert number_of(copy) == 9
            assert left_behind(copy) == []
        last[0] = seen[-1]

    with interposed(frozen(look)):
        save_state(path, state_of(2), IDS)

    assert seen == sorted(seen, key=lambda number: number == 2)
    assert set(seen) == ({former, 2} if former else {None})  # nothing comes after the first rename
    assert number_of(path) == 2
    assert len(seen) > 40


def started(path: Path, task: str, first: int, count: int) -> "subprocess.Popen[bytes]":
    """A process of its own that saves."""
    arguments = [str(path), task, str(first), str(count)]
    return subprocess.Popen([sys.executable, "-m", "tests.storage.saved", *arguments], cwd=ROOT)


def test_a_killed_process_leaves_no_lock(path: Path) -> None:
    save_state(path, state_of(1), IDS)

    assert started(path, "killed", 2, 20).wait() == -signal.SIGKILL

    assert number_of(path) == 1
    assert left_behind(path) != []
    save_state(path, state_of(3), IDS)
    assert number_of(path) == 3
    assert left_behind(path) == []


# -- failing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_an_error_at_any_operation_leaves_the_former_set_or_the_new_one(
    path: Path, error: int, lasting: bool
) -> None:
    save_state(path, state_of(0), IDS)
    stride = 3 if lasting else 2
    number, fault_at, fired = 0, random.randrange(stride), [Operation(0, "", "")]
    log: list[Operation] = []
    while fired:
        fault_at, fired = fault_at + stride, []
        log.clear()
        action = unsynced(recorded(log, failing(fault_at, error, fired, lasting=lasting)))
        with interposed(action):
            try:
                save_state(path, state_of(number + 1), IDS)
            except StorageError:
                assert fired
            else:  # only what is allowed to fail did: the removal of what failed before
                assert not fired, fired
        is_renamed = any(op.call == "replace" and op.path == f"{path}/zarr.json" for op in log)
        number += is_renamed
        assert number_of(path) == number, fired
        # A rename that failed may have been done all the same, so nothing is removed then.
        if fired and not lasting and not is_renamed and fired[0].call != "replace":
            assert left_behind(path) in ([], ["zarr.json.partial"]), fired
    assert left_behind(path) == []
    assert fault_at > 50


def test_a_full_disk_is_named_and_costs_nothing(path: Path) -> None:
    save_state(path, state_of(1), IDS)
    before = fingerprint(path)

    def full(operation: Operation, perform: Callable[[], Any], _: Any) -> Any:
        if operation.call == "pwrite" and operation.path.endswith("/c.0"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return perform()

    with interposed(full), pytest.raises(StorageError, match=r"c\.0.*the disk is full: free"):
        save_state(path, state_of(2), IDS)

    after = fingerprint(path)
    assert {name: after[name] for name in before if "holder" not in name} == {
        name: data for name, data in before.items() if "holder" not in name
    }
    assert after.keys() == before.keys()


def test_writes_that_the_system_takes_in_parts_are_completed(path: Path) -> None:
    with interposed(unsynced(shortened(lambda num_bytes: min(num_bytes, 700)))):
        save_state(path, state_of(2), IDS)

    assert number_of(path) == 2


def test_everything_is_synced_before_the_pointer_says_so(path: Path) -> None:
    log: list[Operation] = []
    with interposed(recorded(log)):
        save_state(path, state_of(1), IDS)
        save_state(path, state_of(2), IDS)

    written: set[str] = set()  # since they were synced
    names: set[str] = set()  # directories with names that are new since they were synced
    known = {str(parent) for parent in path.parents if parent.name != "priorities"}
    known.discard(str(path.parent.parent))
    num_renames = 0
    for op in log:
        if "__expstore" in op.path:  # its lock needs no durability
            op = Operation(op.number, op.call, op.path.partition("/__expstore")[0])
            written.discard(op.path)
            if op.call != "makedirs":
                continue
        if op.call in ("pwrite", "ftruncate"):
            written.add(op.path)
        elif op.call == "fsync":
            written.discard(op.path)
            names.discard(op.path)
        elif op.call == "open" and op.path != str(path / "zarr.json.partial"):
            names.add(str(Path(op.path).parent))
        elif op.call == "makedirs":
            for made in {op.path, *map(str, Path(op.path).parents)} - known:
                known.add(made)
                names.add(str(Path(made).parent))
        elif op.call == "replace":
            num_renames += 1
            assert (written, names) == (set(), set())
            names.add(str(path))
        elif op.call == "unlink":  # the former generation goes when the new one is there for good
            assert names == set()
    assert num_renames == 2


# -- side by side --------------------------------------------------------------------------------


def test_who_is_saving_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(path, state_of(1), IDS)
    monkeypatch.setattr(priorities, "WAIT_S", 0)
    refused: list[str] = []

    def look(operation: Operation) -> None:
        if operation.path.endswith("/zarr.json.partial") and not refused:
            with pytest.raises(StoreLockedError) as raised:
                save_state(path, state_of(3), IDS)
            refused.append(str(raised.value))

    with interposed(frozen(look)):
        save_state(path, state_of(2), IDS)

    expected = f"{path} is being written by process {os.getpid()} on "
    assert refused[0].startswith(expected)
    assert refused[0].endswith("; wait for it, or save under another name")
    assert number_of(path) == 2


def test_processes_that_save_the_same_set_do_not_break_each_other(path: Path) -> None:
    """While readers look on: each of them sees one whole generation or another."""
    save_state(path, state_of(0), IDS)
    writers = [started(path, "save", 100 * k, 12) for k in (1, 2)]
    seen: set[int | None] = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(number_of(path))

    assert [writer.returncode for writer in writers] == [0, 0]
    assert None not in seen
    assert number_of(path) in (111, 211)
    assert left_behind(path) == []


def test_a_reader_whose_generation_goes_reads_the_next_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pointer and the arrays somebody saved, twice."""
    save_state(path, state_of(1), IDS)
    real, pending = files.read, [state_of(3), state_of(2)]

    def read(file: Path) -> bytes:
        if file.name.startswith("c.") and pending:
            state = pending.pop()
            thread = threading.Thread(target=save_state, args=(path, state, IDS))
            thread.start()
            thread.join()
        return real(file)

    monkeypatch.setattr(files, "read", read)

    assert number_of(path) == 3
    assert not pending


# -- damaged -------------------------------------------------------------------------------------


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_in_an_array_is_found(path: Path) -> None:
    save_state(path, state_of(1), IDS)
    raw, seen = next(path.rglob("raw/c.1")), next(path.rglob("seen/c.0.0"))
    last = (1499 - 1024) * 4

    flipped(raw, last)
    with pytest.raises(DamagedError, match=r"streams/0/raw fail their checksum; restore"):
        load_state(path)
    flipped(raw, last)
    flipped(seen, 8)
    with pytest.raises(DamagedError, match=r"parts/1/seen fail their checksum"):
        load_state(path)


def test_a_flipped_bit_anywhere_in_the_pointer_is_found(path: Path) -> None:
    save_state(path, state_of(1, 8), IDS)
    pointer = path / "zarr.json"
    size = pointer.stat().st_size

    for at in range(0, size, 7):
        flipped(pointer, at)
        with pytest.raises((DamagedError, FormatError), match=str(path)):
            load_state(path)
        flipped(pointer, at)
    assert load_state(path) is not None


@pytest.mark.parametrize("change", ["missing", "short", "long"])
def test_an_array_of_another_size_is_found(path: Path, change: str) -> None:
    save_state(path, state_of(1), IDS)
    file = next(path.rglob("raw/c.1"))
    data = file.read_bytes()
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if change == "short" else data + b"x")

    with pytest.raises(DamagedError, match=str(file)):
        load_state(path)


def test_a_damaged_set_can_be_saved_over(path: Path) -> None:
    save_state(path, state_of(1), IDS)
    (path / "zarr.json").write_bytes(b"{")
    with pytest.raises(DamagedError, match=r"zarr\.json is not the pointer of saved priorities"):
        load_state(path)

    save_state(path, state_of(2), IDS)

    assert number_of(path) == 2
    assert left_behind(path) == []


def test_a_set_of_a_newer_version_is_neither_read_nor_saved_over(path: Path) -> None:
    save_state(path, state_of(1), IDS)
    document = json.loads((path / "zarr.json").read_bytes())
    document["attributes"]["expstore_priorities"]["format"] = 2
    (path / "zarr.json").write_text(json.dumps(document))

    with pytest.raises(FormatError, match="format 2, but this version of expstore reads up to 1"):
        load_state(path)
    with pytest.raises(FormatError, match="install a newer"):
        save_state(path, state_of(2), IDS)


def test_a_pointer_cannot_lead_out_of_its_directory(path: Path) -> None:
    """Whoever made the file can make its checksum, too."""
    save_state(path, {"raw": np.ones(3, np.float32)}, IDS)
    pointer = read_pointer(path)
    assert pointer is not None
    for generation, place in (("../../elsewhere1", "raw"), (pointer.generation, "../raw")):
        array = pointer.arrays["raw"]
        layout = type(array.layout)(f"{generation}/{place}", "raw", (), array.layout.dtype, 1024)
        moved = Pointer(generation, 0.0, ("x",), {}, {place: type(array)(layout, 3, array.crc32c)})
        (path / "zarr.json").write_text(json.dumps(moved.documents()[""]))

        with pytest.raises(DamagedError, match="is not the pointer of saved priorities"):
            load_state(path)


def test_verify_and_inspect_look_at_saved_sets(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"action": np.arange(3)})
    for name in ("one", "two"):
        save_state(tmp_path / "a.exp/priorities" / name, state_of(1), IDS)
    assert expstore.verify(tmp_path / "a.exp").is_sound

    flipped(next((tmp_path / "a.exp/priorities/one").rglob("raw/c.1")), 0)
    (tmp_path / "a.exp/priorities/two/zarr.json").write_bytes(b"")

    problems = expstore.verify(tmp_path / "a.exp").problems
    assert [problem.what for problem in problems] == ["priorities", "priorities"]
    assert "one" in problems[0].text and "two" in problems[1].text
    one, two = expstore.inspect(tmp_path / "a.exp").priorities
    assert (one.name, one.num_steps) == ("one", 1500)
    assert (two.name, two.num_steps, two.time) == ("two", None, None)
    assert one.time is not None and one.allocated_bytes >= 6000
