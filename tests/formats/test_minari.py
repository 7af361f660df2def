"""Minari data sets in their HDF5 form, written by Minari itself."""

import hashlib
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import MissingExtraError, SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")
gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
COLUMNS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}


def buffer(
    length: int,
    observation: Any = BOX,
    action: Any = BOX,
    *,
    end: str | None = "terminations",
    final: bool = True,
    **more: Any,
) -> Any:
    """An episode of random values of the spaces."""
    for seed, space in enumerate((observation, action)):
        space.seed(100 * length + seed)
    steps: dict[str, Any] = {"rewards": np.random.default_rng(length).normal(size=length).tolist()}
    for flag in ("terminations", "truncations"):
        steps[flag] = [False] * (length - 1) + [end in (flag, "both")]
    return minari.data_collector.EpisodeBuffer(
        observations=sampled(observation, length + final),
        actions=sampled(action, length),
        **{**steps, **more},
    )


def sampled(space: Any, length: int) -> Any:
    """Values in the form of Minari's buffers: lists at the leaves of the space."""
    if isinstance(space, spaces.Dict):
        return {key: sampled(below, length) for key, below in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sampled(below, length) for below in space.spaces)
    return [space.sample() for _ in range(length)]


def write(folder: Path, *buffers: Any, **options: Any) -> Path:
    """Let Minari write a data set; its folder."""
    spaces_of = {"observation_space": BOX, "action_space": BOX} if "env" not in options else {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        warnings.simplefilter("ignore")  # what it would like to know of the author
        minari.create_dataset_from_buffers(
            "arm/reach-v0", list(buffers), **{"data_format": "hdf5", **spaces_of, **options}
        )
    return folder / "arm" / "reach-v0"


def read_back(path: Path) -> list[Any]:
    """The episodes as Minari reads them."""
    return list(minari.MinariDataset(path / "data").iterate_episodes())


def main_file(path: Path) -> Path:
    return path / "data" / "main_data.hdf5"


def change(path: Path, **values: Any) -> None:
    """Set keys of the metadata."""
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    target = path.parent / "a.exp"
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


def assert_same(back: Any, given: Any, what: str) -> None:
    """Every value, its dtype and its shape."""
    if isinstance(given, dict):
        assert back.keys() == given.keys(), what
        for key, below in given.items():
            assert_same(back[key], below, f"{what}/{key}")
    elif isinstance(given, tuple):
        assert sorted(back, key=int) == [str(i) for i in range(len(given))], what
        for i, below in enumerate(given):
            assert_same(back[str(i)], below, f"{what}/{i}")
    else:
        assert (back.dtype, back.shape) == (given.dtype, given.shape), what
        assert back.tobytes() == given.tobytes(), what


def assert_as_minari_reads_it(store: expstore.Store, path: Path) -> None:
    episodes = read_back(path)
    assert store.num_episodes == len(episodes)
    for number, episode in enumerate(episodes):
        back = store.episode(number)
        assert_same(back["observation"], episode.observations, "observation")
        assert_same(back["action"], episode.actions, "action")
        for name, old in COLUMNS.items():
            assert_same(back[name], getattr(episode, old), name)


def rolled_out(env_id: str, num_episodes: int, limit: int) -> list[Any]:
    buffers = []
    with gymnasium.make(env_id, max_episode_steps=limit, disable_env_checker=True) as env:
        for seed in range(num_episodes):
            env.action_space.seed(seed)
            steps: dict[str, list[Any]] = {"observations": [env.reset(seed=seed)[0]]}
            is_over = False
            while not is_over:
                action = env.action_space.sample()
                observation, reward, terminated, truncated, _ = env.step(action)
                steps["observations"].append(observation)
                for name, value in {
                    "actions": action,
                    "rewards": reward,
                    "terminations": terminated,
                    "truncations": truncated,
                }.items():
                    steps.setdefault(name, []).append(value)
                is_over = terminated or truncated
            buffers.append(minari.data_collector.EpisodeBuffer(seed=seed, **steps))
    return buffers


@pytest.mark.parametrize(
    ("env_id", "limit", "ends"),
    [("CartPole-v1", 15, {"terminated", "truncated"}), ("HalfCheetah-v5", 40, {"truncated"})],
)
def test_recorded_environments_arrive_byte_for_byte(
    tmp_path: Path, env_id: str, limit: int, ends: set[str]
) -> None:
    if env_id.startswith("Half"):
        pytest.importorskip("mujoco")
    path = write(tmp_path, *rolled_out(env_id, 6, limit), env=env_id, algorithm_name="random")

    store, report = ingest(path)

    assert_as_minari_reads_it(store, path)
    assert set(store.episodes["end_reason"].tolist()) == ends
    assert report.final_observations == report.num_episodes == 6
    assert store.episodes["seed"].tolist() == list(range(6))
    assert store.episodes[0]["dataset"] == {
        "dataset_id": "arm/reach-v0",
        "algorithm_name": "random",
        "minari_version": minari.__version__,
        "env_id": env_id,
    }
    assert (report.failures, report.dropped_steps, report.dtype_changes) == ((), {}, {})


def test_the_final_observation_follows_the_last_step(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(4), buffer(6, end="truncations"))

    store, report = ingest(path)

    last = store.read([3, 9], fields=["next_observation"])["next_observation"]
    for row, episode in zip(last, read_back(path), strict=True):
        assert row.tobytes() == episode.observations[-1].tobytes()
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated"]
    assert report.flags == {"terminations": 1, "truncations": 1}


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (spaces.Discrete(7, start=3), spaces.Discrete(2)),
        (spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(5)),
        (spaces.Box(0, 255, (6, 5, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
        (
            spaces.Dict({"arm": spaces.Dict({"q": BOX, "on": spaces.Discrete(2)}), "goal": BOX}),
            spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2, 2), np.float32))),
        ),
        (
            spaces.Tuple((*[spaces.Discrete(9)] * 11, spaces.Dict({"_index_0": BOX}))),
            spaces.Dict({"grip": spaces.Discrete(2)}),
        ),
    ],
    ids=["discrete", "multi", "small image", "nested", "twelve elements"],
)
def test_every_space_arrives_byte_for_byte(tmp_path: Path, observation: Any, action: Any) -> None:
    path = write(
        tmp_path,
        *(buffer(length, observation, action) for length in (1, 5)),
        observation_space=observation,
        action_space=action,
    )

    store, report = ingest(path)

    assert_as_minari_reads_it(store, path)
    assert report.final_observations == 2


IMAGE = spaces.Box(0, 255, (40, 36, 3), np.uint8)


def images(length: int, *, plain: bool = False) -> Any:
    """An episode of frames: noise, or flat ones whose JPEGs are equally long."""
    episode = buffer(length, IMAGE)
    if plain:
        episode.observations[:] = [np.full(IMAGE.shape, 90, np.uint8)] * (length + 1)
    return episode


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["observation", "observation/camera/0"])
def test_jpeg_images_are_decoded_as_minari_does(tmp_path: Path, name: str, plain: bool) -> None:
    pytest.importorskip("PIL")
    episode, space = images(5, plain=plain), IMAGE
    if "/" in name:
        space = spaces.Dict({"camera": spaces.Tuple((IMAGE,))})
        frames = {"camera": (episode.observations,)}
        episode = minari.data_collector.EpisodeBuffer(**{**vars(episode), "observations": frames})
    path = write(tmp_path, episode, observation_space=space)
    with h5py.File(main_file(path)) as file:
        stored = file["episode_0"][
            name.replace("observation", "observations").replace("0", "_index_0")
        ]
        assert stored.ndim == (2 if plain else 1)

    store, report = ingest(path)

    assert store.fields[name].shape == IMAGE.shape
    assert_as_minari_reads_it(store, path)
    assert report.remarks == {
        f"{name} was stored as JPEG, which had altered it, and was decoded": 1
    }


def test_images_that_are_not_encoded_stay_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, images(5), observation_space=IMAGE, jpeg_encoding=False)

    store, report = ingest(path)

    assert_same(store.episode(0)["observation"], np.array(images(5).observations), "observation")
    assert report.remarks == {}


def test_old_files_have_raw_images_and_say_nothing_of_jpeg(tmp_path: Path) -> None:
    path = write(tmp_path, images(5), observation_space=IMAGE, jpeg_encoding=False)
    change(path, jpeg_encoding=True)  # what a reader of old files has to assume

    store, _ = ingest(path)

    assert_same(store.episode(0)["observation"], np.array(images(5).observations), "observation")


def test_a_vector_of_bytes_is_no_image(tmp_path: Path) -> None:
    space = spaces.Box(0, 255, (400,), np.uint8)
    episode = buffer(3, space)
    for row in episode.observations:
        row[:3] = (0xFF, 0xD8, 0xFF)  # as a JPEG begins
    path = write(tmp_path, episode, observation_space=space)

    store, _ = ingest(path)

    assert_as_minari_reads_it(store, path)


def test_a_damaged_image_loses_its_episode_only(tmp_path: Path) -> None:
    path = write(tmp_path, images(3), images(4), observation_space=IMAGE)
    with h5py.File(main_file(path), "r+") as file:
        frames = file["episode_0/observations"]
        frames[2] = frames[2][:50]

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [4]
    assert [failure.key for failure in report.failures] == ["episode_0"]
    assert "image 2 of observation cannot be decoded" in report.failures[0].reason


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, images(3), observation_space=IMAGE)
    monkeypatch.setitem(sys.modules, "PIL", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'expstore\[images\]'"):
        ingest(path)


def test_text_arrives_as_text(tmp_path: Path) -> None:
    space = spaces.Dict({"say": spaces.Text(12), "q": BOX})
    episode = buffer(3, space)
    episode.observations["say"][:] = ["go", "", "größer", "stop"]
    path = write(tmp_path, episode, observation_space=space)

    store, report = ingest(path)

    assert store.episode(0)["observation"]["say"] == ["go", "", "größer", "stop"]
    assert (store.fields["observation/say"].dtype, report.failures) == ("text", ())


def test_both_flags_end_as_terminated_and_stay_both(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path, buffer(3, end="both")))

    assert store.episodes["end_reason"].tolist() == ["terminated"]
    both = store.read([2], fields=["terminated", "truncated"])
    assert both["terminated"].all() and both["truncated"].all()
    assert report.remarks == {"both flags set, so it ended as terminated; both are kept": 1}


def test_an_episode_without_a_flag_is_cut_and_the_report_says_so(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path, buffer(3), buffer(4, end=None)))

    assert store.episodes["end_reason"].tolist() == ["terminated", "cut"]
    assert report.remarks == {"no end flag is set, so it is kept as cut": 1}


def test_as_many_observations_as_actions_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), buffer(4, final=False))

    store, report = ingest(path)

    assert len(store.episode(1)["observation"]) == 4
    assert report.final_observations == 1
    assert report.remarks == {"as many observations as actions, so no final observation": 1}


def test_seeds_and_options_of_the_reset_are_kept(tmp_path: Path) -> None:
    options = {"goal": {"x": 1.5, "tag": "left"}, "level": 3}
    path = write(tmp_path, buffer(3, seed=12, options=options), buffer(4))
    with h5py.File(main_file(path), "r+") as file:
        file["episode_1"].attrs["skill"] = "good"

    store, _ = ingest(path)

    assert store.episodes[0]["seed"] == 12
    assert store.episodes[0]["options"] == options
    assert store.episodes[1]["seed"] is None
    assert store.episodes[1]["attributes"]["skill"] == "good"


def test_infos_come_on_request_with_the_row_of_the_reset_first(tmp_path: Path) -> None:
    infos = {"x": list(np.arange(4.0)), "deep": {"hit": [False, True, False, True]}}
    path = write(tmp_path, buffer(3, infos=infos))

    source = open_source(path)
    assert "infos/x" not in next(source.episodes()).data
    assert source.account.left_out == {"infos": "come with --infos (infos=True)"}
    source.close()

    store, _ = ingest(path, infos=True)
    back = store.read([0, 1, 2], fields=["infos/x", "next_infos/x", "infos/deep/hit"])
    assert back["infos"]["x"].tolist() == [0, 1, 2]
    assert back["next_infos"]["x"].tolist() == [1, 2, 3]
    assert back["infos"]["deep"]["hit"].tolist() == [False, True, False]


def test_episodes_come_in_the_order_of_their_numbers_and_gaps_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path, *(buffer(length) for length in range(1, 13)))
    with h5py.File(main_file(path), "r+") as file:
        del file["episode_3"]

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [row["source"]["episode"] for row in store.episodes][3:] == list(range(4, 12))
    assert report.remarks == {
        "1 of the numbers up to 11 are missing": 0,
        "metadata.json says 12 episodes, there are 11": 0,
        "metadata.json says 78 steps, there are 74": 0,
    }


@pytest.mark.parametrize("broken", ["truncations", "actions", "total_steps", "observations"])
def test_an_episode_that_was_not_written_whole_is_named(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path, buffer(3), buffer(4), buffer(5))
    with h5py.File(main_file(path), "r+") as file:
        group = file["episode_1"]
        if broken == "total_steps":
            group.attrs["total_steps"] = 9
        elif broken == "observations":
            group[broken].resize((2, 3))
        else:
            del group[broken]

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [3, 5]
    assert [failure.key for failure in report.failures] == ["episode_1"]
    assert "was not written whole" in report.failures[0].reason


def test_the_folder_its_data_and_the_file_are_one_source(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))

    names = []
    for given in (path, path / "data", main_file(path)):
        source = open_source(given)
        names.append(source.name)
        source.close()

    assert names == [str(main_file(path))] * 3


def test_a_file_alone_is_imported_and_the_report_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    path = write(tmp_path, images(3, plain=True), observation_space=IMAGE)
    shutil.copy(main_file(path), tmp_path / "arm" / "renamed")

    store, report = ingest(tmp_path / "arm" / "renamed")

    assert_as_minari_reads_it(store, path)
    assert "there is no metadata.json, so there is nothing to compare counts with" in report.remarks


def test_metadata_that_was_not_written_whole_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))
    (path / "data" / "metadata.json").write_text('{"total_episodes": 1, "data_fo')

    store, report = ingest(path)

    assert store.num_episodes == 1
    assert [failure.key for failure in report.failures] == ["metadata.json"]


def test_a_recording_killed_before_its_first_episode_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))
    main_file(path).write_bytes(b"")

    with pytest.raises(SourceError, match="no HDF5 file"):
        open_source(path)

    main_file(path).unlink()
    with pytest.raises(SourceError, match=r"has no main_data\.hdf5"):
        open_source(path)


def test_the_episode_of_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))
    with main_file(path).open("r+b") as file:
        file.truncate(5000)

    source = open_source(path)
    assert not list(source.episodes())
    assert [failure.key for failure in source.account.failures] == ["episode_0"]
    source.close()


def test_a_form_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))
    change(path, data_format="lance")

    with pytest.raises(SourceError, match="in the form lance; this reads hdf5, arrow, parquet"):
        open_source(path)


def test_an_episode_says_of_which_bytes_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3))

    store, _ = ingest(path)

    content = main_file(path).read_bytes()
    found = store.episodes[0]["source"]
    assert found["num_bytes"] == len(content)
    assert found["sha256"] == hashlib.sha256(content).hexdigest()


def test_encoded_images_can_be_kept_byte_for_byte(tmp_path: Path) -> None:
    image = spaces.Box(0, 255, (32, 40, 3), np.uint8)
    path = write(tmp_path, buffer(3, image), observation_space=image)

    store, report = ingest(path, keep_encoded=True)

    with h5py.File(main_file(path)) as file:
        frames = [row.tobytes() for row in file["episode_0/observations"][()]]
    back = store.read([0, 1, 2], fields=["observation"])["observation"]
    assert [row.tobytes() for row in back] == frames[:3]
    assert "was kept so" in next(iter(report.remarks))
    assert report.final_observations == 1


def test_another_hdf5_format_under_the_right_name_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.zeros((3, 2))

    with pytest.raises(SourceError, match=r"looked for .*episode_0.*\(minari\)"):
        open_source(tmp_path)
    with pytest.raises(SourceError, match=r"not of Minari; looked for .*found data"):
        open_source(tmp_path, "minari")


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    path = write(tmp_path, *(buffer(length, seed=length) for length in range(1, 8)))
    expstore.ingest_from(path, tmp_path / "whole.exp")

    expstore.ingest_from(path, tmp_path / "parts.exp", episodes=3)
    report = expstore.ingest_from(path / "data", tmp_path / "parts.exp", resume=True)

    whole, parts = (expstore.open(tmp_path / f"{name}.exp") for name in ("whole", "parts"))
    assert (report.episodes_before, report.num_episodes, report.remarks) == (3, 4, {})
    assert [dict(row) for row in whole.episodes] == [dict(row) for row in parts.episodes]
    for number in range(7):
        assert_same(parts.episode(number), whole.episode(number), f"episode {number}")


def test_rewards_of_one_element_become_scalars_and_the_report_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3, rewards=[np.ones(1), np.zeros(1), np.ones(1)]))

    store, report = ingest(path)

    assert store.episode(0)["reward"].tolist() == [1, 0, 1]
    assert report.shape_changes == {"reward": "(1,) to ()"}


def test_a_space_without_elements_is_left_out_and_reported(tmp_path: Path) -> None:
    space = spaces.Dict({"q": BOX, "none": spaces.Box(-1, 1, (0,), np.float32)})

    store, report = ingest(write(tmp_path, buffer(3, space), observation_space=space))

    assert "observation/none" not in store.fields
    assert report.left_out == {"observation/none": "has no elements"}


def test_the_command_imports_and_reports(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), buffer(4, end=None))
    code = "from expstore_cli.main import main; main()"
    run = [sys.executable, "-c", code, "ingest", str(path), str(tmp_path / "a.exp")]
    options = ["--expect-episodes", "2"]

    done = subprocess.run([*run, *options], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "terminations in 1 episode, truncations in 0 episodes" in done.stdout
    assert "no end flag is set, so it is kept as cut (1 episode)" in done.stdout
    assert_as_minari_reads_it(expstore.open(tmp_path / "a.exp"), path)
