"""Training beside recording: new commits are picked up, evicted steps leave, nothing is torn."""

import gc
import inspect
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import expstore
from expstore.errors import EvictedError
from expstore.loading.batch import Batch
from expstore.storage import files
from tests.loading.making import fill
from tests.loading.recording import CAPACITY_STEPS, recorder

STRIDE = 2**40  # between the steps of the stores of a union
FIELDS = ["observation", "next_observation", "action", "reward", "terminated", "done", "episode"]
SEQUENCE = expstore.Sequence(length=8, burn_in=2)


def check(batch: Batch) -> None:
    """Every row is of the step that the batch says, and every window of one episode."""
    step, valid = batch.info.index % STRIDE, batch.info.validity_mask
    after = torch.where(batch["done"], -step - 1, step + 1)
    assert torch.equal(batch["action"], step)
    assert torch.equal(batch["reward"], step.double() / 2)
    assert torch.equal(batch["terminated"], batch["done"])
    for name, value in (("observation", step), ("next_observation", after)):
        state, image = batch[name]["state"], batch[name]["image"]
        assert torch.equal(state, value[..., None].float().expand_as(state))
        assert torch.equal(image, value[..., None, None].to(torch.uint8).expand_as(image))
    own = batch["episode"].gather(1, valid.int().argmax(1, keepdim=True))
    assert bool(((batch["episode"] == own) | ~valid).all())


def evicted_but_mapped(store: expstore.Store) -> list[str]:
    """Files that hold no live step of the store and that this process still maps."""
    found, listed = [], Path("/proc/self/maps")
    text = listed.read_text() if listed.exists() else ""
    for snapshot in store.snapshots:
        for name, chunk in set(re.findall(rf"{snapshot.path}/(\S+)/c\.(\d+)", text)):
            layout = snapshot.root.arrays[name]
            start, _ = snapshot.root.commit.dims[layout.dimension]
            if (int(chunk) + 1) * layout.chunk_rows <= start:
                found.append(f"{name}/c.{chunk}")
    return found


class Training:
    """A run that gives priorities and checks that what it draws is right and not too old."""

    def __init__(self, store: expstore.Store) -> None:
        self.replay = expstore.Replay(
            store, 32, unit=SEQUENCE, sampler=expstore.Prioritized(), prefetch=2, follow=True,
            fields=FIELDS, seed=1,
        )  # fmt: skip
        self.commits = {str(self.replay.store.identities())}
        self.first_live = deque([{0: 0, 1: 0}] * 3, maxlen=3)  # as each batch ahead was drawn

    def step(self) -> None:
        batch = self.replay.sample()
        check(batch)
        for position, first in self.first_live[0].items():
            own = batch.info.index[batch.info.index // STRIDE == position] % STRIDE
            assert (own >= first).all()
        self.replay.update_priority(batch, (batch.info.index % 7 + 1).float(), region="learning")
        store = self.replay.store
        self.commits.add(str(store.identities()))
        self.first_live.append({k: s.first_step for k, s in enumerate(store.snapshots)})

    @property
    def has_seen_enough(self) -> bool:
        return len(self.commits) > 20 and all(self.first_live[0].values())


def test_ten_seconds_of_training_beside_a_recorder(tmp_path: Path):
    """From one store, and from two as one."""
    paths = [tmp_path / "a.exp", tmp_path / "b.exp"]
    with recorder(*paths) as process:
        trainings = [Training(expstore.open(paths[0])), Training(expstore.open(paths))]
        end = time.monotonic() + 10
        while time.monotonic() < end or not all(t.has_seen_enough for t in trainings):
            assert process.poll() is None
            for training in trainings:
                training.step()
    for training in trainings:
        for _ in range(4):  # what is read ahead is of the newest commit then
            training.step()
        store = training.replay.store
        assert store is store.latest()
        assert store.num_steps <= CAPACITY_STEPS * len(store.paths)
    gc.collect()
    assert [evicted_but_mapped(training.replay.store) for training in trainings] == [[], []]
    assert not any((path / "steps/action/c.0").exists() for path in paths)
    for training in trainings:
        training.replay.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_right_or_are_told_while_stores_evict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    """A worker that has mapped its files reads on; one that comes too late is told so."""
    # torch waits so long (5 s) for workers to end by themselves, which they don't after an error.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    paths, lengths = [tmp_path / "a.exp", tmp_path / "b.exp"], [30] * 10
    for path in paths:
        fill(path, lengths, capacity_steps=300, durable=False)
    union = expstore.open(paths)  # this process maps none of it

    def batches() -> Iterator[Batch]:
        dataset = expstore.SequenceDataset(union, SEQUENCE, fields=FIELDS)
        yield from expstore.sequence_loader(
            dataset, 16, shuffle=True, num_workers=1, multiprocessing_context=method
        )

    num_right = 0
    try:
        for batch in batches() if method == "fork" else ():
            check(batch)
            num_right += 1
            if num_right < 5:
                for path in paths:
                    fill(path, lengths[:4], capacity_steps=300, durable=False)
    except EvictedError as error:  # coded columns are mapped file by file
        assert "latest()" in str(error)
    for path in paths:
        fill(path, lengths * 2, capacity_steps=300, durable=False)
    with pytest.raises(EvictedError, match=r"store\.latest\(\), a Replay with follow=True"):
        next(batches())
    assert num_right > 0 or method == "spawn"
    gc.collect()  # which ends the workers


def test_without_a_new_commit_a_draw_costs_one_look_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, calls = tmp_path / "a.exp", Counter[str]()

    def counted(name: str, function: Any) -> Any:
        @wraps(function)
        def counting(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return counting

    fill(path, [30] * 10, capacity_steps=400, durable=False)
    replay = expstore.Replay(
        expstore.open(path), 32, unit=SEQUENCE, sampler=expstore.Prioritized(), follow=True
    )
    for _ in range(3):
        replay.sample()
    operations = {n: f for n, f in vars(files).items() if inspect.isfunction(f)}
    for name, function in operations.items():
        monkeypatch.setattr(files, name, counted(name, function))
    monkeypatch.setattr(files.Mapping, "place", counted("place", files.Mapping.place))

    for _ in range(20):
        replay.update_priority(replay.sample(), torch.ones(32))
    del calls["crc32c"]  # of what was decoded: no file
    assert calls == {"version": 20}

    fill(path, [30] * 5, capacity_steps=400, durable=False)
    calls.clear()
    replay.sample()
    assert (calls["version"], calls["read"]) == (2, 1)
    assert replay.store.num_steps == 390
