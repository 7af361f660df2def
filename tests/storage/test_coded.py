"""Compressed columns: the same rows as mapped ones, each chunk decoded once."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import expstore
from expstore.errors import DamagedError, SchemaError
from expstore.storage import mapping
from expstore.storage.coded import CodedAppender, CodedColumn
from expstore.storage.layout import ArrayLayout, inner_rows, shard_rows
from expstore.storage.parallel import Threads

LAYOUT = ArrayLayout("steps/x", "step", (3,), np.dtype("<i4"), chunk_rows=32, inner_rows=8)


def rows(first: int, last: int) -> np.ndarray[Any, Any]:
    return np.arange(first * 3, last * 3, dtype="<i4").reshape(-1, 3)


def write(appender: CodedAppender) -> None:
    """What a commit does, without syncing."""
    appender.flush()
    appender.place()


def column(root: Path, num_rows: int) -> CodedColumn:
    (root / "steps/x").mkdir(parents=True)
    appender = CodedAppender(root, LAYOUT, 0)
    appender.append(rows(0, num_rows))
    write(appender)
    return CodedColumn(root, LAYOUT)


def test_a_window_that_covers_chunks_decodes_each_once_into_the_batch(tmp_path: Path):
    coded = column(tmp_path, 100)
    out = np.zeros((40, 3), "<i4")

    coded.take(np.arange(4, 44), out, 0, 100)

    assert np.array_equal(out, rows(4, 44))
    assert coded.num_decoded == 6  # rows 0-7 to 40-47


def test_windows_that_share_a_chunk_decode_it_once(tmp_path: Path):
    coded = column(tmp_path, 100)
    wanted = np.concatenate([np.arange(0, 10), np.arange(5, 15), np.arange(2, 12), [3, 3, 3, 99]])
    out = np.zeros((len(wanted), 3), "<i4")

    coded.take(wanted, out, 0, 100)

    assert np.array_equal(out[:, 0], wanted * 3)
    assert coded.num_decoded == 3  # rows 0-7, 8-15 and 96-103


def test_a_batch_of_a_replay_decodes_each_chunk_once(tmp_path: Path):
    pytest.importorskip("torch")
    with expstore.Writer(tmp_path / "a.exp", layout="coded") as writer:
        for _ in range(8):
            frames = np.zeros((101, 64, 64), np.uint8)
            writer.append({"observation": frames, "action": np.zeros(100, np.int64)})
    store = expstore.open(tmp_path / "a.exp")
    unit = expstore.Sequence(length=50)
    replay = expstore.Replay(store, 64, unit=unit, fields=["observation"], num_threads=2)
    frames = store.snapshots[0].columns["steps/observation"]
    assert isinstance(frames, CodedColumn)

    for _ in range(5):
        before = frames.num_decoded
        index = replay.sample().info.index.unique()
        assert frames.num_decoded - before == len((index // frames.layout.inner_rows).unique())


@settings(max_examples=150)
@given(
    wanted=st.lists(st.integers(0, 69), max_size=60),
    num_threads=st.sampled_from([1, 3]),
    windows=st.lists(st.tuples(st.integers(0, 69), st.integers(1, 40)), max_size=6),
)
def test_any_rows_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: list[int],
    num_threads: int,
    windows: list[tuple[int, int]],
):
    coded = column(tmp_path_factory.mktemp("coded"), 70)
    runs = [np.minimum(np.arange(first, first + length), 69) for first, length in windows]
    order = np.concatenate([np.array(wanted, np.int64), *runs]).astype(np.int64)
    out = np.full((len(order), 3), -1, "<i4")

    coded.take(order, out, 0, 70, Threads(num_threads))

    assert np.array_equal(out, rows(0, 70)[order])
    assert coded.num_decoded == len(np.unique(order // 8))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_that_no_cache_holds_are_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
):
    pytest.importorskip("numba")
    monkeypatch.setattr(mapping, "STREAMED_BYTES", 1)
    monkeypatch.setattr(mapping, "STREAMED_ROW_BYTES", 1)
    rng = np.random.default_rng(0)
    wide = ArrayLayout("steps/x", "step", (8,), np.dtype("<i4"), chunk_rows=32, inner_rows=8)
    data = rng.integers(0, 99, (100, 8)).astype("<i4")
    (tmp_path / "steps/x").mkdir(parents=True)
    appender = CodedAppender(tmp_path, wide, 0)
    appender.append(data)
    write(appender)
    coded = CodedColumn(tmp_path, wide)

    windows = [np.minimum(np.arange(first, first + 20), 99) for first in rng.integers(0, 99, 30)]
    order = np.concatenate([*windows, rng.integers(0, 99, 50)])
    out = np.full((len(order), 8), -1, "<i4")
    assert mapping.is_streamed(out)
    coded.take(order, out, 0, 100, Threads(num_threads))

    assert np.array_equal(out, data[order])
    assert coded.num_decoded == len(np.unique(order // 8))


@settings(max_examples=100)
@given(st.lists(st.one_of(st.integers(1, 50), st.just("commit"), st.just("reopen"),
                          st.just("rewind")), max_size=25))  # fmt: skip
def test_appending_committing_and_rewinding_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str]
):
    root = tmp_path_factory.mktemp("coded")
    (root / "steps/x").mkdir(parents=True)
    appender, committed, value = CodedAppender(root, LAYOUT, 0), rows(0, 0), 0
    whole = committed
    for step in steps:
        if isinstance(step, int):
            more = rows(value, value + step)
            value += step
            whole = np.concatenate([whole, more])
            appender.append(more)
            more[:] = -1  # the caller may reuse it
        elif step == "commit":
            write(appender)
            committed = whole
        elif step == "rewind":
            kept = len(committed) + (len(whole) - len(committed)) // 2
            appender.rewind(kept)
            whole = whole[:kept]
        else:
            appender, whole = CodedAppender(root, LAYOUT, len(committed)), committed
        stop = len(committed)
        assert np.array_equal(CodedColumn(root, LAYOUT).slice(0, stop, 0, stop), committed)
    write(appender)
    stop = len(whole)
    assert np.array_equal(CodedColumn(root, LAYOUT).slice(0, stop, 0, stop), whole)


def test_a_commit_encodes_the_tail_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from expstore.storage import coded

    (tmp_path / "steps/x").mkdir(parents=True)
    appender = CodedAppender(tmp_path, LAYOUT, 0)
    appender.append(rows(0, 28))  # three chunks and a half
    write(appender)
    encoded = []
    real = coded.encode
    monkeypatch.setattr(coded, "encode", lambda r: (encoded.append(len(r)), real(r))[1])

    appender.append(rows(28, 30))
    write(appender)

    assert len(encoded) == 1


def test_a_reader_of_an_older_commit_keeps_reading_while_the_shard_is_replaced(tmp_path: Path):
    (tmp_path / "steps/x").mkdir(parents=True)
    appender = CodedAppender(tmp_path, LAYOUT, 0)
    appender.append(rows(0, 20))
    write(appender)
    coded = CodedColumn(tmp_path, LAYOUT)
    assert np.array_equal(coded.slice(0, 20, 0, 20), rows(0, 20))

    appender.append(rows(20, 31))
    write(appender)

    assert np.array_equal(coded.slice(0, 20, 0, 20), rows(0, 20))
    assert np.array_equal(coded.slice(0, 31, 0, 31), rows(0, 31))


@pytest.mark.parametrize("byte", [0, 10, -1, -20])
def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path, byte: int):
    coded = column(tmp_path, 32)
    path = tmp_path / "steps/x/c.0.0"
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedError, match=r"c\.0\.0 fails its checksum"):
        coded.slice(0, 32, 0, 32)


def test_a_missing_or_short_shard_is_an_error(tmp_path: Path):
    coded = column(tmp_path, 32)
    path = tmp_path / "steps/x/c.0.0"
    path.write_bytes(b"12")
    with pytest.raises(DamagedError, match="too short"):
        coded.slice(0, 1, 0, 32)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        coded.slice(0, 1, 0, 32)


@pytest.mark.parametrize(
    ("step_bytes", "expected"),
    [(1, 131072), (8, 16384), (1024, 128), (7056, 64), (12288, 32), (100_800, 16), (921_600, 4),
     (16 << 20, 1)],
)  # fmt: skip
def test_inner_chunks_have_a_size_that_suits_the_step(step_bytes: int, expected: int):
    assert inner_rows(step_bytes) == expected
    shard, inner = shard_rows(step_bytes)
    assert shard % inner == 0
    assert shard * step_bytes <= max(64 << 20, step_bytes)


def noise(num_rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (num_rows, 32, 32), dtype=np.uint8)


@pytest.mark.parametrize(
    ("observation", "layout"),
    [
        (np.zeros((40, 32, 32), np.uint8), "coded"),
        (noise(40), "mapped"),
        (np.zeros((40, 31), np.uint8), "mapped"),  # small steps are not worth it
    ],
)
def test_auto_decides_from_the_data(tmp_path: Path, observation: Any, layout: str):
    path = tmp_path / "a.exp"
    with expstore.Writer(path) as writer:
        writer.append({"observation": observation, "action": np.zeros(39, np.int64)})
        writer.commit()
        writer.append({"observation": observation, "action": np.zeros(40, np.int64)})
    store = expstore.open(path)
    assert store.fields["observation"].layout == layout
    assert np.array_equal(store.episode(0)["observation"], observation)
    assert np.array_equal(store.episode(1)["observation"], observation)
    assert expstore.verify(path).is_sound


def test_auto_waits_for_the_first_commit_with_data(tmp_path: Path):
    path = tmp_path / "a.exp"
    schema = expstore.Schema(
        {"observation": expstore.Field((32, 32), "uint8"), "action": expstore.Field((), "int64")}
    )
    with expstore.Writer(path, schema=schema):
        pass
    assert expstore.open(path).fields["observation"].layout == "auto"
    with expstore.Writer(path, commit_interval_s=1e9) as writer:
        writer.append({"observation": noise(40), "action": np.zeros(40, np.int64)})
        writer.discard()
        for _ in range(3):
            writer.append(
                {"observation": np.zeros((40, 32, 32), np.uint8), "action": np.zeros(40, np.int64)}
            )
    assert expstore.open(path).fields["observation"].layout == "coded"
    assert expstore.open(path).num_steps == 120


def test_the_layout_of_each_field_can_be_asked_for(tmp_path: Path):
    layout = {"observation/image": "mapped", "reward": "coded"}
    data = {"observation": {"image": np.zeros((40, 32, 32), np.uint8)}, "reward": np.zeros(40)}
    with expstore.Writer(tmp_path / "a.exp", layout=layout) as writer:
        writer.append(data)
    fields = expstore.open(tmp_path / "a.exp").fields
    assert {name: f.layout for name, f in fields.items()} == layout
    with pytest.raises(SchemaError, match="layout of field 'reward' must be one of"):
        expstore.Writer(tmp_path / "b.exp", layout={"reward": "zip"})


def test_a_big_episode_is_decided_before_the_commit(tmp_path: Path):
    frames = np.zeros((3000, 160, 160), np.uint8)  # 77 MB
    with expstore.Writer(tmp_path / "a.exp", commit_interval_s=1e9) as writer:
        for _ in range(2):
            writer.append({"observation": frames, "reward": np.zeros(3000)})
        assert writer.schema["observation"].layout == "coded"
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_many_threads_may_read_one_column(tmp_path: Path):
    coded = column(tmp_path, 500)
    wrong = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            first = int(rng.integers(0, 450))
            if not np.array_equal(coded.slice(first, first + 50, 0, 500), rows(first, first + 50)):
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
