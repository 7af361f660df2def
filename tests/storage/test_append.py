"""What `append` accepts, what it refuses, and that a refused episode leaves no trace."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from functools import partial

import numpy as np
import pytest

import expstore
from expstore import Field, Schema
from expstore.errors import FieldNotFoundError, SchemaError, StorageError, WriterStateError
from expstore.storage import files
from tests.storage.made import assert_same, digest, episode, store, writer
from tests.torture.faults import interposed

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def extremes(dtype: str) -> np.ndarray:
    """Values that a careless conversion would change."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.array([True, False, True])
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return np.array([info.min, info.max, 1], kind)
    info = np.finfo(kind)
    return np.array([info.max, info.smallest_subnormal, math.nan, -0.0, -math.inf], kind)


# -- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS, "float16", "float32", "float64"])
def test_every_dtype_comes_back_to_the_byte(tmp_path, dtype):
    data = {"observation": extremes(dtype), "x": np.stack([extremes(dtype)] * 2, axis=1)}
    opened = store(tmp_path / "a.exp", data)
    assert opened.fields["x"] == Field((2,), dtype, opened.fields["x"].layout)
    assert_same(opened.episode(0), data)


def test_torch_bfloat16_is_kept_as_its_bits(tmp_path):
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.0, -0.0], [float("nan"), 1e-40], [3.0, 4.0]], dtype=torch.bfloat16)
    opened = store(tmp_path / "a.exp", {"observation": values, "reward": values[:2, 0]})
    assert opened.fields["observation"].dtype == "bfloat16"
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assert_same(opened.episode(0), {"observation": bits, "reward": bits[:2, 0]})
    assert math.isnan(opened.episodes[0]["return"])


def test_the_return_of_bfloat16_rewards_is_that_of_their_values(tmp_path):
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([1.0, 2.0, -0.5], dtype=torch.bfloat16)
    assert store(tmp_path / "a.exp", {"reward": rewards}).episodes[0]["return"] == 2.5


def test_tensors_arrays_and_lists_come_back_as_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    opened = store(
        tmp_path / "a.exp",
        {
            "observation": torch.arange(8.0).reshape(4, 2),
            "action": [[1, 2], [3, 4], [5, 6]],
            "reward": (0.5, 1.5, 2.5),
            "terminated": [False, False, True],
            "rows": [np.float32([1, 2])] * 3,
            "tensors": [torch.ones(2, dtype=torch.int16)] * 3,
        },
    )
    assert_same(
        opened.episode(0),
        {
            "observation": np.arange(8, dtype=np.float32).reshape(4, 2),
            "action": np.array([[1, 2], [3, 4], [5, 6]]),
            "reward": np.array([0.5, 1.5, 2.5]),
            "terminated": np.array([False, False, True]),
            "rows": np.array([[1, 2]] * 3, np.float32),
            "tensors": np.ones((3, 2), np.int16),
        },
    )


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12, dtype=">f8").reshape(4, 3).T,
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(48, dtype=np.uint16).reshape(6, 8)[::-2, ::2],
        np.broadcast_to(np.float32([1, 2]), (3, 2)),
    ],
    ids=["big endian", "big endian fortran", "fortran", "strided", "broadcast"],
)
def test_arrays_of_any_order_in_memory_come_back(tmp_path, array):
    opened = store(tmp_path / "a.exp", {"x": array, "observation": array})
    assert_same(opened.episode(0), {"x": array, "observation": array})


def test_read_only_arrays_are_accepted_and_others_stay_writable(tmp_path):
    fixed, free = np.arange(3), np.zeros((3, 1 << 14))
    fixed.flags.writeable = False
    store(tmp_path / "a.exp", {"x": fixed, "y": free})
    assert not fixed.flags.writeable
    assert free.flags.writeable


@pytest.mark.parametrize("row_bytes", [8, 1 << 12, 1 << 17], ids=["small", "medium", "large"])
def test_arrays_may_be_reused_at_once(tmp_path, row_bytes):
    observation = np.zeros((5, row_bytes), np.uint8)
    following = np.zeros((4, row_bytes), np.uint8)
    expected = []
    with writer(tmp_path / "a.exp") as opened:
        for value in range(1, 4):
            observation[:], following[:] = value, value + 100
            expected.append(
                {"observation": observation[:4].copy(), "next_observation": following.copy()}
            )
            opened.append(expected[-1])
            observation[:], following[:] = 255, 255
    reading = expstore.open(tmp_path / "a.exp")
    for number, data in enumerate(expected):
        steps = np.arange(4 * number, 4 * number + 4)
        assert_same(reading.read(steps, ("observation", "next_observation")), data)


def test_scalar_rewards_and_rewards_of_one_element_stay_what_they_are(tmp_path):
    flat = store(tmp_path / "flat.exp", {"reward": np.ones(3)})
    column = store(tmp_path / "column.exp", {"reward": np.ones((3, 1))})
    assert flat.read([0, 1])["reward"].shape == (2,)
    assert column.read([0, 1])["reward"].shape == (2, 1)
    assert flat.episodes[0]["return"] == 3.0
    assert column.episodes[0]["return"].tolist() == [3.0]


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_reward_of_the_other_shape_is_refused(tmp_path, shape):
    other = () if shape else (1,)
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"reward": np.ones((3, *shape))})
        with pytest.raises(SchemaError) as raised:
            opened.append({"reward": np.ones((3, *other))})
    assert str(raised.value) == (
        f"field 'reward' must have shape {shape}, got {other} in episode 1; reshape it, or create "
        f"the store with reward of shape {other}"
    )


def test_nested_observations_and_actions_of_any_depth_come_out_nested(tmp_path):
    data = {
        "observation": {
            "image": {"left": np.zeros((4, 2, 2), np.uint8), "right": np.ones((4, 2, 2), np.uint8)},
            "state": np.arange(4.0),
            "a": {"b": {"c": {"d": np.arange(4)}}},
        },
        "action": {"arm": np.arange(3), "leg": {"left": np.arange(3.0)}},
    }
    opened = store(tmp_path / "a.exp", data)
    assert_same(opened.episode(0), data)
    assert opened.read([0, 2])["observation"]["a"]["b"]["c"]["d"].tolist() == [0, 2]


def test_a_tuple_observation_comes_out_as_a_mapping_by_number(tmp_path):
    one, two = np.zeros((4, 2)), np.arange(4)
    opened = store(tmp_path / "a.exp", {"observation": (one, {"x": two}), "reward": np.ones(3)})
    assert_same(opened.episode(0)["observation"], {"0": one, "1": {"x": two}})


def test_a_tuple_of_rows_is_a_column_where_the_store_has_that_field(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": np.zeros((2, 3))})
        opened.append({"x": (np.ones(3), np.ones(3))})
    assert expstore.open(tmp_path / "a.exp").read([2, 3])["x"].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("name", ["start", "metadata", "c.0", "step", "value", "ünï cødé", ".x"])
def test_odd_field_names_do_not_disturb_the_store(tmp_path, name):
    data = {name: np.arange(3), f"observation/{name}": np.arange(4), "reward": np.ones(3)}
    opened = store(tmp_path / "a.exp", data)
    assert opened.read([2], [name, f"next_observation/{name}"]) == {
        name: np.array([2]),
        "next_observation": {name: np.array([3])},
    }
    with writer(tmp_path / "a.exp") as again:
        again.append(data)
        assert again.recovery.removed_files == 0
    assert expstore.open(tmp_path / "a.exp").num_episodes == 2


def test_infinite_rewards_are_summed_without_a_warning(tmp_path):
    opened = store(tmp_path / "a.exp", {"reward": np.array([math.inf, -math.inf, 1.0])})
    assert math.isnan(opened.episodes[0]["return"])


def test_an_episode_may_take_more_files_than_a_process_may_open(tmp_path):
    resource = pytest.importorskip("resource")
    x = np.arange(100_000.0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 50, before[1]))
    try:
        with writer(tmp_path / "a.exp", layout="mapped", chunk_steps=1, durable=True) as out:
            out.append({"x": x, "y": x})
            out.append({"x": x, "y": x})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(list((tmp_path / "a.exp/steps/x").glob("c.*"))) == 391
    assert_same(expstore.open(tmp_path / "a.exp").episode(1), {"x": x, "y": x})


def test_rows_that_could_not_be_synced_early_are_never_committed(tmp_path, monkeypatch):
    monkeypatch.setattr("expstore.storage.mapped.DIRECT_BYTES", 64 << 10)
    path, x = tmp_path / "a.exp", np.arange(20_000.0)
    out = writer(path, layout="mapped", chunk_steps=1, durable=True)
    out.append({"x": x[:10]})
    out.commit()
    out.append({"x": x[:1000]})

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match=r"cannot sync .*/steps/.*: Input/output error"):
            out.append({"x": x})
    assert out.num_episodes == 2
    for call in (out.commit, lambda: out.append({"x": x}), out.episode, out.discard):
        with pytest.raises(WriterStateError, match="close this writer and open a new one"):
            call()
    out.close()
    with writer(path) as again:
        assert again.recovery.lost_episodes == 1
        again.append({"x": x})
    opened = expstore.open(path)
    assert_same(opened.episode(0), {"x": x[:10]})
    assert_same(opened.episode(1), {"x": x})
    assert expstore.verify(path).is_sound


def test_the_number_of_the_episode_is_returned(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        assert [opened.append({"x": [1, 2]}), opened.append({"x": [3]})] == [0, 1]
        assert (opened.num_episodes, opened.num_steps) == (2, 3)


def test_an_appended_episode_is_visible_after_the_commit_only(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1, 2]})
        assert expstore.open(tmp_path / "a.exp").num_episodes == 0
        assert opened.commit() == 1
        assert expstore.open(tmp_path / "a.exp").num_episodes == 1
        assert opened.commit() == 1  # nothing new


def test_with_no_interval_every_append_commits(tmp_path):
    with writer(tmp_path / "a.exp", commit_interval_s=0) as opened:
        opened.append({"x": [1, 2]})
        assert expstore.open(tmp_path / "a.exp").num_episodes == 1


def refused(error: int, call: str, is_meant):
    """The system refuses calls, by their path and their arguments."""

    def action(operation, perform, arguments):
        if operation.call == call and is_meant(operation.path, arguments):
            raise OSError(error, os.strerror(error))
        return perform()

    return interposed(action)


def test_an_error_of_the_commit_that_was_due_says_that_the_episode_counts(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path, commit_interval_s=0) as opened:
        opened.append({"x": [1]})
        with (
            refused(errno.ENOSPC, "pwrite", lambda _, arguments: len(arguments[1]) == 8),
            pytest.raises(StorageError, match=r"episode 1 was appended and comes with") as caught,
        ):
            opened.append({"x": [2]})
        assert "free some space" in str(caught.value)
        assert caught.value.errno == errno.ENOSPC
        assert opened.num_episodes == 2
        assert expstore.open(path).num_episodes == 1
        opened.append({"x": [3]})
        assert expstore.open(path).read([0, 1, 2])["x"].tolist() == [1, 2, 3]


def test_an_error_of_metadata_that_was_due_says_that_the_episode_counts(tmp_path, monkeypatch):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1]})
        opened.commit()
        opened.append({"x": [2]})
        opened.commit()
        monkeypatch.setattr("expstore.storage.writer.DOCUMENTS_INTERVAL_S", 0)
        with (
            refused(errno.EIO, "replace", lambda path, _: path.endswith("zarr.json")),
            pytest.raises(StorageError, match=r"episode 2 was appended and comes with"),
        ):
            opened.append({"x": [3]})
    assert expstore.open(tmp_path / "a.exp").num_episodes == 3


def test_an_error_that_ends_the_writer_says_what_becomes_of_the_episode(tmp_path):
    with writer(tmp_path / "a.exp", commit_interval_s=0, durable=True) as opened:
        opened.append({"x": [1]})
        with (
            refused(errno.EIO, "fsync", lambda path, _: path.endswith("zarr.json.partial")),
            pytest.raises(StorageError, match=r"episode 1 was appended and may be lost; close"),
        ):
            opened.append({"x": [2]})
        with pytest.raises(WriterStateError, match="open a new one"):
            opened.append({"x": [3]})


def test_many_entries_of_the_index_do_not_wait_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("expstore.storage.episodes.COLLECTED_ROWS", 3)
    monkeypatch.setattr("expstore.storage.episodes.COLLECTED_BYTES", 40)
    path = tmp_path / "a.exp"
    with writer(path) as opened:
        for number in range(8):
            opened.append({"x": [number], "reward": [0.5 * number]}, seed=number, note="n" * number)
        opened.commit()
        for number in range(8, 12):
            opened.append({"x": [number], "reward": [0.5 * number]}, note="w" * 10 * number)
        opened.discard()
        for number in range(8, 10):
            opened.append({"x": [number], "reward": [0.5 * number]}, seed=number, note="n" * number)
            with opened.episode(note="m" * 50) as stream, contextlib.suppress(SchemaError):
                stream.add({"x": 77, "reward": 1.0})
                stream.discard()
    table = expstore.open(path).episodes
    assert table["seed"].tolist() == list(range(10))
    assert table["return"].tolist() == [0.5 * number for number in range(10)]
    assert table["note"] == ["n" * number for number in range(10)]
    assert expstore.verify(path).is_sound


def test_entries_that_one_column_has_taken_already_are_handed_over_once(tmp_path, monkeypatch):
    monkeypatch.setattr("expstore.storage.mapped.WRITE_BYTES", 16)
    monkeypatch.setattr("expstore.storage.mapped.DIRECT_BYTES", 16)
    path = tmp_path / "a.exp"
    with writer(path) as opened:
        for number in range(5):
            opened.append({"x": [number]}, seed=number)
        for column in ("length", "seed", "x"):
            is_meant = partial(is_of_column, column)
            with refused(errno.ENOSPC, "pwrite", is_meant), pytest.raises(StorageError):
                opened.commit()
    store = expstore.open(path)
    assert store.episodes["seed"].tolist() == [0, 1, 2, 3, 4]
    assert store.episodes["length"].tolist() == [1] * 5
    assert expstore.verify(path).is_sound


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="files are not listed here")
def test_the_disk_is_at_work_long_before_a_durable_commit(tmp_path, monkeypatch):
    parts = []

    def start_writing(descriptor, offset, num_bytes):
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/steps/x/" in file:
            parts.append((os.path.basename(file), offset, num_bytes))

    monkeypatch.setattr(files, "start_writing", start_writing)
    for name in ("EARLY_BYTES", "DIRECT_BYTES"):
        monkeypatch.setattr(f"expstore.storage.mapped.{name}", 80_000)
    data = {"x": np.arange(10_000)}  # 80,000 bytes; a file has 65,536 rows
    for durable in (False, True):
        with writer(tmp_path / f"{durable}.exp", durable=durable) as opened:
            for _ in range(9):
                opened.append(data)
            assert len(parts) == 8 * durable
            opened.commit()
    # The seventh episode lies in both files.
    assert parts == [("c.0", 80_000 * n, 80_000) for n in range(6)] + [
        ("c.1", 35_712, 80_000),
        ("c.1", 115_712, 80_000),
    ]
    read = expstore.open(tmp_path / "True.exp").read(np.arange(90_000))["x"]
    assert np.array_equal(read, np.tile(np.arange(10_000), 9))


def is_of_column(column, path, _):
    return path.endswith((f"episodes/{column}/c.0", f"episodes/crc32c/{column}/c.0"))


def test_leaving_the_block_by_an_exception_keeps_whole_episodes(tmp_path):
    with pytest.raises(ZeroDivisionError), writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1, 2]})
        raise ZeroDivisionError
    assert expstore.open(tmp_path / "a.exp").num_episodes == 1


def test_discard_throws_away_what_was_not_committed(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1, 2]})
        opened.commit()
        opened.append({"x": [3] * 100_000})
        opened.append({"x": [4]})
        opened.discard()
        assert (opened.num_episodes, opened.num_steps) == (1, 2)
        opened.append({"x": [5]})
    reading = expstore.open(tmp_path / "a.exp")
    assert reading.read([0, 1, 2])["x"].tolist() == [1, 2, 5]
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_discard_of_the_first_episodes_leaves_the_fields_open(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": np.zeros((300_000, 3), np.float32)})
        opened.discard()
        assert opened.schema.fields == {}
        opened.append({"x": np.ones((2, 5), np.uint8), "y": [1, 2]})
    reading = expstore.open(tmp_path / "a.exp")
    assert reading.episode(0)["x"].tolist() == [[1] * 5] * 2
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_a_closed_writer_says_so(tmp_path):
    opened = writer(tmp_path / "a.exp")
    opened.close()
    opened.close()
    for call in (lambda: opened.append({"x": [1]}), opened.commit, opened.discard, opened.episode):
        with pytest.raises(WriterStateError, match=r"the writer of .* is closed; open a new one"):
            call()


# -- refused -------------------------------------------------------------------------------------

SCHEMA = Schema(
    {
        "observation/a": Field((3,), "float32"),
        "action": Field((2,), "float32"),
        "reward": Field((), "float64"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
)


def good(num_steps: int = 3) -> dict[str, object]:
    data = episode(num_steps)
    return {**data, "observation": {"a": data["observation"]}}


REFUSED = {
    "unknown field": ({"extra": np.zeros(3)}, "field 'extra' .* not in the schema .*leave it out"),
    "missing field": ({"action": None}, "field 'action' is missing .*every episode must bring"),
    "missing nested field": ({"observation": None}, "field 'observation/a' is missing"),
    "unknown nested field": (
        {"observation/b": np.zeros(3)},
        "field 'observation/b' .* not in the schema",
    ),
    "reserved name": ({"done": np.zeros(3, bool)}, "field 'done' .* reserved name .*rename it"),
    "reserved group": ({"next": {"x": np.zeros(3)}}, "field 'next/x' .* reserved name .*rename"),
    "reserved next name": ({"next_done": np.zeros(3)}, "field 'done' .* reserved name .*rename it"),
    "unsafe name": ({"../x": np.zeros(3)}, r"field '\.\./x' .* cannot be a file name here; rename"),
    "field below a field": ({"action/x": np.zeros(3)}, "'action/x' .* lies under .*; rename one"),
    "next of an unknown field": ({"next_x": np.zeros(3)}, "'next_x' .* not in the schema"),
    "next that was never stored": (
        {"next_reward": np.zeros(3)},
        "field 'next_reward' .* not in the schema; the first episode decides",
    ),
    "wrong shape": (
        {"action": np.zeros((3, 4), np.float32)},
        r"field 'action' must have shape \(2,\), got \(4,\) .*reshape it",
    ),
    "wrong next shape": (
        {"next_observation/a": np.zeros((3, 4), np.float32)},
        r"field 'next_observation/a' must have shape \(3,\), got \(4,\) .*reshape it",
    ),
    "wider dtype": (
        {"action": np.zeros((3, 2))},
        "field 'action' must have dtype float32, got float64 .*; convert it$",
    ),
    "narrower dtype": (
        {"reward": np.zeros(3, np.float32)},
        "field 'reward' must have dtype float64, got float32 .*; convert it, or .* with cast=True",
    ),
    "wrong next dtype": (
        {"next_observation/a": np.zeros((3, 3))},
        "field 'next_observation/a' must have dtype float32, got float64",
    ),
    "no numbers": (
        {"reward": ["a", "b", "c"]},
        "field 'reward' .* got dtype <U1; convert it first",
    ),
    "ragged rows": (
        {"action": [[1], [2, 3], [4, 5]]},
        "field 'action' .* cannot be one array: .*; convert it first",
    ),
    "too few rows": (
        {"reward": np.zeros(2)},
        "field 'reward' must have 3 rows .*, got 2; all columns",
    ),
    "too many rows": ({"reward": np.zeros(4)}, "field 'reward' must have 3 rows .*, got 4"),
    "too many observations": (
        {"observation": {"a": np.zeros((5, 3), np.float32)}},
        "field 'observation/a' must have 3 or 4 rows .*, got 5",
    ),
    "too many next observations": (
        {"next_observation/a": np.zeros((4, 3), np.float32)},
        "field 'next_observation/a' must have 3 rows .*, got 4",
    ),
    "contradicting final observation": (
        {"next_observation/a": np.zeros((3, 3), np.float32)},
        "field 'observation/a' .* differs from the last row of .*; give one of them",
    ),
    "flag inside": (
        {"terminated": np.array([False, True, True])},
        "field 'terminated' is true at step 1 of 3 .*; split it there",
    ),
    "other flag inside": (
        {"truncated": np.array([True, False, False])},
        "field 'truncated' is true at step 0 of 3 .*; split it there",
    ),
    "given twice": (
        {"observation/a": np.zeros((3, 3), np.float32)},
        "is given twice, .*; give one of",
    ),
    "single value": ({"reward": 1.0}, "field 'reward' .* must have one row per step"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("when", ["schema given", "after another", "while one is not committed"])
def test_an_episode_that_does_not_fit_is_refused_and_leaves_no_trace(tmp_path, case, when):
    changed, text = REFUSED[case]
    path = tmp_path / "a.exp"
    with writer(path, schema=SCHEMA) as opened:
        if when != "schema given":
            opened.append(good(2))
        if when == "after another":
            opened.commit()
        number = opened.num_episodes
        before = digest(path)
        data = {k: v for k, v in {**good(), **changed}.items() if v is not None}
        with pytest.raises(SchemaError, match=text) as raised:
            opened.append(data)
        assert f"in episode {number}" in str(raised.value)
        assert digest(path) == before
        assert opened.append(good()) == number
    reading = expstore.open(path)
    assert_same(reading.episode(number), good())
    assert reading.num_episodes == number + 1
    assert expstore.verify(path).is_sound


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "there are no fields in episode 0; give at least one"),
        ({"action": np.zeros((0, 2))}, "there are no steps in episode 0; skip episodes that are"),
        ({"x": np.zeros((3, 0))}, "field 'x' in episode 0: shape must be .*; leave out a field"),
        ({"next_x": [1], "y": [1]}, "field 'next_x' in episode 0 has no field 'x'.*; give that"),
        ({"done": [True]}, "field 'done' in episode 0 has a reserved name .*; rename it"),
        ({"a": [1], "a/b": [1]}, "field 'a/b' in episode 0 lies under field 'a'; rename one"),
        ([1, 2], "what comes in episode 0 must be a mapping of fields, got list"),
    ],
    ids=["no fields", "no steps", "no elements", "next of nothing", "reserved", "nested", "list"],
)
def test_a_first_episode_that_cannot_be_leaves_no_trace(tmp_path, data, text):
    path = tmp_path / "a.exp"
    with writer(path) as opened:
        before = digest(path)
        with pytest.raises(SchemaError, match=text):
            opened.append(data)
        assert digest(path) == before
        opened.append({"other": [1, 2, 3]})
    assert list(expstore.open(path).fields) == ["other"]


def test_an_episode_longer_than_the_others_is_no_reason_to_refuse(tmp_path):
    opened = store(tmp_path / "a.exp", episode(1), episode(100_000), episode(2))
    assert opened.episodes["length"].tolist() == [1, 100_000, 2]
    assert_same(opened.episode(1), episode(100_000))


# -- casts ---------------------------------------------------------------------------------------


def test_cast_allows_what_loses_nothing_and_counts_it(tmp_path):
    schema = Schema({"observation": Field((), "float64"), "n": Field((), "int64")})
    with writer(tmp_path / "a.exp", schema=schema, cast=True) as opened:
        opened.append({"observation": np.float32([1, 2, 3]), "n": np.uint32([4, 5])})
        opened.append({"observation": np.float64([6]), "n": np.int64([7])})
        assert opened.casts == {"observation": 3, "n": 2}
    reading = expstore.open(tmp_path / "a.exp")
    assert_same(
        reading.episode(0), {"observation": np.array([1.0, 2.0, 3.0]), "n": np.array([4, 5])}
    )


def test_a_refused_episode_counts_no_casts(tmp_path):
    schema = Schema({"a": Field((), "float64"), "b": Field((), "int8")})
    with writer(tmp_path / "a.exp", schema=schema, cast=True) as opened:
        with pytest.raises(SchemaError, match="field 'b' must have dtype int8, got int64"):
            opened.append({"a": np.float32([1]), "b": np.int64([1])})
        assert opened.casts == {}


def test_cast_does_not_round_integers(tmp_path):
    schema = Schema({"x": Field((), "float64")})
    with (
        writer(tmp_path / "a.exp", schema=schema, cast=True) as opened,
        pytest.raises(SchemaError, match="field 'x' must have dtype float64, got int64 in episode"),
    ):
        opened.append({"x": np.array([2**53 + 1])})


# -- how it ended --------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_the_end_reason_comes_from_the_flags(tmp_path, flag):
    assert store(tmp_path / "a.exp", episode(3, end=flag)).episodes[0]["end_reason"] == flag


def test_without_a_flag_the_end_is_cut_or_as_the_caller_says(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append(episode(3, end=None))
        opened.append(episode(3, end=None), end_reason="incomplete")
    reasons = expstore.open(tmp_path / "a.exp").episodes["end_reason"].tolist()
    assert reasons == ["cut", "incomplete"]


@pytest.mark.parametrize(
    ("end", "reason", "text"),
    [
        ("terminated", "truncated", "contradicts the flags .* leave it out"),
        (None, "terminated", "contradicts the flags of the last step .none is true.; leave it"),
        (None, "finished", "must be one of terminated, truncated, cut, incomplete, got 'finished'"),
    ],
)
def test_an_end_reason_that_cannot_be_is_refused(tmp_path, end, reason, text):
    with writer(tmp_path / "a.exp") as opened:
        before = digest(tmp_path / "a.exp")
        with pytest.raises(SchemaError, match=text) as raised:
            opened.append(episode(3, end=end), end_reason=reason)
        assert "in episode 0" in str(raised.value)
        assert digest(tmp_path / "a.exp") == before


# -- metadata and seeds --------------------------------------------------------------------------


def test_metadata_comes_back(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1]})
        opened.append(
            {"x": [1]},
            policy="sac-100k ü 猫 😀",
            nested={"a": [1, 2.5, None, True], "": {}},
            scalar=np.float32(0.5),
            array=np.arange(3),
            big=2**80,
            nan=math.nan,
            inf=-math.inf,
            none=None,
        )
        opened.append({"x": [1]}, policy="")
    rows = expstore.open(tmp_path / "a.exp").episodes
    assert rows[0]["metadata"] == {}
    assert math.isnan(rows[1]["metadata"].pop("nan"))
    got = dict(rows[1]["metadata"])
    got.pop("nan")
    assert got == {
        "policy": "sac-100k ü 猫 😀",
        "nested": {"a": [1, 2.5, None, True], "": {}},
        "scalar": 0.5,
        "array": [0, 1, 2],
        "big": 2**80,
        "inf": -math.inf,
        "none": None,
    }
    assert rows[2]["policy"] == ""


def test_long_metadata_runs_over_several_chunks(tmp_path):
    texts = [f"{n}" * 3_000_000 for n in range(4)]
    with writer(tmp_path / "a.exp") as opened:
        for text in texts:
            opened.append({"x": [1]}, text=text)
    reading = expstore.open(tmp_path / "a.exp")
    assert [row["text"] == text for row, text in zip(reading.episodes, texts, strict=True)] == (
        [True] * 4
    )


@pytest.mark.parametrize("value", [object(), {1}, b"x", {"a": {1: 2}}, 1j])
def test_metadata_that_is_no_json_is_refused_and_leaves_no_trace(tmp_path, value):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1]})
        before = digest(tmp_path / "a.exp")
        with pytest.raises(
            SchemaError, match=r"metadata in episode 1 must be JSON: .*; convert it"
        ):
            opened.append({"x": [1]}, key=value)
        with pytest.raises(
            SchemaError, match=r"metadata in episode 1 must be JSON: .*; convert it"
        ):
            opened.episode(key=value)
        assert digest(tmp_path / "a.exp") == before
        opened.append({"x": [1]})


def test_metadata_named_like_an_index_column_is_refused(tmp_path):
    with (
        writer(tmp_path / "a.exp") as opened,
        pytest.raises(SchemaError, match=r"metadata 'length' in episode 0 is a column .*; rename"),
    ):
        opened.append({"x": [1]}, length=3)


SEEDS = [7, 0, 2**63 - 1, np.uint8(3), np.int64(4), np.array(5)]


def test_seeds_get_a_column(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        for seed in (*SEEDS, None):
            opened.append({"x": [1]}, seed=seed)
        opened.append({"x": [1]})
    table = expstore.open(tmp_path / "a.exp").episodes
    assert table["seed"].tolist() == [7, 0, 2**63 - 1, 3, 4, 5, None, None]
    assert [row["metadata"] for row in table] == [{}] * 8


@pytest.mark.parametrize("seed", [-1, 2**63, 2**200, "abc", [1, 2], 0.5, True, {"env": 3}])
def test_a_seed_that_is_no_such_number_is_kept_all_the_same(tmp_path, seed):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1]}, seed=seed, policy="a")
        opened.append({"x": [1]}, seed=4)
    table = expstore.open(tmp_path / "a.exp").episodes
    assert table[0]["seed"] == seed
    assert table["seed"].tolist() == [seed, 4]
    assert dict(table[0]) == {
        **{"number": 0, "start": 0, "length": 1, "end_reason": "cut"},
        **{"seed": seed, "policy": "a"},
    }


def test_a_numpy_seed_out_of_range_becomes_a_number(tmp_path):
    with writer(tmp_path / "a.exp") as opened:
        opened.append({"x": [1]}, seed=np.uint64(2**64 - 1))
    assert expstore.open(tmp_path / "a.exp").episodes[0]["seed"] == 2**64 - 1


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 3, 2.0, "4"])
def test_chunk_steps_must_be_a_power_of_two(tmp_path, value):
    with pytest.raises(SchemaError, match="chunk_steps must be a power of two, got"):
        expstore.Writer(tmp_path / "a.exp", chunk_steps=value)
    assert not (tmp_path / "a.exp").exists()


@pytest.mark.parametrize("value", [-1, 1e8, "9"])
def test_expected_steps_must_be_a_count(tmp_path, value):
    with pytest.raises(SchemaError, match="expected_steps must be an integer >= 0, got"):
        expstore.Writer(tmp_path / "a.exp", expected_steps=value)


@pytest.mark.parametrize("value", [-1, math.nan])
def test_the_interval_must_be_a_time(tmp_path, value):
    with pytest.raises(SchemaError, match="commit_interval_s must be >= 0, got"):
        expstore.Writer(tmp_path / "a.exp", commit_interval_s=value)


def test_a_layout_for_a_field_that_is_not_there_is_refused(tmp_path):
    with (
        writer(tmp_path / "a.exp", layout={"image": "mapped"}) as opened,
        pytest.raises(FieldNotFoundError, match="there is no field 'image'; the store has 'x'"),
    ):
        opened.append({"x": [1]})


@pytest.mark.parametrize("layout", ["zipped", {"x": "zipped"}])
def test_an_unknown_layout_is_refused_at_once(tmp_path, layout):
    what = "layout of field 'x'" if isinstance(layout, dict) else "layout"
    with pytest.raises(SchemaError, match=rf"^{what} must be one of .*, got 'zipped'"):
        writer(tmp_path / "a.exp", layout=layout)
    assert not (tmp_path / "a.exp").exists()


def test_a_schema_that_is_given_is_there_before_the_first_episode(tmp_path):
    with writer(tmp_path / "a.exp", schema=SCHEMA):
        reading = expstore.open(tmp_path / "a.exp")
        assert list(reading.fields) == list(SCHEMA.fields)
        assert len(reading) == 0
        assert_same(reading.read([], ["reward", "next_observation"]), {
            "reward": np.empty(0), "next_observation": {"a": np.empty((0, 3), np.float32)},
        })  # fmt: skip


def test_an_expected_size_makes_larger_chunks(tmp_path):
    with writer(tmp_path / "a.exp", expected_steps=100_000_000) as opened:
        opened.append({"x": np.zeros(2, np.uint8)})
    assert (tmp_path / "a.exp/steps/x/c.0").stat().st_size == 524_288
