"""Ragged columns: text, encoded images, point clouds; values that differ in length."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import expstore
from expstore.errors import DamagedError, SchemaError
from expstore.ragged import Ragged

LAYOUTS = ["mapped", "coded"]


def cloud(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.standard_normal((int(rng.integers(0, 6)), 3)).astype(np.float32)


def episode(seed: int, length: int, form: str = "plain") -> dict[str, Any]:
    """Points, encoded images and text; `form` says how the observation after the end comes."""
    rng = np.random.default_rng(seed)
    rows = length + (form != "plain")
    points = [cloud(rng) for _ in range(rows)]
    points[0] = np.ones((7, 3), np.float32)  # so that one differs from the others
    data: dict[str, Any] = {
        "observation": {
            "points": points,
            "jpeg": [rng.bytes(int(rng.integers(1, 30))) for _ in range(rows)],
        },
        "task": ["", "größer 🤖", "pick"][seed % 3 : seed % 3 + 1] * length,
        "action": np.arange(length) + 1000 * seed,
    }
    if form == "next":
        given = {key: value[1:] for key, value in data["observation"].items()}
        given["points"][length // 2] = np.zeros((2, 3), np.float32)  # a gap
        data["observation"] = {k: v[:length] for k, v in data["observation"].items()}
        data["next_observation"] = given
    return data


def same(one: Any, other: Any) -> bool:
    if isinstance(one, str):
        return bool(one == other)
    other = np.frombuffer(other, np.uint8) if isinstance(other, bytes) else other
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def all_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(same, some, others))


FORMS = ["plain", "final", "next", "final", "next", "plain"]
LENGTHS = [3, 1, 9, 2, 1, 30]


def fill(path: Path, **options: Any) -> list[dict[str, Any]]:
    schema = expstore.Schema(
        {
            "observation/points": expstore.Field((3,), "float32", ragged=True),
            "observation/jpeg": expstore.Field((), "uint8", ragged=True),
            "task": expstore.Field((), "text"),
            "action": expstore.Field((), "int64"),
        }
    )
    episodes = [episode(i, n, form) for i, (n, form) in enumerate(zip(LENGTHS, FORMS, strict=True))]
    with expstore.Writer(path, schema=schema, **options) as writer:
        for data in episodes:
            writer.append(data)
            writer.commit()
    return episodes


def next_rows(data: dict[str, Any], name: str) -> list[Any]:
    """What comes after each step, stored twice; None where there is nothing."""
    if "next_observation" in data:
        return list(data["next_observation"][name])
    rows, length = data["observation"][name], len(data["action"])
    return [*rows[1:], *([None] if len(rows) == length else [])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_comes_back_as_it_was(tmp_path: Path, layout: str):
    episodes = fill(tmp_path / "a.exp", layout=layout, chunk_steps=8)
    store = expstore.open(tmp_path / "a.exp")
    steps = np.random.default_rng(0).integers(0, store.num_steps, 200)
    rows = [
        (data["observation"]["points"][t], data["observation"]["jpeg"][t], data["task"][t])
        for data in episodes
        for t in range(len(data["action"]))
    ]

    read = store.read(steps)

    assert all_same(read["observation"]["points"], [rows[s][0] for s in steps])
    assert all_same(read["observation"]["jpeg"], [rows[s][1] for s in steps])
    assert all_same(read["task"], [rows[s][2] for s in steps])
    assert store.read(steps.reshape(20, 10), ["task"])["task"].shape == (20, 10)
    assert expstore.verify(tmp_path / "a.exp").is_sound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_values_come_back_as_if_stored_twice(tmp_path: Path, layout: str):
    episodes = fill(tmp_path / "a.exp", layout=layout)
    store = expstore.open(tmp_path / "a.exp")
    names = ("next_observation", "has_next", "next_task")
    read = store.read(np.arange(store.num_steps), names)
    for name in ("points", "jpeg"):
        expected = [row for data in episodes for row in next_rows(data, name)]
        assert read["has_next"].tolist() == [row is not None for row in expected]
        for got, row in zip(read["next_observation"][name], expected, strict=True):
            assert len(got) == 0 if row is None else same(got, row)
    texts = [text for data in episodes for text in [*data["task"][1:], ""]]
    assert read["next_task"].tolist() == texts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_episode_can_be_appended_again(tmp_path: Path, layout: str):
    fill(tmp_path / "a.exp", layout=layout)
    store = expstore.open(tmp_path / "a.exp")
    fields = store.snapshots[0].schema
    with expstore.Writer(tmp_path / "b.exp", schema=fields) as writer:
        for number in range(store.num_episodes):
            writer.append(store.episode(number))
    copy = expstore.open(tmp_path / "b.exp")
    checksums = "crc32c/observation/points", "crc32c/observation/jpeg", "crc32c/task"
    for name in checksums:
        assert np.array_equal(
            store.snapshots[0].index.column(name), copy.snapshots[0].index.column(name)
        )


def test_streaming_gives_the_same_as_appending(tmp_path: Path):
    episodes = fill(tmp_path / "a.exp")
    schema = expstore.open(tmp_path / "a.exp").snapshots[0].schema
    with expstore.Writer(tmp_path / "b.exp", schema=schema) as writer:
        for data in episodes:
            with writer.episode() as stream:
                length = len(data["action"])
                for t in range(length):
                    step = {"observation": {k: v[t] for k, v in data["observation"].items()},
                            "task": data["task"][t], "action": data["action"][t]}  # fmt: skip
                    if "next_observation" in data:
                        step["next_observation"] = {
                            k: v[t] for k, v in data["next_observation"].items()
                        }
                    stream.add(step)
                if len(data["observation"]["jpeg"]) > length:
                    stream.add({"observation": {k: v[-1] for k, v in data["observation"].items()}})
    one, other = (expstore.open(tmp_path / name).snapshots[0] for name in ("a.exp", "b.exp"))
    for field in schema.fields:
        name = f"crc32c/{field}"
        assert np.array_equal(one.index.column(name), other.index.column(name)), field
    assert expstore.verify(tmp_path / "b.exp").is_sound


def test_the_first_episode_tells_ragged_fields_from_others(tmp_path: Path):
    data = {
        "observation": [np.zeros((1, 2)), np.zeros((3, 2))],
        "text": ["a", "bc"],
        "jpeg": [b"1", b"23"],
        "fixed": [np.zeros(3), np.ones(3)],
        "action": [1, 2],
    }
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(data)
    fields = expstore.open(tmp_path / "a.exp").fields
    assert {name: (f.shape, f.dtype, f.ragged) for name, f in fields.items()} == {
        "observation": ((2,), "float64", True),
        "text": ((), "text", True),
        "jpeg": ((), "uint8", True),
        "fixed": ((3,), "float64", False),
        "action": ((), "int64", False),
    }


def test_object_and_string_arrays_are_taken(tmp_path: Path):
    points = np.empty(2, object)
    points[:] = [np.zeros((1, 2)), np.zeros((3, 2))]
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"points": points, "text": np.array(["a", "bcd"]), "action": [1, 2]})
    assert expstore.open(tmp_path / "a.exp").read([1])["text"].tolist() == ["bcd"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"points": [np.zeros((2, 4))] * 2}, r"'points' must have shape \(3,\), got \(4,\)"),
        ({"points": [np.zeros((2, 3), "f4")] * 2}, "'points' must have dtype float64, got float32"),
        ({"points": [np.zeros((2, 3)), np.zeros((1, 2))]}, "'points' .* one shape and dtype"),
        ({"points": [1.0, 2.0]}, "'points' .* rows of elements, got a single value"),
        ({"text": [b"a", b"b"]}, "'text' must have dtype text, got uint8"),
        ({"text": ["a", "\ud800"]}, "'text' .* not valid Unicode"),
        ({"text": ["a"]}, "'text' must have 2 rows"),
        ({"text": 5}, "'text' .* must have one value per step"),
        ({"action": ["a", "b"]}, "'action'"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], text: str):
    data = {"points": [np.zeros((1, 3)), np.zeros((3, 3))], "text": ["a", "b"], "action": [1, 2]}
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(data)
        with pytest.raises(SchemaError, match=text):
            writer.append({**data, **change})
        writer.append(data)
    assert expstore.open(tmp_path / "a.exp").num_steps == 4
    assert expstore.verify(tmp_path / "a.exp").is_sound


@pytest.mark.parametrize("name", ["reward", "terminated"])
def test_rewards_and_flags_are_never_ragged(tmp_path: Path, name: str):
    with (
        expstore.Writer(tmp_path / "a.exp") as writer,
        pytest.raises(SchemaError, match="one value per step"),
    ):
        writer.append({name: ["a", "bc"]})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_zarr_readers_see_elements_and_ends(tmp_path: Path, layout: str):
    episodes = fill(tmp_path / "a.exp", layout=layout)
    group = zarr.open_group(tmp_path / "a.exp", mode="r")
    values, ends = (group[f"steps/task/{part}"][:] for part in ("values", "end"))
    texts = [t for data in episodes for t in data["task"]]
    assert [bytes(part).decode() for part in np.split(values, ends[:-1])] == texts


def test_views_unions_and_pickles_read_ragged_fields(tmp_path: Path):
    episodes = fill(tmp_path / "a.exp")
    fill(tmp_path / "b.exp")
    union = expstore.open([tmp_path / "a.exp", tmp_path / "b.exp"])
    union = pickle.loads(pickle.dumps(union))
    steps = [2**40 + 3, 1, 2**40, 12]
    texts = [t for data in episodes for t in data["task"]]
    assert union.read(steps, ["task"])["task"].tolist() == [texts[s % 2**40] for s in steps]
    view = union.filter([2**40 + 2])
    assert view.episode(2**40 + 2)["task"] == episodes[2]["task"]


def test_batches_are_padded_with_their_lengths_beside_them(tmp_path: Path):
    torch = pytest.importorskip("torch")
    episodes = fill(tmp_path / "a.exp")
    store = expstore.open(tmp_path / "a.exp")
    replay = expstore.Replay(store, 16, unit=expstore.Sequence(length=4))
    clouds = [p for d in episodes for p in d["observation"]["points"][: len(d["action"])]]
    texts = [t for data in episodes for t in data["task"]]

    batch = replay.sample()

    index = batch.info.index
    points, length = (batch["observation"]["points"][k] for k in ("values", "length"))
    assert points.shape == (16, 4, int(length.max()), 3)
    for i in range(16):
        for k in range(4):
            cloud = clouds[index[i, k]]
            assert torch.equal(points[i, k, : len(cloud)], torch.from_numpy(cloud))
            assert int(length[i, k]) == len(cloud)
            assert not points[i, k, len(cloud) :].any()
    assert batch.text("task") == [[texts[s] for s in row] for row in index.tolist()]


def test_damaged_ends_are_an_error(tmp_path: Path):
    fill(tmp_path / "a.exp")
    path = tmp_path / "a.exp/steps/task/end/c.0"
    data = bytearray(path.read_bytes())
    data[7 * 8 + 6] = 1
    path.write_bytes(bytes(data))
    store = expstore.open(tmp_path / "a.exp")
    with pytest.raises(DamagedError, match="ends outside"):
        store.read([7, 8], ["task"])
    assert not expstore.verify(tmp_path / "a.exp").is_sound


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=5),
    st.sampled_from(LAYOUTS),
)
def test_any_lengths(tmp_path_factory: pytest.TempPathFactory, lengths: Any, layout: str):
    path = tmp_path_factory.mktemp("ragged") / "a.exp"
    schema = expstore.Schema({"x": expstore.Field((2,), "int16", ragged=True)})
    count = 0
    rows = []
    with expstore.Writer(path, schema=schema, layout=layout, chunk_steps=4) as writer:
        for episode_lengths in lengths:
            part = []
            for n in episode_lengths:
                part.append(np.arange(count, count + 2 * n, dtype=np.int16).reshape(n, 2))
                count += 2 * n
            writer.append({"x": part})
            rows += part
    store = expstore.open(path)
    assert all_same(store.read(np.arange(len(rows)))["x"], rows)
    assert expstore.verify(path).is_sound


def test_ragged_values_behave_like_a_list_of_arrays():
    rows = [np.ones((2, 3)), np.zeros((0, 3)), np.full((1, 3), 5.0)]
    ragged = Ragged.of(rows)
    assert all_same(list(ragged), rows)
    assert all_same(list(ragged[1:]), rows[1:])
    assert all_same(list(ragged[np.array([2, 0, 2])]), [rows[2], rows[0], rows[2]])
    assert same(ragged[-1], rows[2])
    assert ragged.padded().shape == (3, 2, 3)
    with pytest.raises(IndexError):
        ragged[3]


def rows_of_chunks(path: Path) -> dict[str, int]:
    group = zarr.open_group(path, mode="r")
    names = ("steps/text/values", "steps/text/end", "steps/points/values")
    rows = {name: group[name].chunks[0] for name in names}
    return rows | {"metadata": group["episodes/metadata/values"].chunks[0]}


def test_files_of_text_hold_megabytes(tmp_path: Path):
    data = {"text": ["a" * 300_000, "b"], "points": [np.ones((n, 3), np.float32) for n in (4, 5)]}
    with expstore.Writer(tmp_path / "a.exp", durable=False) as writer:
        writer.append(data)
        writer.append(data)
    assert rows_of_chunks(tmp_path / "a.exp") == {
        "steps/text/values": 4 << 20,
        "steps/text/end": 65_536,
        "steps/points/values": 1 << 18,  # of 12 bytes: 3 MiB
        "metadata": 4 << 20,
    }
    assert [row.name for row in (tmp_path / "a.exp/steps/text/values").glob("c.*")] == ["c.0"]
    assert expstore.open(tmp_path / "a.exp").read([2])["text"][0] == "a" * 300_000


def test_files_of_text_stay_small_where_that_was_asked_for(tmp_path: Path):
    data = {"text": ["a", "bc"], "points": [np.ones((n, 3), np.float32) for n in (4, 5)]}
    asked: dict[str, dict[str, int]] = {
        "steps": {"chunk_steps": 1024},
        "capacity": {"capacity_steps": 10**9},
    }
    for name, how in asked.items():
        with expstore.Writer(tmp_path / name, durable=False, **how) as writer:  # type: ignore[arg-type]
            writer.append(data)
    assert rows_of_chunks(tmp_path / "steps")["steps/text/values"] == 4096  # a page
    assert rows_of_chunks(tmp_path / "capacity")["steps/text/values"] == 65_536
    assert rows_of_chunks(tmp_path / "capacity")["metadata"] == 65_536
