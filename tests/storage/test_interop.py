"""The same directory read by zarr-python, tensorstore and xarray gives the same arrays."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

import expstore
from expstore.storage.reading import Snapshot
from tests.storage.made import assert_same, episode, writer


def nested(num_steps: int, seed: int) -> dict[str, object]:
    data = episode(num_steps, seed, end=None)
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 4, (num_steps + 1, 16, 16, 3), np.uint8)
    return {**data, "observation": {"image": image, "state": {"q": data["observation"]}}}


def every_dtype(num_steps: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    names = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    return {
        **{name: rng.integers(0, 100, num_steps).astype(name) for name in names},
        **{name: rng.normal(size=(num_steps, 2)).astype(name) for name in ("float16", "float32")},
        "float64": np.full(num_steps, np.nan),
        "bool": rng.integers(0, 2, (num_steps, 3)).astype(bool),
    }


def named_like_dimensions(num_steps: int, seed: int) -> dict[str, object]:
    """Fields with the names of dimensions, of columns of the index and of parts of paths."""
    rng = np.random.default_rng(seed)
    names = ["step", "index", "length", "return", "start", "value", "present", "metadata", "c.0"]
    names += ["steps", "x", "x[1]", "variables", "dims", "sizes", "data", "coords", "time"]
    data: dict[str, object] = {name: rng.normal(size=num_steps) for name in names}
    data.update({f"wide/{name}": rng.normal(size=(num_steps, 2, 3)) for name in names})
    data.update({f"observation/{name}": rng.normal(size=(num_steps, 2)) for name in names[:4]})
    data["observation/deep/er/still"] = rng.normal(size=num_steps)
    return data


def odd_shapes(num_steps: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {
        "frame": rng.integers(0, 255, (num_steps, 99, 99, 3), np.uint8),
        "observation": rng.normal(size=(num_steps, 7, 1, 1)).astype(np.float32),
        "many": rng.integers(0, 2, (num_steps, *[1] * 12)).astype(np.uint16),
    }


KINDS = {
    "nested": (nested, {}),
    "nested coded": (nested, {"layout": "coded"}),
    "nested, many chunks": (nested, {"chunk_steps": 1}),
    "nested coded, many chunks": (nested, {"layout": "coded", "chunk_steps": 2}),
    "every dtype": (every_dtype, {}),
    "every dtype coded": (every_dtype, {"layout": "coded"}),
    "named like dimensions": (named_like_dimensions, {}),
    "odd shapes": (odd_shapes, {"layout": "mapped"}),
    "odd shapes, one step a chunk": (odd_shapes, {"layout": "mapped", "chunk_steps": 1}),
    "odd shapes, small chunks": (odd_shapes, {"layout": "mapped", "chunk_steps": 4}),
    "odd shapes coded, small chunks": (odd_shapes, {"layout": "coded", "chunk_steps": 4}),
}
LENGTHS = (3, 1, 5, 2)


@pytest.fixture(scope="module", params=KINDS)
def path(tmp_path_factory, request) -> Path:
    """A store of two commits, whose writer has appended more than it committed."""
    make, settings = KINDS[request.param]
    path = tmp_path_factory.mktemp("interop") / "a.exp"
    with writer(path, **settings) as out:
        out.append(make(LENGTHS[0], 0), seed=3, policy="sac")
    patch = pytest.MonkeyPatch()
    patch.setattr("expstore.storage.writer.DOCUMENTS_INTERVAL_S", 0.0)  # no array lags behind
    request.addfinalizer(patch.undo)
    out = writer(path, **settings)
    for seed, length in enumerate(LENGTHS[1:], 1):
        out.append(make(length, seed))
    out.commit()
    out.append(make(40, 9))
    request.addfinalizer(out.close)
    return path


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of the newest commit, as expstore reads it."""
    snapshot = Snapshot.of(path)
    found = {}
    for name, layout in snapshot.root.arrays.items():
        start, stop = snapshot.root.commit.dims[layout.dimension]
        found[name] = np.array(snapshot.columns[name].slice(start, stop, start, stop))
    return found


# -- zarr-python ---------------------------------------------------------------------------------


def test_zarr_reads_every_array_through_the_root(path):
    group = zarr.open_group(path, mode="r")
    for name, expected in arrays(path).items():
        assert_same(group[name][...], expected, name)


def test_zarr_lists_exactly_the_arrays_of_the_commit(path):
    group = zarr.open_group(path, mode="r")
    expected = arrays(path)
    members = dict(group.members(max_depth=None))
    assert {n for n, m in members.items() if isinstance(m, zarr.Array)} == set(expected)
    for name, array in expected.items():
        assert members[name].shape == array.shape
    assert sorted(group.group_keys()) == ["episodes", "next", "steps"] or "next" not in members


@pytest.mark.parametrize("consolidated", [True, False])
def test_zarr_reads_groups_on_their_own(path, consolidated):
    for top in ("steps", "episodes"):
        group = zarr.open_group(path / top, mode="r", use_consolidated=consolidated)
        for name, expected in arrays(path).items():
            if name.startswith(f"{top}/"):
                assert_same(group[name.removeprefix(f"{top}/")][...], expected, name)


def test_zarr_reads_every_array_on_its_own(path):
    for name, expected in arrays(path).items():
        array = zarr.open_array(path / name, mode="r")
        assert_same(array[...], expected, name)
        assert array.metadata.dimension_names[0] is not None


def test_zarr_reads_the_root_without_the_consolidated_metadata(path):
    group = zarr.open_group(path, mode="r", use_consolidated=False)
    for name, expected in arrays(path).items():
        assert_same(group[name][...], expected, name)


def test_zarr_reads_single_rows_and_slices(path):
    group = zarr.open_group(path, mode="r")["steps"]
    for name, expected in arrays(path).items():
        if name.startswith("steps/"):
            array = group[name.removeprefix("steps/")]
            assert_same(np.asarray(array[7]), expected[7], name)
            assert_same(array[2:9:3], expected[2:9:3], name)
            assert_same(array.oindex[[10, 0, 4]], expected[[10, 0, 4]], name)


def test_the_root_says_what_it_is_in_its_attributes(path):
    ours = zarr.open_group(path, mode="r").attrs["expstore"]
    assert ours["format"] == 1
    assert ours["commit"]["number"] == 2
    assert ours["commit"]["dims"]["step"] == [0, sum(LENGTHS)]


def test_the_index_can_be_understood_without_expstore(path):
    episodes = zarr.open_group(path, mode="r")["episodes"]
    assert episodes["start"][...].tolist() == [0, 3, 4, 9]
    assert episodes["length"][...].tolist() == list(LENGTHS)
    names = episodes["end_reason"].attrs["names"]
    assert [names[reason] for reason in episodes["end_reason"][...]] == ["cut"] * 4
    assert episodes["seed"][...].tolist() == [3, -1, -1, -1]
    ends = episodes["metadata/end"][...]
    text = episodes["metadata/values"][...].tobytes()
    assert text[: ends[0]] == b'{"policy":"sac"}'
    assert ends.tolist() == [16] * 4


# -- tensorstore ---------------------------------------------------------------------------------


def test_tensorstore_reads_every_array(path):
    tensorstore = pytest.importorskip("tensorstore")
    for name, expected in arrays(path).items():
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path / name}/"},
        }
        opened = tensorstore.open(spec, read=True).result()
        assert (
            opened.domain.labels[0]
            == zarr.open_array(path / name, mode="r").metadata.dimension_names[0]
        )
        assert_same(opened.read().result(), expected, name)


# -- xarray --------------------------------------------------------------------------------------


def groups(path: Path) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays(path).items():
        group, _, last = name.rpartition("/")
        found.setdefault(group, {})[last] = array
    return found


@pytest.mark.parametrize("consolidated", [None, False])
def test_xarray_opens_every_group(path, consolidated):
    xarray = pytest.importorskip("xarray")
    for group, expected in groups(path).items():
        with xarray.open_zarr(path, group=group, consolidated=consolidated, chunks=None) as opened:
            assert set(opened.variables) == set(expected)
            for name, array in expected.items():
                assert_same(opened[name].values, array, f"{group}/{name}")


def test_xarray_opens_the_store_as_a_tree(path):
    xarray = pytest.importorskip("xarray")
    with xarray.open_datatree(path, engine="zarr", chunks=None) as tree:
        for name, expected in arrays(path).items():
            assert_same(tree[name].values, expected, name)


def test_steps_have_one_dimension_in_common(path):
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(path, group="steps", chunks=None) as opened:
        assert opened.sizes["step"] == sum(LENGTHS)
        assert {variable.dims[0] for variable in opened.variables.values()} == {"step"}


# -- beside a writer -----------------------------------------------------------------------------


def test_what_is_appended_but_not_committed_is_seen_by_nobody(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(nested(3, 0))
        out.commit()
        out.append(nested(50_000, 1))
        out.append(nested(2, 2))
        assert zarr.open_group(tmp_path / "a.exp", mode="r")["steps/reward"].shape == (3,)
        assert zarr.open_array(tmp_path / "a.exp/steps/reward", mode="r").shape == (3,)
        out.discard()


def test_an_array_opened_before_a_commit_stays_as_it_was(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(nested(3, 0))
        out.commit()
        old = zarr.open_group(tmp_path / "a.exp", mode="r")["steps/reward"]
        before = old[...]
        out.append(nested(2, 1))
        out.commit()
        assert_same(old[...], before)
        assert zarr.open_group(tmp_path / "a.exp", mode="r")["steps/reward"].shape == (5,)


def test_a_store_can_be_copied_with_ordinary_tools(tmp_path):

    with writer(tmp_path / "a.exp") as out:
        out.append(nested(3, 0))
    shutil.copytree(tmp_path / "a.exp", tmp_path / "b.exp")
    assert_same(expstore.open(tmp_path / "b.exp").episode(0), nested(3, 0))
    with writer(tmp_path / "b.exp") as out:
        out.append(nested(4, 1))
    assert expstore.open(tmp_path / "a.exp").num_episodes == 1
    assert expstore.verify(tmp_path / "b.exp").is_sound
