"""A batch as a TensorDict, laid out as TorchRL's environments and buffers do."""

import numpy as np
import pytest

import expstore
from expstore.errors import SchemaError

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict", exc_type=ImportError)

from expstore.loading.batch import Batch, Info  # noqa: E402
from expstore.loading.tensordicts import keys_of  # noqa: E402
from tests.loading.making import fill  # noqa: E402

FIELDS = ("observation", "action", "reward", "terminated", "done", "next_observation")
INFO = {
    "index": "index",
    "anchor_index": "anchor_index",
    "validity_mask": "validity_mask",
    "learning_mask": "learning_mask",
    "sequence_id": "sequence_id",
    "step_in_sequence": "step_in_sequence",
    "weight": "priority_weight",
}
PLACES = {
    "observation/state": ("observation", "state"),
    "observation/image": ("observation", "image"),
    "next_observation/state": ("next", "observation", "state"),
    "next_observation/image": ("next", "observation", "image"),
    "action": "action",
    "reward": ("next", "reward"),
    "terminated": ("next", "terminated"),
    "done": ("next", "done"),
}


@pytest.mark.parametrize("unit", [expstore.Sequence(length=3, burn_in=1), expstore.Step()])
def test_a_batch_is_laid_out_as_a_sample_of_torchrl(tmp_path, unit):
    store = fill(tmp_path / "s.exp", [5, 2, 9])
    batch = expstore.Replay(store, 6, unit=unit, fields=FIELDS).sample()

    found = batch.to_tensordict()

    shape = (6,) if isinstance(unit, expstore.Step) else (6, 4)
    assert found.batch_size == shape
    assert {*found.keys(include_nested=True, leaves_only=True)} == {
        *PLACES.values(),
        *INFO.values(),
        "terminated",
        "done",
    }
    for name, key in PLACES.items():
        value, expected = found[key], batch.fields[name]
        assert value.data_ptr() == expected.data_ptr(), name  # no copy
        has_one = name in ("reward", "terminated", "done")
        assert value.shape == ((*shape, 1) if has_one else expected.shape)
    for name, key in INFO.items():
        assert torch.equal(found[key], batch.info[name])
    assert not found["done"].any()
    assert found["done"].shape == (*shape, 1)
    assert str(found.device) == "cpu"


def test_windows_flatten_to_what_a_buffer_of_torchrl_gives(tmp_path):
    store = fill(tmp_path / "s.exp", [5, 2, 9])
    unit = expstore.Sequence(length=3)
    batch = expstore.Replay(store, 6, unit=unit, fields=["action"]).sample()

    flat = batch.to_tensordict().reshape(-1)

    steps, info = unit.expand(batch.info.anchor_index[:, 0], {}, store)
    assert np.array_equal(flat["action"], store.read(steps, ["action"])["action"])
    assert torch.equal(flat["validity_mask"], info["validity_mask"])


def test_a_flag_of_several_numbers_keeps_its_shape():
    fields = {"terminated": torch.ones(4, 2, dtype=torch.bool), "reward": torch.ones(4, 1)}

    found = Batch(fields, Info()).to_tensordict()

    assert found["next", "terminated"].shape == found["terminated"].shape == (4, 2)
    assert found["next", "reward"].shape == (4, 1)


def test_two_tensors_for_one_place_are_an_error():
    with pytest.raises(SchemaError, match=r"field 'index' and info 'index' both belong at the"):
        Batch({"index": torch.zeros(2)}, Info({"index": torch.zeros(2)})).to_tensordict()
    with pytest.raises(SchemaError, match=r"'reward' and 'next_reward' both belong"):
        keys_of(["reward", "next_reward"])
