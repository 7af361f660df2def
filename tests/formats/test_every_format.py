"""What holds for every format: a new one joins with a line of `SOURCES`."""

import importlib
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import FORMATS, lazy_rows, open_source
from expstore.ingest import pieces

DATA = Path(__file__).parent / "data"
Made = tuple[Path, dict[str, Any]]


def made_by(name: str) -> Any:
    """The tests of one format, which know how its own library writes it; skips without that."""
    return importlib.import_module(f"tests.formats.test_{name}")


def minari(folder: Path, form: str) -> Path:
    t = made_by("minari")
    more = {"data_format": form} if form != "hdf5" else {}
    if more:
        pytest.importorskip("pyarrow")
    path: Path = t.write(folder, t.buffer(5), t.buffer(4, end="truncations"), t.buffer(3), **more)
    return path


def lerobot(folder: Path, version: str) -> Path:
    t = made_by("lerobot")
    write = t.write_v3 if version == "v3" else t.write_v2
    files = {"files": [0, 1, 2]} if version == "v3" else {}
    path: Path = write(folder / "pick", t.episodes(), **files)
    return path


def dreamer(folder: Path) -> Path:
    t = made_by("dreamer")
    path: Path = t.write(folder / "dreamer", t.flagged(4), t.flagged(3, is_terminal=True))
    return path


def aloha(folder: Path) -> Path:
    t = made_by("aloha")
    for number, length in ((1, 4), (2, 3)):
        t.write(folder / "aloha" / f"episode_{number}.hdf5", t.steps(length))
    return folder / "aloha"


def npz(folder: Path) -> Path:
    t = made_by("npz")
    (folder / "in").mkdir()
    for number in range(3):
        t.write(folder / "in" / f"ep{number}.npz", **t.steps(number + 2))
    return folder / "in"


def sb3(folder: Path) -> Path:
    t = made_by("sb3")
    path: Path = t.save(folder / "rb.pkl", t.filled(7, ends="..t..l"))
    return path


def torchrl(folder: Path) -> Path:
    t = made_by("torchrl")
    path: Path = t.dump(folder / "rb", 12, t.steps(9, (2, 6)))
    return path


def rllib(folder: Path) -> Path:
    t = made_by("rllib")
    files = [[t.rows("a", 4)], [t.rows("b", 3, "truncateds"), t.rows("c", 2)]]
    path: Path = t.write(folder / "rllib", *files)
    return path


def robomimic(folder: Path) -> Path:
    t = made_by("robomimic")
    demos = {"demo_2": t.demo(5), "demo_10": t.demo(3, ())}
    path: Path = t.write(folder / "lift.hdf5", demos)
    return path


def copied(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        found = DATA / name
        if found.suffix == ".zip":
            shutil.unpack_archive(found, folder / found.stem)
            return folder / found.stem
        copy = shutil.copytree if found.is_dir() else shutil.copy
        return Path(copy(found, folder / found.name))

    return make


def written(name: str, file: str, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        t = made_by(name)
        path: Path = t.write(folder / file, t.rows(**options))
        return path

    return make


# name of the format, a dash and its form where it has several -> what writes a source, what it
# needs beside the standard extras, and the options that it asks for.
SOURCES: dict[str, tuple[Callable[[Path], Path], str, dict[str, Any]]] = {
    "minari-hdf5": (lambda folder: minari(folder, "hdf5"), "h5py", {}),
    "minari-arrow": (lambda folder: minari(folder, "arrow"), "pyarrow", {}),
    "minari-parquet": (lambda folder: minari(folder, "parquet"), "pyarrow", {}),
    "lerobot-v2": (lambda folder: lerobot(folder, "v2"), "pyarrow", {}),
    "lerobot-v3": (lambda folder: lerobot(folder, "v3"), "pyarrow", {}),
    "d3rlpy": (copied("d3rlpy.h5"), "h5py", {}),
    "d4rl": (written("d4rl", "hopper.hdf5"), "h5py", {}),
    "robomimic": (robomimic, "h5py", {"done_mode": 0}),
    "aloha": (aloha, "h5py", {}),
    "diffusion_policy": (written("diffusion_policy", "pusht.zarr"), "numcodecs", {}),
    "diffusion_policy-zip": (written("diffusion_policy", "pusht.zarr.zip"), "numcodecs", {}),
    "ogbench": (written("ogbench", "cube.npz"), "numpy", {}),
    "rllib": (rllib, "pyarrow", {}),
    "torchrl": (torchrl, "torchrl", {}),
    "rlds": (copied("rlds"), "PIL", {}),
    "sb3": (sb3, "stable_baselines3", {}),
    "tianshou-hdf5": (copied("tianshou/vector.hdf5"), "h5py", {}),
    "tianshou-pkl": (copied("tianshou/vector.pkl"), "numpy", {}),
    "dopamine": (copied("dopamine"), "numpy", {}),
    "flashbax": (copied("vault.zip"), "tensorstore", {"alignment": "step"}),
    "vd4rl": (written("vd4rl", "walker.hdf5"), "h5py", {}),
    "dreamer": (dreamer, "numpy", {}),
    "npz": (npz, "numpy", {}),
}
EVERY = pytest.mark.parametrize("name", SOURCES)


@dataclass(frozen=True)
class Whole:
    """A source that was imported in one go."""

    name: str
    path: Path
    options: dict[str, Any]
    report: expstore.IngestReport
    seen: list[expstore.IngestProgress]
    episodes: dict[Any, Any]


@pytest.fixture(scope="module", params=SOURCES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Imported once for all tests that leave the source as it is."""
    folder = tmp_path_factory.mktemp("source")
    path, options = make(request.param, folder)
    seen: list[expstore.IngestProgress] = []
    report = expstore.ingest_from(path, folder / "whole.exp", progress=seen.append, **options)
    return Whole(request.param, path, options, report, seen, contents(folder / "whole.exp"))


def make(name: str, folder: Path) -> Made:
    maker, package, options = SOURCES[name]
    pytest.importorskip(package)
    return maker(folder), options


def contents(path: Path) -> dict[Any, Any]:
    """By the name that its source gives it: end, metadata and all bytes of each episode."""
    store, found = expstore.open(path), {}
    for number in range(store.num_episodes):
        row = store.episodes[number]
        bytes_of = {
            name: [np.asarray(values[i]).tobytes() for i in range(len(values))]
            for name, values in flat(store.episode(number)).items()
        }
        known = {key: row[key] for key in row if key not in ("start", "number", "deleted")}
        found[row["source"]["episode"]] = known, bytes_of
    return found


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(nested, dict):
        return {prefix[:-1]: nested}
    return {
        k: v for key, below in nested.items() for k, v in flat(below, f"{prefix}{key}/").items()
    }


def test_every_format_is_here() -> None:
    assert {name.partition("-")[0] for name in SOURCES} == set(FORMATS)


def test_the_content_decides_and_the_report_and_each_episode_say_what_it_is(whole: Whole) -> None:
    report = whole.report
    assert report.failures == ()
    assert report.num_episodes == len(whole.episodes) == sum(report.end_reasons.values()) > 1
    assert report.num_steps == report.store_steps > report.num_episodes
    assert report.boundary_rule and report.description and report.num_bytes > 0
    assert str(whole.path.resolve()) in report.source
    for known, _ in whole.episodes.values():
        found = known["source"]
        assert found["format"] == whole.name.partition("-")[0]
        assert found["name"] == report.source
        assert found["importer"].startswith("expstore ")
        assert found["num_bytes"] > 0 and len(found["sha256"]) == 64
    steps = [(progress.num_episodes, progress.num_steps) for progress in whole.seen]
    assert steps == sorted(steps) and steps[-1] == (report.num_episodes, report.num_steps)


def test_an_import_that_stopped_equals_one_that_did_not(tmp_path: Path, whole: Whole) -> None:
    store, options = tmp_path / "a.exp", whole.options

    expstore.ingest_from(whole.path, store, episodes=1, **options)
    more = expstore.ingest_from(whole.path, store, resume=True, **options)
    nothing = expstore.ingest_from(whole.path, store, resume=True, **options)

    assert contents(store) == whole.episodes
    assert more.episodes_before == 1 and nothing.num_episodes == 0


def test_a_range_is_those_episodes_and_no_others(tmp_path: Path, whole: Whole) -> None:
    store = tmp_path / "a.exp"

    report = expstore.ingest_from(whole.path, store, episodes=slice(1, 2), **whole.options)

    (key,) = itertools.islice(whole.episodes, 1, 2)
    assert contents(store) == {key: whole.episodes[key]}
    assert report.failures == ()


def test_long_columns_are_read_piece_by_piece_and_are_the_same(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_rows, "EAGER_BYTES", 0)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)

    report = expstore.ingest_from(whole.path, tmp_path / "a.exp", **whole.options)

    assert contents(tmp_path / "a.exp") == whole.episodes
    assert report.num_bytes == whole.report.num_bytes
    assert report.remarks == whole.report.remarks


def test_of_a_source_that_is_cut_off_whole_episodes_arrive_and_the_rest_is_named(
    tmp_path: Path, whole: Whole
) -> None:
    path, options = make(whole.name, tmp_path)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    largest = max(files, key=lambda file: (file.stat().st_size, file.name))
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size * 2 // 3])

    try:
        report = expstore.ingest_from(path, tmp_path / "a.exp", **options)
    except SourceError as error:
        assert path.name in str(error)
        return

    for key, (known, rows) in contents(tmp_path / "a.exp").items():
        is_part = known["end_reason"] == "incomplete"  # the rows that are left of it
        given = whole.episodes[key][1]
        assert rows == {n: w[: len(rows[n])] if is_part else w for n, w in given.items()}
    assert report.failures and report.num_steps < whole.report.num_steps


@EVERY
def test_something_else_under_the_right_name_is_refused(tmp_path: Path, name: str) -> None:
    path, options = make(name, tmp_path)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"These are not the episodes that you are looking for.\n" * 9)
    format, store = name.partition("-")[0], tmp_path / "a.exp"

    with pytest.raises(SourceError):
        open_source(path)
    try:
        report = expstore.ingest_from(path, store, format=format, **options)
    except SourceError:
        return
    assert report.num_episodes == 0 and report.failures


def test_jobs_change_nothing_and_are_refused_where_they_would_do_nothing(
    tmp_path: Path, whole: Whole
) -> None:
    options = {**whole.options, "jobs": 2}
    if whole.name.partition("-")[0] not in ("minari", "lerobot", "aloha", "rlds"):
        with pytest.raises(SourceError, match="which has no --jobs "):
            open_source(whole.path, **options)
        return

    expstore.ingest_from(whole.path, tmp_path / "a.exp", **options)

    assert contents(tmp_path / "a.exp") == whole.episodes
    with pytest.raises(SourceError, match=r"--jobs \(jobs=\) must be >= 1, got 0"):
        open_source(whole.path, **{**options, "jobs": 0})


def test_an_option_of_another_format_is_refused(whole: Whole) -> None:
    other = "done_mode" if "alignment" in whole.options else "alignment"

    with pytest.raises(SourceError, match=f"which has no --{other.replace('_', '-')} "):
        open_source(whole.path, **whole.options, **{other: "step"})


@pytest.mark.parametrize("name", [None, "d3rlpy", "d4rl", "minari", "robomimic", "vd4rl"])
def test_a_name_that_is_no_text_is_shown_as_it_is(tmp_path: Path, name: str | None) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "odd.hdf5", "w") as file:
        h5py.h5d.create(file.id, b"\xff\xfe", h5py.h5t.NATIVE_INT8, h5py.h5s.create_simple((3,)))

    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "odd.hdf5", name)
    assert "looked for" in str(caught.value) or "is not" in str(caught.value)
    assert "bytes-like" not in str(caught.value) and "str instance" not in str(caught.value)
