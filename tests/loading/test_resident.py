"""Resident fields: other places, the same batches."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import CapacityError, SchemaError  # noqa: E402
from expstore.loading import resident  # noqa: E402
from tests.loading.making import fill  # noqa: E402

FIELDS = ("reward", "observation", "action", "next_observation", "terminated", "episode")
UNITS = [expstore.Step(), expstore.Sequence(length=4, burn_in=1)]


@pytest.fixture
def store(tmp_path) -> expstore.Store:
    return fill(tmp_path / "a.exp", [9, 5, 30, 1, 12], durable=False)


def assert_same_batches(one: expstore.Replay, other: expstore.Replay) -> None:
    for _ in range(4):
        batch, wanted = one.sample(), other.sample()
        assert list(batch.fields) == list(wanted.fields)
        for name, tensor in wanted.fields.items():
            assert batch.fields[name].dtype == tensor.dtype
            assert torch.equal(batch.fields[name], tensor), name
        assert torch.equal(batch.info.index, wanted.info.index)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "where", ["device", "pinned", {"observation": "device", "reward": "pinned"}]
)
def test_the_batches_are_the_same(store, monkeypatch, unit, where):
    monkeypatch.setattr(resident, "BLOCK_BYTES", 9000)  # several blocks
    options: dict[str, Any] = {"unit": unit, "fields": FIELDS, "seed": 3}
    with expstore.Replay(store, 6, resident=where, prefetch=1, **options) as replay:
        assert_same_batches(replay, expstore.Replay(store, 6, **options))


def test_a_view_holds_its_own_steps_only(store):
    view = store.filter([1, 2, 4])
    replay = expstore.Replay(view, 6, resident="device", fields=FIELDS)
    assert len(replay._resident._rows["reward"]) == view.num_steps
    assert_same_batches(replay, expstore.Replay(view, 6, fields=FIELDS))


def test_a_state_resumes(store):
    first = expstore.Replay(store, 6, resident="device", prefetch=2, seed=8)
    first.sample()
    second = expstore.Replay(store, 6)
    second.load_state_dict(first.state_dict())
    assert_same_batches(first, second)
    first.close()


def test_what_cannot_be_resident_is_refused(store, monkeypatch):
    with pytest.raises(SchemaError, match='"device" or "pinned", got \'gpu\''):
        expstore.Replay(store, 6, resident="gpu")
    with pytest.raises(SchemaError, match="not among the batch's fields"):
        expstore.Replay(store, 6, fields="reward", resident={"action": "device"})
    with pytest.raises(SchemaError, match="leave follow="):
        expstore.Replay(store, 6, resident="device", follow=True)
    with pytest.raises(SchemaError, match=r"take Step\(\) or Sequence"):
        expstore.Replay(store, 6, resident="device", unit=expstore.Stack(2))
    monkeypatch.setattr(resident, "_free_on_host", lambda: 1000)
    with pytest.raises(CapacityError, match=r"need \d+ bytes on the host, 1000 are free"):
        expstore.Replay(store, 6, resident="device")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["device", "pinned"])
def test_a_gpu_holds_the_rows(store, where):
    replay = expstore.Replay(store, 6, fields=FIELDS, resident=where, device="cuda")
    plain = expstore.Replay(store, 6, fields=FIELDS)
    for _ in range(5):
        batch, wanted = replay.sample(), plain.sample()
        for name, tensor in wanted.fields.items():
            assert batch.fields[name].is_cuda and torch.equal(batch.fields[name].cpu(), tensor)
