"""TorchRL buffers and TensorDicts, written by TorchRL and tensordict themselves."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
data_of = pytest.importorskip("torchrl.data")


def steps(num_rows: int, ends: tuple[int, ...] = (), first: int = 0) -> Any:
    """Rows of which `first + i` is in every value of row i; the last two ends are of both kinds."""
    rng = torch.Generator().manual_seed(first)
    number = torch.arange(first, first + num_rows)
    is_end = torch.isin(number, torch.tensor(ends, dtype=torch.int64))[:, None]
    terminated = is_end & (number % 2 == 0)[:, None]
    images = torch.randint(0, 256, (num_rows + 1, 2, 2), generator=rng).to(torch.uint8)
    return tensordict.TensorDict(
        {
            "observation": number[:, None].float().expand(-1, 3).clone(),
            "pixels": images[:-1],
            "action": torch.randn(num_rows, 2, generator=rng),
            "done": torch.zeros(num_rows, 1, dtype=torch.bool),
            "next": {
                "observation": number[:, None].float().expand(-1, 3) + 0.5,
                "pixels": images[1:],
                "reward": number[:, None].double(),
                "done": is_end,
                "terminated": terminated,
                "truncated": is_end & ~terminated,
            },
        },
        [num_rows],
    )


def buffer(capacity: int, **options: Any) -> Any:
    storage = data_of.LazyMemmapStorage(capacity, **options)
    return data_of.TensorDictReplayBuffer(storage=storage, batch_size=2)


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


def dump(path: Path, capacity: int, *parts: Any) -> Path:
    written = buffer(capacity)
    for part in parts:
        written.extend(part)
    written.dumps(path)
    return path


def test_rows_arrive_byte_for_byte(tmp_path: Path) -> None:
    given = steps(7, (2, 5))

    store, report = ingest(dump(tmp_path / "rb", 10, given))

    assert store.episodes["length"].tolist() == [3, 3, 1]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    back = store.read(np.arange(7))
    for name, old in {
        "observation": given["observation"],
        "pixels": given["pixels"],
        "action": given["action"],
        "reward": given["next", "reward"],
        "terminated": given["next", "terminated"],
        "truncated": given["next", "truncated"],
    }.items():
        assert back[name].tobytes() == old.numpy().tobytes(), name
        assert str(old.dtype) == f"torch.{back[name].dtype}", name
    assert report.final_observations == 3
    assert report.shape_changes["reward"] == "(1,) to ()"
    assert report.left_out == {
        "index": "only counts",
        "next/done": "is next/terminated or next/truncated",
        "done": "is of the state before the action, see next",
    }


def test_next_gives_the_observation_after_the_last_step(tmp_path: Path) -> None:
    given = steps(4, (3,))

    store, _ = ingest(dump(tmp_path / "rb", 10, given))

    last = store.read([3], fields=["next_observation", "next_pixels"])
    assert last["next_observation"].tolist() == [[3.5, 3.5, 3.5]]
    assert last["next_pixels"].tobytes() == given["next", "pixels"][3].numpy().tobytes()


def test_a_ring_that_wraps_inside_an_episode_starts_with_its_oldest_row(tmp_path: Path) -> None:
    path = dump(tmp_path / "rb", 10, steps(6, (3,)), steps(8, (7, 11), first=6))

    store, report = ingest(path)

    # Rows 0 to 3 were overwritten; 4 to 7 lie on both sides of the end of the ring.
    assert store.read(np.arange(10))["reward"].tolist() == list(range(4, 14))
    assert store.episodes["length"].tolist() == [4, 4, 2]
    assert store.episodes["end_reason"].tolist() == ["truncated", "truncated", "incomplete"]
    assert store.episodes[1]["source"]["rows"] == [8, 2]
    text = "rows before the first had been overwritten, perhaps of the same episode"
    assert report.remarks[text] == 1


def test_numbers_of_trajectories_separate_episodes_without_flags(tmp_path: Path) -> None:
    given = steps(5)
    given["collector"] = {"traj_ids": torch.tensor([7, 7, 9, 9, 9])}
    for flag in ("done", "terminated", "truncated"):
        del given["next", flag]

    store, report = ingest(dump(tmp_path / "rb", 10, given))

    assert store.episodes["end_reason"].tolist() == ["cut", "incomplete"]
    assert [store.episodes[i]["traj_ids"] for i in range(2)] == [7, 9]
    assert report.boundary_rule == "an episode ends where collector/traj_ids changes"


def test_rows_that_do_not_say_where_an_episode_ends_are_refused(tmp_path: Path) -> None:
    given = steps(5).select("observation", "action")

    with pytest.raises(SourceError, match=r"does not say where an episode ends; .* next/done"):
        open_source(dump(tmp_path / "rb", 10, given))


def test_both_flags_are_kept_and_it_ended_as_terminated(tmp_path: Path) -> None:
    given = steps(3, (2,))
    given["next", "truncated"] = given["next", "terminated"].clone()

    store, report = ingest(dump(tmp_path / "rb", 10, given))

    assert store.episodes["end_reason"].tolist() == ["terminated"]
    assert store.read([2])["truncated"].tolist() == [True]
    assert report.remarks == {"both flags set, so it ended as terminated; both are kept": 1}


def test_done_alone_does_not_tell_how_an_episode_ended(tmp_path: Path) -> None:
    given = steps(3, (2,))
    del given["next", "terminated"], given["next", "truncated"]

    store, _ = ingest(dump(tmp_path / "rb", 10, given))

    assert store.episodes["end_reason"].tolist() == ["cut"]
    assert store.read([2])["dones"].tolist() == [True]


def test_each_lane_of_a_buffer_is_a_stream_of_its_own(tmp_path: Path) -> None:
    lanes = torch.stack([steps(4, (1,)), steps(4, (12,), first=10)])
    written = data_of.ReplayBuffer(storage=data_of.LazyMemmapStorage(20, ndim=2))
    written.extend(lanes)
    written.dumps(tmp_path / "rb")

    store, _ = ingest(tmp_path / "rb")

    keys = [store.episodes[i]["source"]["episode"] for i in range(4)]
    assert keys == ["0/0", "0/1", "1/0", "1/1"]
    assert store.read(np.arange(8))["reward"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_a_plain_tensordict_is_read_with_its_texts(tmp_path: Path) -> None:
    given = steps(3, (2,))
    given["task"] = tensordict.NonTensorStack("push", "push", "lift")
    given["robot"] = "arm"
    given["half"] = torch.tensor([[0.5, -2.0]] * 3, dtype=torch.bfloat16)
    given.memmap(tmp_path / "td")

    store, report = ingest(tmp_path / "td")

    assert store.episode(0)["task"][2] == "lift"
    assert store.episodes[0]["dataset"] == {"robot": "arm"}
    assert store.read([0])["half"].tolist() == [[0.5, -2.0]]
    assert report.dtype_changes == {"half": "bfloat16 to float32"}


def test_two_axes_of_a_plain_tensordict_are_refused(tmp_path: Path) -> None:
    torch.stack([steps(3), steps(3)]).memmap(tmp_path / "td")

    with pytest.raises(SourceError, match=r"has the batch axes \(2, 3\)"):
        open_source(tmp_path / "td")


def test_the_files_are_never_whole_in_memory(tmp_path: Path) -> None:
    num_rows = 4000  # of 16 kB, which no disk has to hold
    path = tmp_path / "td"
    steps(num_rows, tuple(range(99, num_rows, 100))).memmap(path)
    meta = json.loads((path / "meta.json").read_text())
    meta["observation"]["shape"] = [num_rows, 4000]
    (path / "meta.json").write_text(json.dumps(meta))
    os.truncate(path / "observation.memmap", num_rows * 16_000)

    tracemalloc.start()
    lengths = [len(episode.data["action"]) for episode in open_source(path).episodes()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert lengths == [100] * 40
    assert peak < 12e6  # an episode has 1.6 MB


def test_of_a_file_that_is_cut_off_whole_episodes_arrive(tmp_path: Path) -> None:
    path = dump(tmp_path / "rb", 9, steps(9, (2, 5, 8)))
    file = path / "storage" / "action.memmap"
    file.write_bytes(file.read_bytes()[: 7 * 8 + 3])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [3, 3]
    assert [(f.key, f.reason) for f in report.failures] == [
        (
            "episode 2",
            "action.memmap has 7 rows, but the episode has row 8: the file is cut off",
        )
    ]


def test_rows_whose_flags_are_cut_off_are_named(tmp_path: Path) -> None:
    path = dump(tmp_path / "rb", 9, steps(9, (2, 5, 8)))
    file = path / "storage" / "next" / "done.memmap"
    file.write_bytes(file.read_bytes()[:6])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [3, 3]
    assert [failure.key for failure in report.failures] == ["3 rows from row 6 on"]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = dump(tmp_path / "rb", 9, steps(3, (2,)))
    (path / "prefetch.pkl").write_bytes(b"cbuiltins\nexit\n(I3\ntR.")

    assert ingest(path)[0].num_steps == 3


def test_a_key_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    steps(3, (2,)).memmap(tmp_path / "td")
    meta = tmp_path / "td" / "meta.json"
    entries = json.loads(meta.read_text())
    entries["../../secret"] = entries["action"]
    meta.write_text(json.dumps(entries))

    with pytest.raises(SourceError, match="which is no file's name"):
        open_source(tmp_path / "td")


def test_another_folder_under_the_right_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"shape": "round"}')

    with pytest.raises(SourceError, match="is not of TorchRL; looked for a folder"):
        open_source(tmp_path, "torchrl")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path)


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    path = dump(tmp_path / "rb", 9, steps(9, (2, 5, 8)))

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    assert expstore.open(tmp_path / "a.exp").read(np.arange(9))["reward"].tolist() == [*range(9)]


def test_a_buffer_that_has_changed_is_refused_when_it_goes_on(tmp_path: Path) -> None:
    dump(tmp_path / "rb", 9, steps(4, (2,)))
    expstore.ingest_from(tmp_path / "rb", tmp_path / "a.exp")
    dump(tmp_path / "rb", 9, steps(6, (2,)))

    with pytest.raises(SourceError, match="has 3 steps, but had 1 when it was imported"):
        expstore.ingest_from(tmp_path / "rb", tmp_path / "a.exp", resume=True)
