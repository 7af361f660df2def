"""Episodes that a function ran on before they were appended: by a Writer, and by an import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import PostprocessError, SchemaError, SourceError, WriterStateError
from expstore.ingest.postprocess import DiscountedReturn, GeneralizedAdvantage
from expstore.storage.postprocessing import FinishedEpisode


def episode(num_steps: int = 4, *, terminated: bool = False) -> dict[str, Any]:
    flag = np.zeros(num_steps, bool)
    flag[-1] = terminated
    return {
        "observation": {"state": np.arange(num_steps + 1.0)},
        "action": np.zeros(num_steps, np.int64),
        "reward": np.ones(num_steps),
        "terminated": flag,
        "value": np.full(num_steps + 1, 0.5),
    }


def test_a_writer_stores_what_the_function_made(tmp_path: Path) -> None:
    function = GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0)
    with expstore.Writer(tmp_path / "a.exp", postprocess=function) as writer:
        writer.append(episode(2), seed=3, policy="ppo")
        writer.append(episode(3, terminated=True))

    store = expstore.open(tmp_path / "a.exp")
    assert store.episode(0)["returns"].tolist() == [2.5, 1.5]
    assert store.episode(1)["returns"].tolist() == [3.0, 2.0, 1.0]
    assert store.episode(1)["value"].shape == (3,)
    row = store.episodes[0]
    assert (row["seed"], row["policy"], row["end_reason"]) == (3, "ppo", "cut")
    name = "GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0, value='value')"
    assert row["postprocess"].startswith(f"expstore.ingest.postprocess:{name}#")


def test_a_function_may_change_what_it_is_given_and_drop_fields(tmp_path: Path) -> None:
    def halved(episode: FinishedEpisode) -> dict[str, Any]:
        episode["reward"] /= 2
        episode["observation"]["state"][:] = 7
        episode.metadata["halved"] = True
        return {key: episode[key] for key in ("observation", "reward")}

    given = episode(terminated=True)
    with expstore.Writer(tmp_path / "a.exp", postprocess=halved) as writer:
        writer.append(given)

    store = expstore.open(tmp_path / "a.exp")
    assert sorted(store.fields) == ["observation/state", "reward"]
    assert store.episode(0)["reward"].tolist() == [0.5] * 4
    assert given["reward"].tolist() == [1.0] * 4  # the caller's own
    assert given["observation"]["state"][0] == 0
    assert store.episodes[0]["halved"] is True
    assert store.episodes[0]["end_reason"] == "terminated"  # though its flag was dropped


def test_texts_tensors_and_lists_reach_the_function(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    seen: dict[str, Any] = {}

    def look(episode: FinishedEpisode) -> dict[str, Any]:
        seen.update(episode)
        return episode

    with expstore.Writer(tmp_path / "a.exp", postprocess=look) as writer:
        writer.append(
            {
                "task": ["lift", "place"],
                "latent": torch.ones(2, 3, dtype=torch.bfloat16),
                "action": torch.ones(2),
                "reward": [1.0, 2.0],
            }
        )
    assert seen["task"] == ["lift", "place"] and seen["latent"].dtype == torch.bfloat16
    assert isinstance(seen["action"], np.ndarray) and isinstance(seen["reward"], np.ndarray)
    store = expstore.open(tmp_path / "a.exp")
    assert store.fields["latent"].dtype == "bfloat16"
    assert list(store.episode(0)["task"]) == ["lift", "place"]


def fails(episode: FinishedEpisode) -> dict[str, Any]:
    if len(episode["reward"]) == 3:
        raise ZeroDivisionError("three")
    return episode


def returns_rubbish(episode: FinishedEpisode) -> Any:
    return 5


def adds_short_column(episode: FinishedEpisode) -> dict[str, Any]:
    return {"observation": episode["observation"], "reward": episode["reward"][:1], "x": [1, 2]}


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fails, PostprocessError, r"postprocess .*:fails#\w+ failed in episode 1: ZeroDiv.*three"),
        (returns_rubbish, PostprocessError, "must return the fields, got int"),
        (adds_short_column, SchemaError, "in episode 1, as postprocess .*:adds_short_column"),
        (GeneralizedAdvantage(value="q"), PostprocessError, "in episode 1: .* a field 'q'"),
    ],
)
def test_a_failure_names_function_and_episode_and_writes_nothing(
    tmp_path: Path, function: Any, error: type[Exception], message: str
) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({**episode(), "value": np.zeros(4)})
    with expstore.Writer(tmp_path / "a.exp", postprocess=function) as writer:
        with pytest.raises(error, match=message):
            writer.append(episode(3))
        assert writer.num_episodes == 1

    with expstore.Writer(tmp_path / "b.exp", postprocess=fails) as writer:
        writer.append({**episode(2), "value": np.zeros(2)})
        with pytest.raises(PostprocessError):
            writer.append({**episode(3), "value": np.zeros(3)})
        writer.append({**episode(4), "value": np.zeros(4)})  # it goes on
    assert expstore.open(tmp_path / "b.exp").episodes["length"].tolist() == [2, 4]


def test_what_cannot_be_postprocessed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="postprocess must be a function"):
        expstore.Writer(tmp_path / "a.exp", postprocess="gae")  # type: ignore[arg-type]
    assert not (tmp_path / "a.exp").exists()
    with expstore.Writer(tmp_path / "a.exp", postprocess=DiscountedReturn()) as writer:
        with pytest.raises(WriterStateError, match="needs the whole episode: append it in one"):
            writer.episode()
        with pytest.raises(SchemaError, match=r"metadata 'postprocess' in episode 0 .* rename"):
            writer.append({"reward": np.ones(2)}, postprocess="mine")
        with pytest.raises(SchemaError, match="must have one row per step"):
            writer.append({"reward": 1.0})
        with pytest.raises(SchemaError, match="true at step 0"):
            writer.append({"reward": np.ones(2), "terminated": [True, False]})
        assert writer.num_episodes == 0


def folder(path: Path, *lengths: int) -> Path:
    path.mkdir()
    for number, length in enumerate(lengths):
        np.savez(path / f"ep{number}.npz", reward=np.ones(length), value=np.zeros(length + 1))
    return path


def test_an_import_runs_it_on_each_episode_and_says_so(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", 2, 3)
    report = expstore.ingest_from(
        source, tmp_path / "a.exp", postprocess="gae:gamma=0.5,lambda=1", episodes=1
    )

    store = expstore.open(tmp_path / "a.exp")
    assert store.episode(0)["returns"].tolist() == [1.5, 1.0]
    assert report.postprocess == store.episodes[0]["postprocess"]
    assert "GeneralizedAdvantage(gamma=0.5, gae_lambda=1.0" in report.postprocess

    same = expstore.ingest_from(
        source, tmp_path / "a.exp", postprocess="gae:gamma=0.5,lambda=1", resume=True
    )
    assert same.num_episodes == 1
    for other in ("gae:gamma=0.6,lambda=1", None):
        with pytest.raises(SourceError, match=r"with postprocess .*gamma=0.5.* give the same one"):
            expstore.ingest_from(source, tmp_path / "a.exp", postprocess=other, resume=True)


def test_an_import_names_the_episodes_that_it_failed_on(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", 2, 3, 4)
    short = {"reward": np.ones(3), "value": np.zeros(3)}
    np.savez(source / "ep1.npz", **short)
    report = expstore.ingest_from(source, tmp_path / "a.exp", postprocess="gae")

    assert (report.num_episodes, [f.key for f in report.failures]) == (2, ["ep1.npz"])
    assert "'value' must have 4 rows, got 3" in report.failures[0].reason

    np.savez(source / "ep0.npz", **short)
    with pytest.raises(PostprocessError, match=r"in episode ep0.npz: .*must have 4 rows"):
        expstore.ingest_from(source, tmp_path / "b.exp", postprocess="gae")
    with pytest.raises(SourceError, match="no parameter 'x'"):
        expstore.ingest_from(source, tmp_path / "c.exp", postprocess="gae:x=1")
    assert not os.path.exists(tmp_path / "c.exp")


def test_recorded_episodes_of_an_environment_are_postprocessed(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    report = expstore.ingest_from(
        "gym:CartPole-v1", tmp_path / "a.exp", episodes=2, postprocess="n_step:n=3,gamma=1"
    )
    store = expstore.open(tmp_path / "a.exp")
    first = store.episode(0)
    assert first["n_step_return"][0] == 3 and first["n_step_return"][-1] == 1
    np.testing.assert_array_equal(first["n_step_observation"][0], first["observation"][3])
    assert report.final_observations == 2
