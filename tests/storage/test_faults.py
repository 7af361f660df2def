"""Every operation on files fails, or is the last one: the store is at one of its commits."""

import errno
import hashlib
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import expstore
from expstore.errors import StorageError, WriterStateError
from expstore.storage import files
from expstore.storage import writer as storage_writer
from expstore.storage.commits import read_history
from expstore.storage.verification import verify
from tests.torture.check import check_episode, check_store
from tests.torture.child import NEVER_S
from tests.torture.episodes import SMALL, Known, Plan, known_episode
from tests.torture.faults import (
    Operation,
    failing,
    frozen,
    interposed,
    recorded,
    shortened,
    small_chunks,
    unsynced,
)

PLAN = Plan.of(SMALL)
IS_THOROUGH = settings.get_current_profile_name() == "thorough"
NEVER = 1 << 40
PARTS = 4  # of the operations, so that test processes can share them
FULL = (errno.ENOSPC, errno.EDQUOT)  # which stay so
OPENED = 2  # episodes of the store that is opened again


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two committed episodes."""
    path = tmp_path_factory.mktemp("template") / "store.exp"
    with small_chunks(PLAN.chunks), writer_of(path, durable=False) as writer:
        append_up_to(writer, OPENED)
    return path


@pytest.fixture(autouse=True)
def _same_operations_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing side by side, and nothing that depends on the time."""

    def one_after_the_other(calls: Iterable[Callable[[], None]]) -> None:
        with ExitStack() as stack:  # the first error is raised when all were called
            for call in reversed(list(calls)):
                stack.callback(call)

    monkeypatch.setattr(files, "together", one_after_the_other)
    monkeypatch.setattr(storage_writer, "DOCUMENTS_INTERVAL_S", 0)


def writer_of(path: Path, *, durable: bool = True) -> expstore.Writer:
    return expstore.Writer(
        path,
        layout=PLAN.layouts,
        chunk_steps=PLAN.chunk_steps,
        commit_interval_s=NEVER_S,
        durable=durable,
    )


def append(writer: expstore.Writer, known: Known) -> None:
    writer.append(known.data, end_reason=known.asked_reason, **known.metadata)


def append_up_to(writer: expstore.Writer, num_episodes: int) -> None:
    while writer.num_episodes < num_episodes:
        append(writer, known_episode(SMALL, writer.num_episodes))


def append_streamed(writer: expstore.Writer, known: Known) -> None:
    with writer.episode(end_reason=known.asked_reason, **known.metadata) as stream:
        for step in known.steps():
            stream.add(step)


def fingerprint(path: Path) -> bytes:
    """What readers see of a store; without what differs each time, such as the time."""
    seen = hashlib.blake2b(repr([entry["number"] for entry in read_history(path)]).encode())
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() or name.startswith("__expstore/") or name.endswith(".partial"):
            continue
        data = file.read_bytes()
        if name == "zarr.json":
            root = json.loads(data)["attributes"]["expstore"]
            data = json.dumps([root["schema"], root["commit"]["dims"]]).encode()
        seen.update(f"{name} {len(data)} ".encode() + data)
    return seen.digest()


def is_single(path: str) -> bool:
    """Whether it is a `zarr.json` that only readers of single arrays and groups look at."""
    return "/zarr.json" in path and "store.exp/zarr.json" not in path


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_any_operation_leaves_a_commit(tmp_path: Path, part: int) -> None:
    """Creation, first schema, appends with new files, a stream, two commits and closing.

    Before each operation, and in the middle of each write, a copy of the directory is what a
    kill would leave there: everything is read from it, and the next writer opens it.
    """
    path, copy = tmp_path / "store.exp", tmp_path / "copy.exp"
    looks: list[Operation] = []
    states: set[bytes] = set()
    seen: list[int] = []  # episodes of the states that this part looked at

    def look(operation: Operation) -> None:
        looks.append(operation)
        changed = looks[-2].path if len(looks) > 1 else ""
        # A partial file is nothing to readers, and the next writer removes it. Of the files that
        # only readers of single arrays look at, some stand for all.
        is_history = changed.endswith("__expstore/commits")
        is_hidden = changed.endswith(".partial") or ("__expstore" in changed and not is_history)
        if is_hidden or (is_single(changed) and operation.number % (1 if IS_THOROUGH else 9)):
            return
        state = fingerprint(path)
        is_others = state in states or len(states) % PARTS != part
        states.add(state)
        if is_others:
            return
        shutil.copytree(path, copy)
        seen.append(check_store(copy, SMALL, COMMITTED).num_episodes)
        if IS_THOROUGH or is_history or len(seen) % 4 == 0:
            with writer_of(copy, durable=False) as writer:
                append_up_to(writer, seen[-1] + 1)
            check_store(copy, SMALL, {seen[-1] + 1})
        shutil.rmtree(copy)

    path.mkdir()
    with small_chunks(PLAN.chunks), interposed(frozen(look)), writer_of(path) as writer:
        append(writer, known_episode(SMALL, 0))
        append_streamed(writer, known_episode(SMALL, 1))
        writer.commit()
        append(writer, known_episode(SMALL, 2))

    assert sorted(set(seen)) == list(COMMITTED)
    assert seen == sorted(seen)
    assert len(looks) > 400
    assert len(states) > 60


COMMITTED = (0, 2, 3)  # numbers of episodes at the commits of this test


# -- failing -------------------------------------------------------------------------------------


class Attempt:
    """One try to open a store, append, commit and close, with a fault in it."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.log: list[Operation] = []
        self.writer: expstore.Writer | None = None
        self.error: Exception | None = None
        self.fault: Operation | None = None
        # Episodes at each commit; a creation publishes a store without episodes.
        self._commits = [-1, 0, 2, 3] if fresh else [OPENED, OPENED + 1, OPENED + 2]

    def run(self, fault_at: int = 0, error: int = 0) -> None:
        """Open, append, commit, append and close; a full disk stays full, other faults pass."""
        fired: list[Operation] = []
        fault = failing(fault_at or NEVER, error, fired, lasting=error in FULL)
        with small_chunks(PLAN.chunks), interposed(unsynced(recorded(self.log, fault))):
            try:
                self.writer = writer_of(self.path)
                append_up_to(self.writer, self._commits[-2])
                self.writer.commit()
                append_up_to(self.writer, self._commits[-1])
                self.writer.close()
            except Exception as raised:
                self.error = raised
        self.fault = fired[0] if fired else None

    @property
    def committed(self) -> int:
        """Episodes of the newest commit: the root was replaced that often. -1: no store."""
        root = str(self.path / "zarr.json")
        return self._commits[sum(op.call == "replace" and op.path == root for op in self.log)]

    @property
    def aim(self) -> int:
        """Episodes in the end, one more than this attempt was to bring."""
        return self._commits[-1] + 1

    @property
    def must_reopen(self) -> bool:
        """Whether a commit cannot know what it left on disk."""
        assert self.fault is not None
        published = ("store.exp/zarr.json", "__expstore/commits")
        return self.fault.call == "fsync" or any(name in self.fault.path for name in published)

    @property
    def must_go_on(self) -> bool:
        """Whether rows could not be written, which can be done again."""
        assert self.fault is not None
        is_rows = "/c." in self.fault.path or self.fault.path.endswith("__expstore/writing")
        return is_rows and self.fault.call in ("pwrite", "ftruncate")


def faults_to_try(log: list[Operation]) -> list[int]:
    """Numbers of the operations to fail: all of them if thorough.

    Otherwise one array stands for all that are written alike, and of the files that only
    readers of single arrays look at, every seventh is tried.
    """
    alike = (
        "next/observation/step",
        "next/observation/present",
        "steps/episode",
        "episodes/crc",
    )
    alike += tuple(f"episodes/{name}" for name in ("start", "length", "end_reason", "seed", "ind"))
    chosen = []
    for operation in log:
        is_alike = any(f"store.exp/{name}" in operation.path for name in alike)
        if IS_THOROUGH or not (is_alike or (is_single(operation.path) and operation.number % 7)):
            chosen.append(operation.number)
    return chosen


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_at_any_operation_loses_nothing_that_was_committed(
    tmp_path: Path, template: Path, fresh: bool, part: int, error: int
) -> None:
    seen: set[bytes] = set()
    path = tmp_path / "store.exp"

    def attempt(fault_at: int = 0) -> Attempt:
        shutil.rmtree(path, ignore_errors=True)
        if not fresh:
            shutil.copytree(template, path)
        attempted = Attempt(path, fresh=fresh)
        attempted.run(fault_at, error)
        return attempted

    clean = attempt()
    assert clean.error is None
    faults = faults_to_try(clean.log)
    stride = 1 if IS_THOROUGH else 15 if error == errno.ENOSPC else 5
    offset = random.randrange(stride)  # others in every run, by the seed that pytest prints
    for fault_at in faults[offset::stride][part::PARTS]:
        tried = attempt(fault_at)
        assert isinstance(tried.error, StorageError), (tried.fault, tried.error)
        check_once(path, max(0, tried.committed), seen)
        go_on(tried)
        check_once(path, tried.aim, seen)
    assert len(faults) > 100


KINDS = [
    ("pwrite", errno.EDQUOT),
    ("open", errno.EDQUOT),
    ("ftruncate", errno.EIO),
    ("fsync", errno.EIO),
    ("replace", errno.EIO),
    ("replace", errno.EACCES),
    ("close", errno.EIO),
]


@pytest.mark.parametrize(("call", "error"), KINDS)
def test_every_kind_of_call_can_fail(tmp_path: Path, template: Path, call: str, error: int) -> None:
    """A few calls of each kind in every run, all of them if thorough."""
    seen: set[bytes] = set()
    path = tmp_path / "store.exp"

    def attempt(fault_at: int = 0) -> Attempt:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        attempted = Attempt(path, fresh=False)
        attempted.run(fault_at, error)
        return attempted

    numbers = [operation.number for operation in attempt().log if operation.call == call]
    tried_numbers = numbers if IS_THOROUGH else random.sample(numbers, min(3, len(numbers)))
    for fault_at in tried_numbers:
        tried = attempt(fault_at)
        assert isinstance(tried.error, StorageError), (tried.fault, tried.error)
        assert tried.error.errno == error
        check_once(path, max(0, tried.committed), seen)
        if call == "fsync" and tried.writer is not None:
            refuses(tried)
        go_on(tried)
        check_once(path, tried.aim, seen)
    assert len(tried_numbers) > 1


def refuses(tried: Attempt) -> None:
    """A writer whose sync failed says so, and publishes nothing any more."""
    assert tried.writer is not None
    with pytest.raises(WriterStateError, match="open a new one"):
        tried.writer.commit()


def test_delays_at_any_operation_show_readers_nothing_but_commits(tmp_path: Path) -> None:
    """Syncs go on side by side, each call takes a moment, and a reader looks all the time."""
    path, rng, seen = tmp_path / "store.exp", np.random.default_rng(3), set()
    errors: list[BaseException] = []
    is_done = threading.Event()

    def delayed(_: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        time.sleep(float(rng.random()) * 2e-4)
        return perform()

    def look() -> None:
        try:
            store = expstore.open(path)
            while not is_done.is_set():
                store = store.latest()
                seen.add(store.num_episodes)
                for number in range(store.num_episodes):
                    check_episode(store, number, known_episode(SMALL, number), PLAN)
        except BaseException as error:
            errors.append(error)

    with ThreadPoolExecutor(4) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "together", lambda calls: [*pool.map(lambda call: call(), calls)])
        with small_chunks(PLAN.chunks), writer_of(path) as writer:
            reader = threading.Thread(target=look)
            reader.start()
            with interposed(unsynced(delayed)):
                for count in (1, 3, 4):
                    append_up_to(writer, count)
                    writer.commit()
            is_done.set()
            reader.join()

    assert not errors, errors
    assert seen <= {0, 1, 3, 4}
    check_store(path, SMALL, {4})


def check_once(path: Path, num_episodes: int, seen: set[bytes]) -> None:
    """Read everything, unless the very same bytes were read before."""
    state = fingerprint(path) + bytes([num_episodes])
    if state not in seen:
        seen.add(state)
        check_store(path, SMALL, {num_episodes})


def go_on(tried: Attempt) -> None:
    """The fault is gone: with the same writer, or with a new one where it says so."""
    with small_chunks(PLAN.chunks):
        if tried.writer is not None:
            try:
                append_up_to(tried.writer, tried.aim)
                tried.writer.commit()
                assert not tried.must_reopen, tried.fault
            except WriterStateError as refused:
                assert "is closed" in str(refused) or not tried.must_go_on, (tried.fault, refused)
            tried.writer.close()
        with writer_of(tried.path, durable=False) as reopened:
            assert reopened.num_episodes in (max(0, tried.committed), tried.aim)
            append_up_to(reopened, tried.aim)


def test_a_failed_constructor_gives_the_lock_back(tmp_path: Path) -> None:
    """It kept the lock as long as the error was handled, and the next try found it locked."""
    path = tmp_path / "store.exp"
    fired: list[Operation] = []
    fault_at = 0
    while not fault_at or fired:
        fault_at += 1
        fired.clear()
        with interposed(failing(fault_at, errno.EIO, fired)):
            try:
                expstore.Writer(path).close()
            except StorageError:
                assert fired
                expstore.Writer(path, lock=True).close()
        shutil.rmtree(path)

    assert fault_at > 20


def test_an_append_that_was_refused_can_be_tried_again(tmp_path: Path) -> None:
    """At each of its operations in turn; then it is done once, and no episode came twice.

    A shard whose last chunk could not be written kept that chunk, and grew beyond its size.
    """
    path, chunks = tmp_path / "store.exp", replace(PLAN.chunks, rows=4, inner_rows=2)
    num_refused = 0
    with small_chunks(chunks), writer_of(path) as writer:
        for number in range(10):
            screens = np.full((1, 32, 32), number, np.uint8)
            fault_at, fired = 0, [Operation(0, "", "")]
            while fired:
                fault_at, fired = fault_at + 1, []
                with interposed(unsynced(failing(fault_at, errno.ENOSPC, fired))):
                    try:
                        writer.append({"observation": screens, "reward": [float(number)]})
                    except StorageError as refused:
                        assert "what was committed is safe" in str(refused)
                        assert writer.num_episodes == number, fired
                        num_refused += 1
                    else:
                        assert not fired
            if number % 3 == 2:
                writer.commit()

    store = expstore.open(path)
    assert store.fields["observation"].layout == "coded"
    assert store.read(range(10), "reward")["reward"].tolist() == list(range(10))
    assert store.read(range(10))["observation"][:, 0, 0].tolist() == list(range(10))
    assert verify(path).is_sound
    assert num_refused > 100


def test_a_schema_that_was_discarded_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its chunk files, of another size, were taken for damaged ones of the next schema."""
    path = tmp_path / "store.exp"
    with small_chunks(PLAN.chunks), writer_of(path) as writer:
        writer.append({"observation": np.ones((40, 32, 32), "f8"), "reward": np.ones(40, "i2")})
        writer.discard()
        append_up_to(writer, 2)

    check_store(path, SMALL, {2})


def test_after_a_failed_sync_the_writer_must_be_opened_again(tmp_path: Path) -> None:
    """The system drops what it could not write, and the next sync would say that all is well."""
    path = tmp_path / "store.exp"
    with small_chunks(PLAN.chunks):
        writer = writer_of(path)
        append_up_to(writer, 1)
        fired: list[Operation] = []

        def first_sync_fails(operation, perform, arguments):  # type: ignore[no-untyped-def]
            if operation.call == "fsync" and not fired:
                fired.append(operation)
                raise OSError(errno.EIO, "Input/output error")
            return perform()

        with interposed(first_sync_fails), pytest.raises(StorageError, match="check it before"):
            writer.commit()
        with pytest.raises(WriterStateError, match="open a new one"):
            append_up_to(writer, 2)
        with pytest.raises(WriterStateError, match="open a new one"):
            writer.commit()
        writer.close()
        with writer_of(path) as reopened:
            assert (reopened.num_episodes, reopened.recovery.lost_episodes) == (0, 1)
            append_up_to(reopened, 2)

    check_store(path, SMALL, {2})


# -- in parts ------------------------------------------------------------------------------------


def test_writes_that_the_system_takes_in_parts_are_completed(tmp_path: Path) -> None:
    path, rng = tmp_path / "store.exp", np.random.default_rng(1)

    def choose(num_bytes: int) -> int:
        return int(rng.integers(1, min(num_bytes, 500) + 1))

    with (
        small_chunks(PLAN.chunks),
        interposed(unsynced(shortened(choose))),
        writer_of(path) as writer,
    ):
        append_up_to(writer, 3)
        writer.commit()
        append_up_to(writer, 6)

    check_store(path, SMALL, {6})
    assert [entry["number"] for entry in read_history(path)] == [0, 1, 2]


# -- in order ------------------------------------------------------------------------------------


def history_of_operations(path: Path) -> list[Operation]:
    """Creation, commits, a discard with files left behind, and writing on."""
    log: list[Operation] = []
    with small_chunks(PLAN.chunks), interposed(recorded(log)):
        with writer_of(path) as writer:
            append_up_to(writer, 2)
            writer.commit()
            append_up_to(writer, 12)
            writer.discard()
            append_up_to(writer, 12)
            writer.commit()
            append_up_to(writer, 13)
        with writer_of(path) as writer:
            append_up_to(writer, 20)
    return log


def test_a_commit_syncs_everything_before_the_root_says_so(tmp_path: Path) -> None:
    """Whatever was written, created or renamed is synced when the root is replaced."""
    path = tmp_path / "store.exp"
    log = history_of_operations(path)

    files: set[str] = set()  # written since they were synced
    directories: set[str] = set()  # with names that are new since they were synced
    known: set[str] = set()
    num_commits = 0
    for op in log:
        if op.call in ("pwrite", "write", "ftruncate"):
            files.add(op.path)
        elif op.call == "fsync":
            files.discard(op.path)
            directories.discard(op.path)
        elif op.call == "makedirs":
            for made in {op.path, *map(str, Path(op.path).parents)} - known:
                known.add(made)
                directories.add(str(Path(made).parent))
        elif op.call == "replace" and op.path != f"{path}/zarr.json":
            if op.source in files:  # it keeps its bytes under the new name
                files = files - {op.source} | {op.path}
            if "/c." in op.path:  # other names are not what a commit stands on
                directories.add(str(Path(op.path).parent))
        elif op.call == "replace":
            num_commits += 1
            assert not {name for name in files if "/c." in name}
            assert not {name for name in directories if name.startswith(f"{path}/")}
            assert f"{path}/zarr.json.partial" not in files
            assert f"{path}/__expstore/commits" not in files
    assert num_commits == 5


def test_directories_made_on_the_way_are_synced_before_there_is_a_root(tmp_path: Path) -> None:
    path = tmp_path / "some/new/store.exp"
    log: list[Operation] = []
    with interposed(recorded(log)):
        writer_of(path).close()

    root = next(
        at for at, op in enumerate(log) if op.call == "replace" and op.path.endswith(".json")
    )
    synced = {op.path for op in log[:root] if op.call == "fsync"}
    directories = (tmp_path, tmp_path / "some", path.parent, path, path / "__expstore")
    assert {str(directory) for directory in directories} <= synced


def test_the_order_of_a_commit(tmp_path: Path, template: Path) -> None:
    path = Path(shutil.copytree(template, tmp_path / "store.exp"))
    with small_chunks(PLAN.chunks):
        writer = writer_of(path)
        append_up_to(writer, OPENED + 4)
        log: list[Operation] = []
        with interposed(recorded(log)):
            writer.commit()
        log = [op for op in log if op.call not in ("close", "open")]
        writer.close()

    def places(call: str, *names: str) -> list[int]:
        return [
            at for at, op in enumerate(log) if op.call == call and any(n in op.path for n in names)
        ]

    root = places("replace", f"{path}/zarr.json")
    assert len(root) == 1
    written = [*places("pwrite", "/c."), *places("fsync", "/c."), *places("replace", "/c.")]
    history = [*places("write", "/commits"), *places("fsync", "/commits")]
    others = [at for at in places("replace", "zarr.json") if at not in root]
    prepared = [at for at in places("pwrite", "zarr.json") if f"{path}/zarr" not in log[at].path]

    assert max(written) < min(history)
    assert max(history) < root[0]
    assert log[root[0] - 1] == Operation(
        log[root[0] - 1].number, "fsync", f"{path}/zarr.json.partial"
    )
    assert log[root[0] + 1].call == "fsync" and log[root[0] + 1].path == str(path)
    assert root[0] < min(prepared) < min(others)
    assert len(others) > 20
