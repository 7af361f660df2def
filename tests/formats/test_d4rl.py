"""D4RL files, written as D4RL writes them."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import MissingExtraError, SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")

N = 25  # rows: a terminal at 9, a timeout at 19, five rows that have no end


def rows(n: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    terminals[9::N] = True
    timeouts[19::N] = True
    return {
        "observations": rng.normal(size=(n, 5)).astype(np.float32),
        "actions": rng.normal(size=(n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def write(path: Path, data: dict[str, Any], **more: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in {**data, **more}.items():
            compression = "gzip" if np.ndim(values) else None
            file.create_dataset(name, data=values, compression=compression)
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from expstore_cli.main import main; main()"
    run = [sys.executable, "-c", code, "ingest", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    target = path.with_suffix(".exp")
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


def test_rows_arrive_byte_for_byte_and_the_last_ones_are_incomplete(tmp_path: Path) -> None:
    data = rows()

    store, report = ingest(write(tmp_path / "hopper.hdf5", data))

    assert store.episodes["length"].tolist() == [10, 10, 5]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    back = store.read(np.arange(N))
    names = ("observation", "action", "reward", "terminated", "truncated")
    for name, values in zip(names, data.values(), strict=True):
        assert back[name].dtype == values.dtype
        assert back[name].tobytes() == values.tobytes()
    assert report.flags == {"terminals": 1, "timeouts": 1}
    assert report.remarks == {"no end flag on the last rows, so they are kept as incomplete": 1}
    assert report.final_observations == 0
    assert (report.dropped_steps, report.failures, report.dtype_changes) == ({}, (), {})
    assert report.boundary_rule == "an episode ends with the row that has terminals or timeouts set"


def test_the_last_step_of_an_episode_has_no_next_observation(tmp_path: Path) -> None:
    store, _ = ingest(write(tmp_path / "hopper.hdf5", rows()))

    has_next = store.read(np.arange(N), fields=["has_next"])["has_next"]

    assert np.flatnonzero(~np.asarray(has_next)).tolist() == [9, 19, 24]


def test_next_observations_are_kept_exactly_gaps_included(tmp_path: Path) -> None:
    data = rows()
    following = np.roll(data["observations"], -1, axis=0)
    following[[9, 19, 24]] = 7.0
    following[3] += 1  # a gap: the next row is not what followed

    path = write(tmp_path / "hopper.hdf5", data, next_observations=following)
    store, report = ingest(path)

    back = store.read(np.arange(N), fields=["next_observation"])["next_observation"]
    assert back.tobytes() == following.tobytes()
    assert report.final_observations == 3


def test_both_flags_end_as_terminated_and_stay_both(tmp_path: Path) -> None:
    data = rows()
    data["timeouts"][9] = True

    store, report = ingest(write(tmp_path / "both.hdf5", data))

    assert store.episodes["end_reason"][0] == "terminated"
    both = store.read([9], fields=["terminated", "truncated"])
    assert both["terminated"].all() and both["truncated"].all()
    assert report.remarks["both flags set, so it ended as terminated; both are kept"] == 1


def test_columns_of_one_become_scalars_and_the_report_says_so(tmp_path: Path) -> None:
    data = rows()
    whole = {name: values.reshape(N, -1) for name, values in data.items()}

    store, report = ingest(write(tmp_path / "column.hdf5", whole))

    assert store.fields["reward"].shape == store.fields["terminated"].shape == ()
    assert store.read(np.arange(N))["reward"].tobytes() == data["rewards"].tobytes()
    changed = dict.fromkeys(("reward", "terminated", "truncated"), "(1,) to ()")
    assert report.shape_changes == changed


def test_flags_that_are_numbers_become_booleans_and_the_report_says_so(tmp_path: Path) -> None:
    data = rows()
    data["terminals"] = data["terminals"].astype(np.float32)
    data["timeouts"] = data["timeouts"].astype(np.uint8)

    store, report = ingest(write(tmp_path / "numbers.hdf5", data))

    assert store.fields["terminated"].dtype == "bool"
    assert report.dtype_changes == {"terminated": "float32 to bool", "truncated": "uint8 to bool"}


def test_a_flag_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    data = rows()
    data["terminals"] = data["terminals"] * 0.5

    with pytest.raises(SourceError, match=r"terminals of .* must hold nothing but 0 and 1"):
        open_source(write(tmp_path / "half.hdf5", data))


def test_without_timeouts_the_limit_is_asked_for_by_name(tmp_path: Path) -> None:
    data = rows()
    del data["timeouts"]
    path = write(tmp_path / "old.hdf5", data)

    with pytest.raises(SourceError, match=r"no timeouts.*--max-episode-steps 1000"):
        open_source(path)

    store, report = ingest(path, max_episode_steps=4)
    assert store.episodes["length"].tolist() == [4, 4, 2, 4, 4, 4, 3]
    reasons = ["truncated", "truncated", "terminated", *["truncated"] * 3, "incomplete"]
    assert store.episodes["end_reason"].tolist() == reasons
    truncated = store.read(np.arange(N), fields=["truncated"])["truncated"]
    assert np.flatnonzero(truncated).tolist() == [3, 7, 13, 17, 21]
    assert "as truncated after 4 steps" in report.boundary_rule
    assert report.flags == {"terminals": 1}


@pytest.mark.parametrize(("limit", "lengths"), [(5, [5, 5, 5, 5, 5]), (10, [10, 10, 5])])
def test_an_episode_of_just_the_limit_is_not_cut_again(
    tmp_path: Path, limit: int, lengths: list[int]
) -> None:
    data = rows()
    del data["timeouts"]

    store, _ = ingest(write(tmp_path / "old.hdf5", data), max_episode_steps=limit)

    assert store.episodes["length"].tolist() == lengths


def test_a_limit_beside_timeouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has timeouts.*leave out --max-episode-steps"):
        open_source(write(tmp_path / "new.hdf5", rows()), max_episode_steps=1000)


def test_datasets_of_different_lengths_are_named(tmp_path: Path) -> None:
    data = rows()
    data["actions"] = data["actions"][:24]

    with pytest.raises(SourceError, match="observations 25, actions 24, rewards 25"):
        open_source(write(tmp_path / "torn.hdf5", data))


def test_infos_come_on_request_and_small_metadata_always(tmp_path: Path) -> None:
    qpos = np.random.default_rng(0).normal(size=(N, 3))
    path = write(
        tmp_path / "walker.hdf5",
        rows(),
        **{
            "infos/qpos": qpos,
            "metadata/algorithm": np.bytes_("SAC"),
            "metadata/iteration": np.int32(7),
            "metadata/policy/nonlinearity": np.bytes_("relu"),
            "metadata/policy/fc0/weight": np.zeros((64, 64)),
            "returns": np.zeros(N),
        },
    )

    store, report = ingest(path, infos=True)
    assert store.read(np.arange(N))["infos"]["qpos"].tobytes() == qpos.tobytes()
    known = {"algorithm": "SAC", "iteration": 7, "policy": {"nonlinearity": "relu"}}
    assert store.episodes[2]["dataset"] == known
    assert report.left_out == {
        "metadata/policy/fc0/weight": "has 4,096 elements",
        "returns": "is no part of D4RL",
    }

    source = open_source(path)
    assert source.account.left_out["infos/qpos"] == "comes with --infos (infos=True)"
    source.close()


def test_virtual_groups_are_read_in_numeric_order_each_for_itself(tmp_path: Path) -> None:
    parts = {number: rows(N + number % 9) for number in (0, 2, 10)}
    path = tmp_path / "large.hdf5"
    write(path, {f"virtual/{n}/{name}": v for n, d in parts.items() for name, v in d.items()})

    store, report = ingest(path)

    together = np.concatenate([parts[number]["observations"] for number in (0, 2, 10)])
    back = store.read(np.arange(len(together)))["observation"]
    assert back.tobytes() == together.tobytes()
    assert report.end_reasons == {"terminated": 3, "truncated": 3, "incomplete": 3}
    assert store.episodes[3]["source"]["group"] == "virtual/2"


def test_each_episode_says_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "hopper.hdf5", rows())

    store, _ = ingest(path)

    found = store.episodes[1]["source"]
    assert found.pop("importer").startswith("expstore ")
    assert found == {
        "name": str(path),
        "episode": 1,
        "format": "d4rl",
        "group": "/",
        "rows": [10, 20],
        "num_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    path = write(tmp_path / "hopper.hdf5", rows(4 * N))
    expstore.ingest_from(path, tmp_path / "whole.exp")

    expstore.ingest_from(path, tmp_path / "parts.exp", episodes=4)
    with pytest.raises(SourceError, match="--resume"):
        expstore.ingest_from(path, tmp_path / "parts.exp")
    report = expstore.ingest_from(path, tmp_path / "parts.exp", resume=True)

    whole, parts = (expstore.open(tmp_path / f"{name}.exp") for name in ("whole", "parts"))
    assert report.episodes_before == 4
    assert [dict(row) for row in whole.episodes] == [dict(row) for row in parts.episodes]
    steps = np.arange(4 * N)
    for name, values in whole.read(steps).items():
        assert values.tobytes() == parts.read(steps)[name].tobytes()


def test_a_file_that_has_grown_is_not_continued_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    path = write(tmp_path / "hopper.hdf5", rows())
    ingest(path)
    write(path, rows(2 * N))

    with pytest.raises(SourceError, match=r"episode 2 of .* has 15 rows, but had 5 .*has changed"):
        ingest(path, resume=True)


def test_blocks_smaller_than_an_episode_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expstore.formats import hdf5

    data = rows(40 * N)
    path = tmp_path / "blocks.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in data.items():
            chunks = (7, *values.shape[1:])
            file.create_dataset(name, data=values, compression="gzip", chunks=chunks)
    monkeypatch.setattr(hdf5.RowReader.__init__, "__defaults__", (60,))
    monkeypatch.setattr(hdf5, "BLOCK_BYTES", 11)

    store, _ = ingest(path)

    back = store.read(np.arange(40 * N))
    assert back["observation"].tobytes() == data["observations"].tobytes()
    assert back["reward"].tobytes() == data["rewards"].tobytes()
    assert store.num_episodes == 81


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.hdf5"
    n, width = 200_000, 128  # 100 MB of observations in a small file
    with h5py.File(path, "w") as file:
        compressed = {"compression": "gzip", "compression_opts": 1}
        file.create_dataset("observations", (n, width), "f4", chunks=(1000, width), **compressed)
        file.create_dataset("actions", (n, 1), "f4", chunks=(1000, 1), **compressed)
        file.create_dataset("rewards", (n,), "f4")
        file.create_dataset("terminals", data=np.arange(n) % 1000 == 999)
        file.create_dataset("timeouts", (n,), bool)
    code = (
        "import resource, sys\n"
        "from expstore.formats import open_source\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "source = open_source(sys.argv[1])\n"
        "before = peak()\n"
        "total = sum(len(episode.data['action']) for episode in source.episodes())\n"
        "print(total, peak() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )

    total, grown_mib = run.stdout.split()
    assert int(total) == n
    assert float(grown_mib) < 60


def test_a_damaged_chunk_loses_its_episode_only(tmp_path: Path) -> None:
    data = rows()
    path = tmp_path / "damaged.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in data.items():
            file.create_dataset(
                name, data=values, compression="gzip", chunks=(5, *values.shape[1:])
            )
        place = file["observations"].id.get_chunk_info(2).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff" * 16)

    store, report = ingest(path)

    assert [failure.key for failure in report.failures] == ["episode 1"]
    assert "rows 10 to 20 cannot be read" in report.failures[0].reason
    assert store.episodes["length"].tolist() == [10, 5]
    kept = np.concatenate([data["observations"][:10], data["observations"][20:]])
    assert store.read(np.arange(15))["observation"].tobytes() == kept.tobytes()


def test_a_file_that_is_cut_off_is_refused_with_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.hdf5", rows())
    num_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(num_bytes // 2)

    with pytest.raises(SourceError, match=f"cut off: {num_bytes // 2:,} of its {num_bytes:,}"):
        open_source(path)


def test_virtual_datasets_whose_file_is_missing_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "part.hdf5", rows())
    with h5py.File(tmp_path / "all.hdf5", "w") as file:
        for name, values in rows().items():
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            layout[:] = h5py.VirtualSource("part.hdf5", name, values.shape)
            file.create_virtual_dataset(name, layout)
    assert open_source(tmp_path / "all.hdf5").num_episodes == 3

    (tmp_path / "part.hdf5").rename(tmp_path / "elsewhere.hdf5")

    with pytest.raises(SourceError, match=r"lies in part\.hdf5, which is not beside it"):
        open_source(tmp_path / "all.hdf5")


@pytest.mark.parametrize("content", [b"", b"observations,actions\n1,2\n", b"\x89HDF\r\n\x1a\n"])
def test_what_is_no_hdf5_is_refused_under_the_right_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hopper_medium-v2.hdf5"
    path.write_bytes(content)

    with pytest.raises(SourceError, match=r"looked for|cannot be opened as HDF5"):
        open_source(path)
    with pytest.raises(SourceError, match=r"no HDF5 file|cannot be opened as HDF5"):
        open_source(path, "d4rl")


def test_another_hdf5_format_under_the_right_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "hopper.hdf5", {"data/words": np.zeros((3, 2))})

    with pytest.raises(SourceError, match=r"looked for .*observations, actions.*\(d4rl\)"):
        open_source(path)
    with pytest.raises(SourceError, match=r"not of D4RL; looked for .*; found data"):
        open_source(path, "d4rl")


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "anything", rows()))

    assert source.describe() == f"D4RL file {tmp_path / 'anything'}: 3 episodes, 25 steps"
    source.close()


def test_an_option_of_another_format_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ep0.npz", observation=np.zeros((2, 1)))

    with pytest.raises(SourceError, match=r"format npz, which has no --infos \(infos=\)"):
        open_source(tmp_path, infos=True)


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "hopper.hdf5", rows())
    monkeypatch.setitem(sys.modules, "h5py", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'expstore\[hdf5\]'"):
        open_source(path)


def test_a_file_without_rows_has_no_episodes(tmp_path: Path) -> None:
    empty = {name: values[:0] for name, values in rows().items()}
    with h5py.File(tmp_path / "empty.hdf5", "w") as file:
        for name, values in empty.items():
            file.create_dataset(name, data=values)

    source = open_source(tmp_path / "empty.hdf5")

    assert (source.num_episodes, source.num_steps, list(source.episodes())) == (0, 0, [])
    source.close()


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("command")
    data = rows()
    del data["timeouts"]
    path = write(folder / "old.hdf5", data)

    def run(name: str, *options: object) -> Any:
        return command(path, folder / name, *options), folder / name

    return run


def test_the_command_imports_and_reports(by_command: Callable[..., Any]) -> None:
    run, store = by_command("a.exp", "--max-episode-steps", 10, "--expect-episodes", 3, "--json")

    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["end_reasons"] == {"terminated": 1, "truncated": 1, "incomplete": 1}
    assert report["flags"] == {"terminals": 1}
    back = expstore.open(store).read(np.arange(N))["observation"]
    assert back.tobytes() == rows()["observations"].tobytes()

    run, _ = by_command("a.exp", "--max-episode-steps", 10, "--resume", "--expect-episodes", 4)
    assert run.returncode == 1
    assert "expected 4" in run.stderr
    assert "terminals in 0 episodes" not in run.stdout


def test_the_command_asks_for_the_limit(by_command: Callable[..., Any]) -> None:
    run, store = by_command("b.exp")

    assert run.returncode == 1
    assert "--max-episode-steps" in run.stderr
    assert not store.exists()


@pytest.mark.parametrize("how", ["external bytes", "external link", "virtual"])
def test_a_file_cannot_make_us_read_other_files(tmp_path: Path, how: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(2000))
    write(tmp_path / "other.hdf5", rows())
    values = rows()["observations"]
    write(tmp_path / "a.hdf5", {n: v for n, v in rows().items() if n != "observations"})
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        if how == "external bytes":
            outside = [(str(tmp_path / "secret.bin"), 0, values.nbytes)]
            file.create_dataset("observations", values.shape, values.dtype, external=outside)
        elif how == "external link":
            file["observations"] = h5py.ExternalLink("other.hdf5", "/observations")
        else:
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            other = str(tmp_path / "other.hdf5")
            layout[:] = h5py.VirtualSource(other, "observations", values.shape)
            file.create_virtual_dataset("observations", layout)
    with pytest.raises(SourceError, match=r"other file|another file"):
        open_source(tmp_path / "a.hdf5", format="d4rl")
    with pytest.raises(SourceError):
        open_source(tmp_path / "a.hdf5")
