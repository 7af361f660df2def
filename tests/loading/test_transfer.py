"""The way to a device, with a stand-in for streams that copies as late as it may."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import SchemaError  # noqa: E402
from expstore.loading import replay as replay_module  # noqa: E402
from tests.loading.making import fill  # noqa: E402

FIELDS = ("observation", "action", "next_observation", "reward")
UNIT = expstore.Sequence(length=4, burn_in=1)


class Event:
    """Happens when it is made to, after all before it in its queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_happened = False


class LateStreams:
    """Copies only when somebody waits, so that memory written too early gives wrong batches."""

    is_pinned = False

    def __init__(self) -> None:
        self.waiting: list[tuple[Event, Any]] = []
        self.handed_out: dict[int, Event | None] = {}  # device memory -> when it was let go of
        self.copied: list[tuple[Event, int]] = []
        self.kept: list[torch.Tensor] = []
        self.lock = threading.Lock()

    def copy(self, source: Any, target: Any, after: Any) -> Any:
        if target is not None:
            released = self.handed_out.get(target.data_ptr())
            assert released is not None, "device memory is written while the caller has it"
            assert after is released
            del self.handed_out[target.data_ptr()]
        new = torch.full_like(source, 7) if target is None else target
        event = Event("copy")
        with self.lock:
            self.waiting.append((event, lambda: new.copy_(source)))
            self.copied.append((event, new.data_ptr()))
        return new, event

    def settle(self, event: Event) -> None:
        with self.lock:
            while not event.has_happened:
                first, work = self.waiting.pop(0)
                work()
                first.has_happened = True

    def wait(self, event: Event) -> None:
        while self.copied:  # what was copied up to here is the caller's
            first, memory = self.copied.pop(0)
            self.handed_out[memory] = None
            if first is event:
                return

    def compute(self, work: Any) -> None:
        """What the caller has its device do, after all that it was told before."""
        with self.lock:
            self.waiting.append((Event("compute"), work))

    def finish(self) -> None:
        while self.waiting:
            self.settle(self.waiting[-1][0])

    def mark(self) -> Event:
        event = Event("release")
        for memory, released in list(self.handed_out.items()):
            if released is None:
                self.handed_out[memory] = event
        return event

    def keep(self, tensor: Any) -> None:
        self.kept.append(tensor)


@pytest.fixture
def store(tmp_path: Path) -> expstore.Store:
    return fill(tmp_path / "a.exp", [9, 5, 30, 1, 12], durable=False)


def expected(store: expstore.Store, num: int, **options: Any) -> list[dict[str, Any]]:
    replay = expstore.Replay(store, 5, fields=FIELDS, seed=3, **options)
    return [dict(replay.sample().fields) for _ in range(num)]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("unit", [UNIT, expstore.Stack(3, fields=("observation/state",))])
def test_no_slot_is_written_before_its_event(store, monkeypatch, prefetch, reuse, unit):
    wanted = expected(store, 12, unit=unit)
    streams = LateStreams()
    monkeypatch.setattr(replay_module, "streams_of", lambda device: streams)
    seen: list[dict[str, Any]] = []
    kept = []
    with expstore.Replay(
        store, 5, unit=unit, fields=FIELDS, seed=3, prefetch=prefetch, reuse=reuse
    ) as replay:
        for _ in wanted:
            batch = replay.sample()
            fields = dict(batch.fields)
            streams.compute(lambda f=fields: seen.append({n: t.clone() for n, t in f.items()}))
            kept.append(batch)
    streams.finish()
    for batch, got, fields in zip(kept, seen, wanted, strict=True):
        assert list(got) == list(fields)
        assert batch.info.index.shape == batch.info.validity_mask.shape
        for name, tensor in fields.items():
            assert torch.equal(got[name], tensor), name
            assert reuse or torch.equal(batch.fields[name], tensor), name
    assert reuse or len(streams.kept) >= len(wanted)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reused_batch_lives_until_the_next_one(store, prefetch):
    wanted = expected(store, 10, unit=UNIT)
    replay = expstore.Replay(
        store, 5, unit=UNIT, fields=FIELDS, seed=3, prefetch=prefetch, reuse=True
    )
    places = set()
    for fields in wanted:
        batch = replay.sample()
        assert all(torch.equal(batch.fields[n], t) for n, t in fields.items())
        places.add(batch["reward"].data_ptr())
    assert len(places) == prefetch + 1
    replay.close()


def test_a_state_with_reuse_continues_with_the_batch_that_was_next(store):
    wanted = expected(store, 8, unit=UNIT)
    options: dict[str, Any] = {"unit": UNIT, "fields": FIELDS, "prefetch": 2, "reuse": True}
    with expstore.Replay(store, 5, seed=3, **options) as first:
        for _ in range(3):
            first.sample()
        state = first.state_dict()
    with expstore.Replay(store, 5, seed=9, **options) as second:
        second.sample()
        second.load_state_dict(state)
        for fields in wanted[3:]:
            batch = second.sample()
            assert all(torch.equal(batch.fields[n], t) for n, t in fields.items())


def reading_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("expstore-re")}


@pytest.mark.parametrize("way", ["close", "garbage"])
def test_a_replay_takes_its_threads_with_it(store, way):
    before = reading_threads()
    replay = expstore.Replay(store, 5, unit=UNIT, prefetch=2, num_threads=2)
    replay.sample()
    replay._reader.gather.threads.run([lambda: time.sleep(0.001)] * 4)
    started = reading_threads() - before
    assert {thread.name.rsplit("_", 1)[0] for thread in started} == {
        "expstore-replay",
        "expstore-read",
    }
    if way == "close":
        replay.close()
    else:
        died = weakref.ref(replay)
        for _, reading in replay._ahead:
            reading.result()
        del replay, reading, _
        gc.collect()
        assert died() is None
    for thread in started:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_an_error_in_the_thread_comes_with_its_traceback(store, monkeypatch):
    replay = expstore.Replay(store, 5, unit=UNIT, prefetch=1)

    def broken_read(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(replay._reader.gather, "read", broken_read)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        replay.sample()
    assert "broken_read" in "".join(traceback.format_exception(caught.value))
    monkeypatch.undo()
    first = replay.sample()  # it was not delivered, so it is still the next
    assert torch.equal(first["reward"], expected_first(store))
    replay.close()


def expected_first(store: expstore.Store) -> Any:
    return expstore.Replay(store, 5, unit=UNIT).sample()["reward"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_once(store):
    with pytest.raises(SchemaError, match=r"device 'cuda' needs CUDA.*give device=\"cpu\""):
        expstore.Replay(store, 5, device="cuda")
    with pytest.raises(SchemaError, match="none that torch knows"):
        expstore.Replay(store, 5, device="gpu")


def test_one_field_may_be_given_by_its_name(store):
    replay = expstore.Replay(store, 5, fields="observation")
    assert list(replay.sample().fields) == ["observation/state", "observation/image"]


def test_a_replay_says_what_it_is(store):
    replay = expstore.Replay(store, 5, unit=UNIT, prefetch=1, fields="reward", seed=4)
    text = repr(replay)
    assert text.startswith("Replay(Store(")
    for part in ("57 steps", "batch_size=5", "burn_in=1", "fields=['reward']", "seed=4"):
        assert part in text
    replay.close()


@pytest.mark.gpu
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_on_a_gpu_are_those_on_the_cpu(store, prefetch, reuse):
    wanted = expected(store, 20, unit=UNIT)
    with expstore.Replay(
        store, 5, unit=UNIT, fields=FIELDS, seed=3, prefetch=prefetch, reuse=reuse, device="cuda"
    ) as replay:
        for fields in wanted:
            batch = replay.sample()
            assert batch["reward"].is_cuda and batch.info.index.is_cuda
            for name, tensor in fields.items():
                assert torch.equal(batch.fields[name].cpu(), tensor), name


def test_info_on_a_device_is_made_when_it_is_asked_for(store, monkeypatch):
    streams = LateStreams()
    monkeypatch.setattr(replay_module, "streams_of", lambda device: streams)
    info = expstore.Replay(store, 5, unit=UNIT, seed=3).sample().info
    plain = expstore.Replay(store, 5, unit=UNIT, seed=3)
    monkeypatch.undo()
    assert torch.equal(info.anchor_index, plain.sample().info.anchor_index)
    assert info.step_in_sequence.tolist() == np.tile(np.arange(5), (5, 1)).tolist()
