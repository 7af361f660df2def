"""Episodes of a source, appended to a store and accounted for."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SchemaError, SourceError
from expstore.formats import Account, Imported, SourceEpisode
from expstore.formats.lazy_rows import LazyRows
from expstore.formats.source import NOTHING
from expstore.ingest import pieces


def episode(length: int, *, final: bool = True) -> dict[str, Any]:
    return {
        "observation": np.arange(2.0 * (length + final)).reshape(-1, 2),
        "action": np.arange(length, dtype=np.int32),
        "reward": np.ones(length),
    }


class Listed:
    """A source that is a list of episodes."""

    boundary_rule = "as listed"
    num_steps = None

    def __init__(self, *datas: dict[str, Any], name: str = "listed") -> None:
        self.datas, self.name, self.account = datas, name, Account()
        self.is_closed = False

    @property
    def num_episodes(self) -> int:
        return len(self.datas)

    def describe(self) -> str:
        return f"a list of {len(self.datas)}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for key, data in enumerate(self.datas):
            if key not in imported.keys:
                yield SourceEpisode(key, data)

    def close(self) -> None:
        self.is_closed = True


def test_episodes_arrive_as_the_source_has_them(tmp_path: Path) -> None:
    source = Listed(episode(3), episode(5))

    report = expstore.ingest_from(source, tmp_path / "a.exp")

    store = expstore.open(tmp_path / "a.exp")
    for number, data in enumerate(source.datas):
        back = store.episode(number)
        assert back.keys() == data.keys()
        for name, values in data.items():
            assert back[name].dtype == values.dtype
            np.testing.assert_array_equal(back[name], values)
    assert source.is_closed
    assert report.num_episodes == report.store_episodes == report.source_episodes == 2
    assert report.num_steps == report.store_steps == 8
    assert report.num_bytes == sum(v.nbytes for data in source.datas for v in data.values())
    assert report.boundary_rule == "as listed"
    assert report.description == "a list of 2"
    assert report.end_reasons == {"cut": 2}
    assert (report.commit, report.is_interrupted, report.failures) == (1, False, ())


def test_each_episode_remembers_where_it_came_from(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1), episode(1)), tmp_path / "a.exp")

    row = expstore.open(tmp_path / "a.exp").episodes[1]
    assert row["source"]["name"] == "listed"
    assert row["source"]["episode"] == 1
    assert row["source"]["importer"].startswith("expstore ")


def test_final_observations_are_counted(tmp_path: Path) -> None:
    given_as_next = {
        **episode(2, final=False),
        "next_observation": np.zeros((2, 2)),
    }
    source = Listed(episode(2), episode(2, final=False), given_as_next)

    report = expstore.ingest_from(source, tmp_path / "a.exp")

    assert report.final_observations == 2
    assert report.num_episodes == 3


@pytest.mark.parametrize(
    "empty", [episode(0), episode(0, final=False), {"action": [], "observation": [[0.0, 0.0]]}]
)
def test_an_episode_without_steps_is_skipped_and_counted(
    tmp_path: Path, empty: dict[str, Any]
) -> None:
    report = expstore.ingest_from(Listed(empty, episode(2)), tmp_path / "a.exp")

    assert report.skipped_episodes == {"no steps in it": 1}
    assert report.num_episodes == 1
    assert report.failures == ()


def test_an_episode_that_does_not_fit_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    torn = {**episode(3), "reward": np.ones(2)}
    other = {**episode(3), "action": np.zeros(3)}
    flagged = {**episode(3), "terminated": np.zeros(3, bool)}

    report = expstore.ingest_from(
        Listed(torn, episode(1), other, flagged, episode(2)), tmp_path / "a.exp"
    )

    assert report.num_episodes == 2
    assert [failure.key for failure in report.failures] == ["0", "2", "3"]
    texts = [failure.reason for failure in report.failures]
    assert "field 'reward' must have 3 rows here, got 2" in texts[0]
    assert "field 'action' must have dtype int32, got float64" in texts[1]
    assert "field 'terminated'" in texts[2]


def test_a_source_that_does_not_fit_the_store_at_all_is_an_error(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp")
    other = {**episode(3), "action": np.zeros(3)}

    with pytest.raises(SchemaError, match="field 'action' must have dtype int32, got float64"):
        expstore.ingest_from(Listed(other, episode(1), name="other"), tmp_path / "a.exp")

    assert expstore.open(tmp_path / "a.exp").num_episodes == 1


def test_casts_are_allowed_by_name_and_counted(tmp_path: Path) -> None:
    other = {**episode(3), "action": np.zeros(3, np.int8)}

    report = expstore.ingest_from(Listed(episode(1), other), tmp_path / "a.exp", cast=True)

    assert report.casts == {"action": 3}
    assert report.num_episodes == 2


def test_a_source_is_not_imported_twice_by_mistake(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1), episode(2)), tmp_path / "a.exp")

    with pytest.raises(SourceError, match=r"has 2 episodes of listed already; .*--resume"):
        expstore.ingest_from(Listed(episode(1), episode(2)), tmp_path / "a.exp")

    assert expstore.open(tmp_path / "a.exp").num_episodes == 2


def test_resume_appends_what_the_store_lacks(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1), episode(2)), tmp_path / "a.exp")

    report = expstore.ingest_from(
        Listed(episode(1), episode(2), episode(3)), tmp_path / "a.exp", resume=True
    )

    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [1, 2, 3]
    assert (report.episodes_before, report.num_episodes, report.source_episodes) == (2, 1, 3)


def test_resume_imports_a_file_that_was_mended(tmp_path: Path) -> None:
    torn = {**episode(2), "reward": np.ones(1)}
    expstore.ingest_from(Listed(episode(1), torn, episode(3)), tmp_path / "a.exp")

    report = expstore.ingest_from(
        Listed(episode(1), episode(2), episode(3)), tmp_path / "a.exp", resume=True
    )

    assert report.num_episodes == 1
    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [1, 3, 2]


def test_resume_of_a_whole_source_changes_nothing(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp")

    report = expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp", resume=True)

    assert (report.num_episodes, report.commit, report.end_reasons) == (0, 1, {})


def test_another_source_is_appended(tmp_path: Path) -> None:
    expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp")

    report = expstore.ingest_from(Listed(episode(2), name="second"), tmp_path / "a.exp")

    assert (report.episodes_before, report.store_episodes, report.commit) == (0, 2, 2)
    assert report.end_reasons == {"cut": 1}


def test_a_number_of_episodes_counts_those_of_before(tmp_path: Path) -> None:
    datas = [episode(n + 1) for n in range(5)]
    expstore.ingest_from(Listed(*datas), tmp_path / "a.exp", episodes=2)

    report = expstore.ingest_from(Listed(*datas), tmp_path / "a.exp", episodes=3, resume=True)

    assert (report.num_episodes, report.source_episodes) == (1, 3)


def test_a_range_of_episodes_counts_from_the_beginning_of_the_source(tmp_path: Path) -> None:
    datas = [episode(n + 1) for n in range(6)]

    expstore.ingest_from(Listed(*datas), tmp_path / "a.exp", episodes=slice(2, 4))
    more = expstore.ingest_from(
        Listed(*datas), tmp_path / "a.exp", episodes=slice(1, 5), resume=True
    )

    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [3, 4, 2, 5]
    assert more.num_episodes == 2


def test_an_episode_that_does_not_fit_has_its_place_in_a_range(tmp_path: Path) -> None:
    torn = {**episode(3), "reward": np.ones(2)}

    report = expstore.ingest_from(
        Listed(episode(1), torn, episode(3), episode(4)), tmp_path / "a.exp", episodes=slice(1, 3)
    )

    assert [failure.key for failure in report.failures] == ["1"]
    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [3]


@pytest.mark.parametrize("wrong", [-1, slice(3, 1), slice(0, 4, 2), slice(-2, None)])
def test_a_range_that_is_none_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(SourceError, match="--episodes"):
        expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp", episodes=wrong)


def test_fields_are_renamed_and_left_out(tmp_path: Path) -> None:
    data = {
        "state": {"arm": np.zeros((3, 2)), "hand": np.ones((3, 1))},
        "action": np.arange(2),
        "next_goal": np.ones(2),
        "goal": np.zeros(2),
        "debug": {"a": np.zeros(2), "b": np.zeros(2)},
    }

    report = expstore.ingest_from(
        Listed(data),
        tmp_path / "a.exp",
        map={"state": "observation", "goal": "target"},
        drop=["debug"],
    )

    store = expstore.open(tmp_path / "a.exp")
    assert set(store.fields) == {"observation/arm", "observation/hand", "action", "target"}
    np.testing.assert_array_equal(store.episode(0)["observation"]["hand"], np.ones((3, 1)))
    assert store.read(np.arange(2), ["next_target"])["next_target"].tolist() == [1.0, 1.0]
    assert report.left_out == {"debug": "as asked for"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"drop": ["rewards"]}, "--drop rewards: .* it has observation, action, reward"),
        ({"map": {"obs": "observation"}}, "--map obs: the source has no field of that name"),
        ({"map": {"action": "reward"}}, "--map gives the name reward to two fields"),
        ({"map": {"action": "a"}, "drop": ["action"]}, "must give a field that is kept another"),
        ({"map": {"action": "action"}}, "must give a field that is kept another name"),
    ],
)
def test_names_that_are_none_are_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(SourceError, match=text):
        expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp", **options)


def test_progress_knows_how_much_is_left(tmp_path: Path) -> None:
    seen = []

    expstore.ingest_from(
        Listed(*[episode(4)] * 3), tmp_path / "a.exp", episodes=2, progress=seen.append
    )

    assert [(p.num_episodes, p.num_steps, p.remaining_episodes) for p in seen] == [
        (1, 4, 2),
        (2, 8, 2),
    ]
    assert seen[0].num_bytes == sum(values.nbytes for values in episode(4).values())


class Interrupting(Listed):
    """Ctrl-C while the third episode is read."""

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for given in super().episodes(imported):
            if given.key == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield given


def test_ctrl_c_keeps_every_whole_episode(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            expstore.ingest_from(Interrupting(*[episode(1)] * 5), tmp_path / "a.exp")
    finally:
        signal.signal(signal.SIGINT, before)

    report = caught.value.report  # type: ignore[attr-defined]
    assert report.is_interrupted
    assert report.num_episodes == expstore.open(tmp_path / "a.exp").num_episodes == 2


class Presses(expstore.Writer):
    """Ctrl-C inside of an append and of every commit."""

    def append(self, *args: Any, **kwargs: Any) -> int:
        number = super().append(*args, **kwargs)
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return number

    def commit(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return super().commit()


def test_ctrl_c_in_the_middle_of_writing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expstore.ingesting.Writer", Presses)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            expstore.ingest_from(Listed(*[episode(1)] * 5), tmp_path / "a.exp")
    finally:
        signal.signal(signal.SIGINT, before)

    assert expstore.open(tmp_path / "a.exp").num_episodes == 3
    assert expstore.verify(tmp_path / "a.exp").is_sound


class Long(Listed):
    """Episodes of which the observation is read piece by piece; the second one is damaged."""

    asked: list[tuple[int, int]]

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        self.asked = []
        for given in super().episodes(imported):
            observation = given.data["observation"]

            def read(start: int, stop: int, rows: Any = observation, key: Any = given.key) -> Any:
                self.asked.append((start, stop))
                if key == 1 and start > 2:
                    raise SourceError("the frame is damaged")
                return rows[start:stop]

            lazy = LazyRows(len(observation), 16, read)
            yield SourceEpisode(given.key, {**given.data, "observation": lazy})


@pytest.mark.parametrize("final", [True, False])
def test_a_long_episode_is_written_piece_by_piece_and_equals_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, final: bool
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 40 * 3)
    datas = [{**episode(n, final=final), "text": ["ab"] * n} for n in (9, 11, 1)]
    flags = [{"terminated": np.arange(n) == n - 1, "truncated": np.zeros(n, bool)} for n in (9, 1)]
    datas[0] |= flags[0]
    datas[1] |= {"terminated": np.zeros(11, bool), "truncated": np.zeros(11, bool)}
    datas[2] |= flags[1]

    source = Long(*datas)
    report = expstore.ingest_from(source, tmp_path / "a.exp")
    whole = expstore.ingest_from(Listed(datas[0], datas[2]), tmp_path / "b.exp")

    assert max(stop - start for start, stop in source.asked) == 3
    assert [(f.key, f.reason) for f in report.failures] == [("1", "the frame is damaged")]
    assert report.num_bytes == whole.num_bytes
    assert report.final_observations == whole.final_observations == 2 * final
    assert report.end_reasons == {"terminated": 2}
    one, other = (expstore.open(tmp_path / name) for name in ("a.exp", "b.exp"))
    for number in range(2):
        for name, values in other.episode(number).items():
            assert list(map(np.ndarray.tolist, map(np.asarray, one.episode(number)[name]))) == list(
                map(np.ndarray.tolist, map(np.asarray, values))
            )
    assert expstore.verify(tmp_path / "a.exp").is_sound


class Failing(Listed):
    """A source whose end cannot be read."""

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        yield from super().episodes(imported)
        raise SourceError("the rest is gone")


def test_an_error_of_the_source_keeps_the_episodes_before_it(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the rest is gone") as caught:
        expstore.ingest_from(Failing(episode(1), episode(2)), tmp_path / "a.exp")

    assert expstore.open(tmp_path / "a.exp").num_episodes == 2
    assert caught.value.__notes__ == [
        f"2 whole episodes were kept in {tmp_path / 'a.exp'}; continue after them with --resume "
        "(resume=True)"
    ]


@pytest.mark.parametrize("option", ["steps", "seed", "policy"])
def test_options_of_recordings_are_refused_elsewhere(tmp_path: Path, option: str) -> None:
    with pytest.raises(SourceError, match=rf"--{option} \({option}=\) is for gym:ENV_ID"):
        expstore.ingest_from(tmp_path, tmp_path / "a.exp", **{option: 1})  # type: ignore[arg-type]


def test_a_source_that_cannot_be_opened_leaves_no_store(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        expstore.ingest_from(tmp_path / "nowhere", tmp_path / "a.exp")

    assert not (tmp_path / "a.exp").exists()


def test_metadata_of_the_name_that_ingest_uses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "a.npz", **episode(1), source="elsewhere")

    report = expstore.ingest_from(tmp_path / "in", tmp_path / "a.exp")

    assert [(f.key, f.reason) for f in report.failures] == [
        ("a.npz", "metadata 'source' is written by ingest; rename it")
    ]


def test_a_folder_of_files_is_imported(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        np.savez(tmp_path / "in" / f"{number}.npz", **episode(number), seed=number)

    report = expstore.ingest_from(tmp_path / "in", tmp_path / "a.exp")

    store = expstore.open(tmp_path / "a.exp")
    assert store.episodes["length"].tolist() == [1, 2]
    assert store.episodes["seed"].tolist() == [1, 2]
    assert store.episodes[0]["source"]["episode"] == "1.npz"
    assert report.skipped_episodes == {"no steps in it": 1}


def test_what_a_killed_writer_lost_is_reported(tmp_path: Path) -> None:
    writer = expstore.Writer(tmp_path / "a.exp", commit_interval_s=1000, lock=False)
    writer.append(episode(2))
    # As a kill would leave it: appended, never committed.

    report = expstore.ingest_from(Listed(episode(1)), tmp_path / "a.exp")

    assert report.lost_episodes == 1
    writer.discard()
