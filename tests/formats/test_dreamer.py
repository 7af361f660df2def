"""Episodes and chunks of Dreamer and DrQ-v2: V2 and V3 as they wrote them, others as they do."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

UUIDS = [f"{i:x}".rjust(22, "a") for i in range(8)]
END = "0" * 22
WRITTEN = Path(__file__).parent / "data" / "dreamerv2"


def episode(num_steps: int, **more: Any) -> dict[str, Any]:
    """An episode of V1: row 0 is the reset, and row t has the action that led to it."""
    rng = np.random.default_rng(num_steps)
    action = rng.normal(size=(num_steps + 1, 2)).astype(np.float32)
    reward = rng.normal(size=num_steps + 1).astype(np.float32)
    action[0] = reward[0] = 0
    return {
        "image": rng.integers(0, 256, (num_steps + 1, 4, 4, 3)).astype(np.uint8),
        "action": action,
        "reward": reward,
        "discount": np.ones(num_steps + 1, np.float32),
        **more,
    }


def flagged(num_steps: int, *, is_last: bool = True, is_terminal: bool = False) -> dict[str, Any]:
    """An episode of V2."""
    rows = np.arange(num_steps + 1)
    flags = {
        "is_first": rows == 0,
        "is_last": (rows == num_steps) & is_last,
        "is_terminal": (rows == num_steps) & is_terminal,
    }
    return episode(num_steps, **flags)


def write(folder: Path, *episodes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(episodes):
        name = f"20260101T00000{number}-{number:032x}-{len(rows['reward'])}.npz"
        np.savez_compressed(folder / name, **rows)
    return folder


def stream(lengths: tuple[int, ...], ends: str = "") -> dict[str, Any]:
    """Rows of V3; each episode of n rows ends as its letter says: t, l, or - for neither."""
    num_rows = sum(lengths)
    rng = np.random.default_rng(num_rows)
    starts = np.cumsum([0, *lengths[:-1]])
    last = np.cumsum(lengths) - 1
    ends = ends or "l" * len(lengths)
    flags = {name: np.zeros(num_rows, bool) for name in ("is_first", "is_last", "is_terminal")}
    flags["is_first"][starts] = True
    flags["is_last"][last] = [end != "-" for end in ends]
    flags["is_terminal"][last] = [end == "t" for end in ends]
    return {
        "image": rng.integers(0, 256, (num_rows, 4, 4, 3)).astype(np.uint8),
        "position": rng.normal(size=(num_rows, 3)).astype(np.float32),
        "action": rng.integers(0, 5, num_rows).astype(np.int32),
        "reward": rng.normal(size=num_rows).astype(np.float32),
        "stepid": np.zeros((num_rows, 20), np.uint8),
        "dyn/deter": np.zeros((num_rows, 7), np.float32),
        "log/reward": np.zeros(num_rows, np.float32),
        **flags,
    }


def write_chunks(
    folder: Path, rows: dict[str, Any], lengths: tuple[int, ...], first: int = 0
) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files, start = [], 0
    for number, length in enumerate(lengths):
        successor = END if number == len(lengths) - 1 else UUIDS[first + number + 1]
        # Times that do not ascend: the names say what follows what.
        time = f"20260101T00000{9 - number}F000000"
        file = folder / f"{time}-{UUIDS[first + number]}-{successor}-{length}.npz"
        np.savez_compressed(file, **{n: v[start : start + length] for n, v in rows.items()})
        files.append(file)
        start += length
    return files


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


def test_an_action_belongs_to_the_previous_observation(tmp_path: Path) -> None:
    given = episode(4)

    store, report = ingest(write(tmp_path / "v1", given))

    back = store.episode(0)
    assert back["observation"]["image"].tobytes() == given["image"].tobytes()
    for name in ("action", "reward", "discount"):
        assert back[name].tobytes() == given[name][1:].tobytes()
        assert back[name].dtype == given[name].dtype
    last = store.read([3], fields=["next_observation"])["next_observation"]["image"]
    assert last.tobytes() == given["image"][4:].tobytes()
    assert report.final_observations == 1
    assert report.dropped_steps == {"row 0 of an episode, whose action and reward are dummies": 1}


def test_what_version_2_wrote_arrives_byte_for_byte(tmp_path: Path) -> None:
    given = np.load(WRITTEN.with_suffix(".npz"))

    report = expstore.ingest_from(WRITTEN, tmp_path / "a.exp")

    store = expstore.open(tmp_path / "a.exp")
    assert report.end_reasons == {"terminated": 1, "truncated": 1}
    for number in range(2):
        back = store.episode(number)
        start, stop = (0, 4) if len(back["reward"]) == 3 else (4, 9)
        assert back["observation"]["image"].tobytes() == given["image"][start:stop].tobytes()
        for name in ("action", "reward"):
            expected = given[name][start + 1 : stop].astype(np.float32)
            assert back[name].tobytes() == expected.tobytes()


def test_a_discount_of_0_terminates_and_nothing_else_is_said_by_version_1(tmp_path: Path) -> None:
    ended = episode(3)
    ended["discount"][-1] = 0

    store, report = ingest(write(tmp_path / "v1", ended, episode(2)))

    assert store.episodes["end_reason"].tolist() == ["terminated", "cut"]
    text = "not terminal, and the file has no is_last, so it is kept as cut"
    assert report.remarks == {text: 1}
    assert report.flags == {"discount is 0": 1}


def test_version_2_tells_terminal_from_last_and_from_neither(tmp_path: Path) -> None:
    given = [flagged(3, is_terminal=True), flagged(2), flagged(4, is_last=False)]

    store, report = ingest(write(tmp_path / "v2", *given))

    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    assert np.flatnonzero(store.read(np.arange(9))["truncated"]).tolist() == [4]
    assert report.flags == {"is_terminal": 1, "is_last": 2}
    assert not {"is_first", "is_last", "is_terminal"} & set(store.fields)


def test_observations_of_drq_are_the_observation_itself(tmp_path: Path) -> None:
    given = episode(3)
    given["observation"] = given.pop("image").transpose(0, 3, 1, 2)

    store, _ = ingest(write(tmp_path / "drq", given))

    assert store.fields["observation"].shape == (3, 4, 4)
    assert store.read(np.arange(3))["observation"].tobytes() == given["observation"][:3].tobytes()


def test_what_is_of_the_log_is_left_out(tmp_path: Path) -> None:
    given = {**episode(3), "log_success": np.zeros(4)}

    store, report = ingest(write(tmp_path / "v1", given))

    assert report.left_out == {"log_success": "is of the log"}
    assert set(store.fields) == {"observation/image", "action", "reward", "discount", "terminated"}


def test_an_episode_of_one_row_has_no_step(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path / "v1", episode(0), episode(2)))

    assert store.episodes["length"].tolist() == [2]
    assert report.skipped_episodes == {"no steps in it": 1}


def test_a_file_that_is_cut_off_is_named_and_the_others_arrive(tmp_path: Path) -> None:
    path = write(tmp_path / "v1", episode(3), episode(4))
    first = min(path.iterdir())
    first.write_bytes(first.read_bytes()[:-40])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [4]
    assert [failure.key for failure in report.failures] == [f"episode {first.name}"]


def test_arrays_of_different_lengths_are_named(tmp_path: Path) -> None:
    broken = flagged(4)
    broken["image"] = broken["image"][:-1]

    _, report = ingest(write(tmp_path / "v2", flagged(3), broken))

    assert "equally many rows, got image 4, action 5" in report.failures[0].reason


def test_version_2_has_no_discount(tmp_path: Path) -> None:
    given = [flagged(3, is_terminal=True), flagged(2)]
    for rows in given:
        del rows["discount"]

    store, _ = ingest(write(tmp_path / "v2", *given))

    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated"]
    assert "discount" not in store.fields


@pytest.mark.parametrize("name", ["action", "reward", "discount"])
def test_files_that_do_not_begin_with_a_dummy_are_plain_npz(tmp_path: Path, name: str) -> None:
    given = episode(3)
    given[name][0] = 0.5

    source = open_source(write(tmp_path / "own", given))

    assert source.describe().startswith("1 .npz file in")


def test_a_dummy_that_is_none_is_reported_where_the_format_was_named(tmp_path: Path) -> None:
    given = episode(3)
    given["action"][0] = 0.5

    _, report = ingest(write(tmp_path / "v1", given), format="dreamer")

    assert report.remarks["row 0 has an action or a reward that is not zero"] == 1


def test_chunks_shift_the_reward_by_one(tmp_path: Path) -> None:
    given = stream((4, 3), "tl")
    write_chunks(tmp_path / "v3", given, (7,))

    store, report = ingest(tmp_path / "v3")

    assert store.episodes["length"].tolist() == [3, 2]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated"]
    back = store.read(np.arange(5))
    assert back["action"].tobytes() == given["action"][[0, 1, 2, 4, 5]].tobytes()
    assert back["reward"].tobytes() == given["reward"][[1, 2, 3, 5, 6]].tobytes()
    image = back["observation"]["image"]
    assert image.tobytes() == given["image"][[0, 1, 2, 4, 5]].tobytes()
    last = store.read([2, 4], fields=["next_observation"])["next_observation"]["position"]
    assert last.tobytes() == given["position"][[3, 6]].tobytes()
    assert set(report.left_out) == {"stepid", "dyn/deter", "log/reward"}
    assert report.final_observations == 2


def test_chunks_of_the_first_releases_are_known_by_their_names(tmp_path: Path) -> None:
    given = stream((4, 3))
    del given["stepid"]
    write_chunks(tmp_path / "v3", given, (7,))

    assert ingest(tmp_path / "v3")[0].episodes["length"].tolist() == [3, 2]


def test_an_episode_goes_on_in_the_chunk_that_the_name_tells(tmp_path: Path) -> None:
    given = stream((9, 4))
    files = write_chunks(tmp_path / "v3", given, (5, 5, 3))

    store, report = ingest(tmp_path / "v3")

    assert store.episodes["length"].tolist() == [8, 3]
    kept = [*range(1, 9), *range(10, 13)]
    assert store.read(np.arange(11))["reward"].tobytes() == given["reward"][kept].tobytes()
    source = store.episodes[0]["source"]
    assert (source["file"], source["last_file"]) == (files[0].name, files[1].name)
    assert source["episode"] == f"{UUIDS[0]}/0"
    assert report.failures == ()


def test_streams_do_not_mix(tmp_path: Path) -> None:
    one, other = stream((5,)), stream((6,))
    write_chunks(tmp_path / "v3", one, (3, 2))
    write_chunks(tmp_path / "v3", other, (3, 3), first=4)

    store, _ = ingest(tmp_path / "v3")

    rewards = {store.episode(i)["reward"].tobytes() for i in range(2)}
    assert rewards == {one["reward"][1:].tobytes(), other["reward"][1:].tobytes()}


def test_an_unfinished_episode_at_the_end_is_incomplete(tmp_path: Path) -> None:
    write_chunks(tmp_path / "v3", stream((4, 3, 3), "--l"), (7,))
    store, _ = ingest(tmp_path / "v3")

    # The first has no flag either, but another one started after it.
    assert store.episodes["end_reason"].tolist() == ["cut", "incomplete"]


def test_a_chunk_that_is_cut_off_costs_its_own_rows(tmp_path: Path) -> None:
    given = stream((4, 4, 4))
    files = write_chunks(tmp_path / "v3", given, (6, 2, 4))
    files[1].write_bytes(files[1].read_bytes()[:-40])

    store, report = ingest(tmp_path / "v3")

    assert store.episodes["length"].tolist() == [3, 1, 3]
    assert store.episodes["end_reason"].tolist() == ["truncated", "incomplete", "truncated"]
    assert [failure.key for failure in report.failures] == [files[1].name]


def test_a_chunk_that_is_gone_leaves_what_follows_without_its_start(tmp_path: Path) -> None:
    files = write_chunks(tmp_path / "v3", stream((6, 3)), (3, 6))
    files[0].unlink()

    store, report = ingest(tmp_path / "v3")

    assert store.episodes["length"].tolist() == [2, 2]
    assert report.remarks["what was before the first row is not there"] == 1


def test_of_a_chunk_that_was_saved_twice_the_longer_one_counts(tmp_path: Path) -> None:
    given = stream((6,))
    write_chunks(tmp_path / "v3", {name: rows[:4] for name, rows in given.items()}, (4,))
    write_chunks(tmp_path / "v3", given, (6,))

    store, report = ingest(tmp_path / "v3")

    assert store.episodes["length"].tolist() == [5]
    text = "chunks that were saved again, with more rows or a successor"
    assert report.skipped_episodes == {text: 1}


def test_an_episode_that_went_on_is_refused_when_the_import_does(tmp_path: Path) -> None:
    given = stream((6,))
    first = {name: rows[:4] for name, rows in given.items()}
    write_chunks(tmp_path / "v3", first, (4,))
    ingest(tmp_path / "v3")
    write_chunks(tmp_path / "v3", given, (6,))

    with pytest.raises(SourceError, match="has 5 steps, but had 3 when it was imported"):
        ingest(tmp_path / "v3", resume=True)


@pytest.mark.parametrize("version", [1, 3])
def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(
    tmp_path: Path, version: int
) -> None:
    if version == 1:
        write(tmp_path / "a", episode(3), episode(4), episode(2))
    else:
        write_chunks(tmp_path / "a", stream((4, 5, 3)), (6, 6))
    expected, _ = ingest(tmp_path / "a")

    expstore.ingest_from(tmp_path / "a", tmp_path / "b.exp", episodes=1)
    expstore.ingest_from(tmp_path / "a", tmp_path / "b.exp", resume=True)

    back, steps = expstore.open(tmp_path / "b.exp"), np.arange(9)
    assert back.read(steps)["reward"].tobytes() == expected.read(steps)["reward"].tobytes()


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "v1", episode(3), episode(4, notes=np.array([{}] * 5, object)))

    store, report = ingest(path)

    assert (store.num_episodes, len(report.failures)) == (1, 1)


def test_another_folder_under_the_right_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "20260101T000000-0-3.npz", words=np.zeros(3))

    _, report = ingest(tmp_path, format="dreamer")

    assert "is not of Dreamer or DrQ-v2; looked for" in report.failures[0].reason


def test_chunks_that_dreamer_v3_wrote_itself(tmp_path: Path) -> None:
    """Three episodes over three chunks, the last one unfinished (`scripts/clients`)."""
    given = dict(np.load(WRITTEN.with_name("dreamerv3.npz")))
    report = expstore.ingest_from(WRITTEN.with_name("dreamerv3"), tmp_path / "a.exp")

    store = expstore.open(tmp_path / "a.exp")
    assert store.episodes["end_reason"].tolist()[:2] == ["truncated", "terminated"]
    starts = [*np.flatnonzero(given["is_first"]), len(given["is_first"])]
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        found = store.episode(number)
        assert found["observation"]["image"].tobytes() == given["image"][start:stop].tobytes()
        assert found["action"].tobytes() == given["action"][start : stop - 1].tobytes()
        assert found["reward"].tobytes() == given["reward"][start + 1 : stop].tobytes()
    assert report.num_episodes == 3 and not report.failures
