"""robomimic files, in the layout that robomimic writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")

ENV_ARGS = {"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}}


def demo(
    length: int, success_at: tuple[int, ...] = (-1,), following: bool = True
) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    images = rng.integers(0, 256, (length + 1, 4, 4, 3)).astype(np.uint8)
    states = rng.normal(size=(length + 1, 3))
    dones = np.zeros(length, np.int64)
    dones[list(success_at)] = 1
    data = {
        "actions": rng.normal(size=(length, 7)),
        "rewards": rng.normal(size=length),
        "dones": dones,
        "states": rng.normal(size=(length, 5)),
        "action_dict/gripper": rng.normal(size=(length, 1)).astype(np.float32),
        "obs/agentview_image": images[:-1],
        "obs/robot0_eef_pos": states[:-1],
    }
    if following:
        data["next_obs/agentview_image"] = images[1:]
        data["next_obs/robot0_eef_pos"] = states[1:]
    return data


def write(path: Path, demos: dict[str, dict[str, Any]], **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(len(steps["actions"]) for steps in demos.values())
        data.attrs["env_args"] = json.dumps(ENV_ARGS)
        for name, steps in demos.items():
            group = data.create_group(name)
            group.attrs.update({"num_samples": len(steps["actions"]), "model_file": "<mujoco/>"})
            group.attrs.update(attributes)
            for key, values in steps.items():
                group.create_dataset(key, data=values)
        file.create_dataset("mask/train", data=np.array([b"demo_2", b"demo_10"]))
    return path


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


def test_rows_arrive_byte_for_byte_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    demos = {"demo_10": demo(3), "demo_2": demo(4)}

    store, report = ingest(write(tmp_path / "lift.hdf5", demos), done_mode=0)

    assert [store.episodes[i]["source"]["episode"] for i in range(2)] == ["demo_2", "demo_10"]
    names = {
        "actions": "action",
        "rewards": "reward",
        "dones": "dones",
        "states": "states",
        "action_dict/gripper": "action_dict/gripper",
        "obs/agentview_image": "observation/agentview_image",
        "obs/robot0_eef_pos": "observation/robot0_eef_pos",
    }
    back = store.read(np.arange(7), fields=list(names.values()))
    for old, name in names.items():
        given = np.concatenate([demos["demo_2"][old], demos["demo_10"][old]])
        found: Any = back
        for part in name.split("/"):
            found = found[part]
        assert (found.dtype, found.tobytes()) == (given.dtype, given.tobytes()), name
    assert report.final_observations == 2
    assert (report.failures, report.dropped_steps) == ((), {})


def test_next_obs_give_the_final_observation(tmp_path: Path) -> None:
    demos = {"demo_0": demo(3)}

    store, _ = ingest(write(tmp_path / "lift.hdf5", demos), done_mode=0)

    back = store.read([2], fields=["next_observation"])["next_observation"]["robot0_eef_pos"]
    assert back.tobytes() == demos["demo_0"]["next_obs/robot0_eef_pos"][-1].tobytes()


def test_without_next_obs_there_is_no_final_observation(tmp_path: Path) -> None:
    _, report = ingest(
        write(tmp_path / "lift.hdf5", {"demo_0": demo(3, following=False)}), done_mode=0
    )

    assert report.final_observations == 0


def test_the_meaning_of_dones_is_asked_for_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "lift.hdf5", {"demo_0": demo(3)})

    with pytest.raises(SourceError, match=r"0 success, 1 the end .* --done-mode 0 \(done_mode=0\)"):
        open_source(path)


def test_success_terminates_and_everything_else_is_cut(tmp_path: Path) -> None:
    demos = {"demo_0": demo(3), "demo_1": demo(4, ()), "demo_2": demo(5, (2, 3, 4))}

    store, report = ingest(write(tmp_path / "lift.hdf5", demos), done_mode=0)

    assert store.episodes["end_reason"].tolist() == ["terminated", "cut", "terminated"]
    steps = np.arange(12)
    assert np.flatnonzero(store.read(steps)["terminated"]).tolist() == [2, 11]
    assert np.flatnonzero(store.read(steps)["dones"]).tolist() == [2, 9, 10, 11]
    assert report.flags == {"dones": 2}
    assert report.remarks == {"success before the last step, where no flag can be; see dones": 1}


@pytest.mark.parametrize("mode", [1, 2])
def test_dones_that_mark_the_end_terminate_nothing(tmp_path: Path, mode: int) -> None:
    store, report = ingest(
        write(tmp_path / "lift.hdf5", {"demo_0": demo(3), "demo_1": demo(4, ())}), done_mode=mode
    )

    assert store.episodes["end_reason"].tolist() == ["cut", "cut"]
    assert "terminated" not in store.fields
    assert report.remarks[f"dones are not set on the last step, which done_mode {mode} says"] == 1
    assert f"(done_mode {mode})" in report.boundary_rule


def test_a_mode_for_a_file_without_dones_is_refused(tmp_path: Path) -> None:
    steps = demo(3)
    del steps["dones"]
    path = write(tmp_path / "lift.hdf5", {"demo_0": steps})

    with pytest.raises(SourceError, match=r"has no dones; leave out --done-mode"):
        open_source(path, done_mode=0)
    store, _ = ingest(path)
    assert store.episodes["end_reason"].tolist() == ["cut"]


def test_what_the_file_says_of_itself_is_kept(tmp_path: Path) -> None:
    demos = {"demo_1": demo(3), "demo_2": demo(4)}
    path = write(tmp_path / "lift.hdf5", demos, ep_meta='{"lang": "lift the cube"}')

    store, report = ingest(path, done_mode=0)

    second = store.episodes[1]
    assert second["dataset"]["env_args"] == ENV_ARGS
    assert second["masks"] == ["train"]
    assert second["attributes"] == {"ep_meta": {"lang": "lift the cube"}}
    assert second["source"]["num_bytes"] == path.stat().st_size
    assert "masks" not in store.episodes[0]
    assert report.left_out == {"attribute model_file": "comes with --infos (infos=True)"}


def test_the_model_file_comes_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "lift.hdf5", {"demo_0": demo(3)})

    store, report = ingest(path, done_mode=0, infos=True)

    assert store.episodes[0]["attributes"]["model_file"] == "<mujoco/>"
    assert report.left_out == {}


def test_a_demonstration_that_was_not_written_whole_is_named(tmp_path: Path) -> None:
    broken = demo(3)
    broken["rewards"] = broken["rewards"][:2]
    demos = {"demo_0": broken, "demo_1": demo(4)}

    store, report = ingest(write(tmp_path / "lift.hdf5", demos), done_mode=0)

    assert store.episodes["length"].tolist() == [4]
    assert [(f.key, f.reason) for f in report.failures] == [
        ("demo_0", "rewards has 2 rows, but there are 3 actions: it was not written whole")
    ]
    assert report.remarks == {"data says 7 steps in all, there are 4": 0}


def test_a_file_that_is_cut_off_is_refused_with_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "lift.hdf5", {"demo_0": demo(30)})
    path.write_bytes(path.read_bytes()[:-500])

    with pytest.raises(SourceError, match="is cut off"):
        open_source(path, done_mode=0)


def test_another_format_under_the_right_name_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "lift.hdf5", "w") as file:
        file["data/words"] = np.zeros(3)

    with pytest.raises(SourceError, match=r"is not of robomimic; looked for .* data/demo_0"):
        open_source(tmp_path / "lift.hdf5", "robomimic", done_mode=0)


def test_an_import_that_stopped_and_went_on_has_everything_once(tmp_path: Path) -> None:
    path = write(tmp_path / "lift.hdf5", {f"demo_{i}": demo(i + 1) for i in range(4)})

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=2, done_mode=0)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True, done_mode=0)

    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [1, 2, 3, 4]
