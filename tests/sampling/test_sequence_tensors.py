"""Given torch tensors, expand gives back torch tensors on the anchors' device."""

import numpy as np
import pytest

from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence
from expstore.spans import Spans
from tests.sampling.oracle import Selection

torch = pytest.importorskip("torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STORE = Selection(Spans.laid_out(np.array([0, 5]), np.array([5, 5])))


def flags_on(device):
    return torch.tensor([[0], [0], [0], [0], [1], [0], [0], [0], [0], [1]], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_store", [True, False])
def test_all_outputs_are_tensors_on_the_anchors_device(device, on_store):
    storage = STORE if on_store else Ring(flags_on(device), newest=9, is_full=True)
    anchors = torch.tensor([3, 5], dtype=torch.int32, device=device)
    scalar = torch.tensor(1.5)
    given = {
        "tensor": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "array": np.array([1.0, 2.0]),
        "list": [1.0, 2.0],
        "scalar": scalar,
    }

    index, info = Sequence(2).expand(anchors, given, storage)

    assert index.tolist() == [3, 4, 5, 6]
    assert info["scalar"] is scalar
    entries = {key: value for key, value in info.items() if key != "scalar"}
    assert all(value.device == anchors.device for value in entries.values())
    assert {key: value.dtype for key, value in entries.items()} == {
        "index": torch.int64,
        "anchor_index": torch.int32,
        "validity_mask": torch.bool,
        "learning_mask": torch.bool,
        "sequence_id": torch.int64,
        "step_in_sequence": torch.int64,
        "tensor": torch.bfloat16,
        "array": torch.float64,
        "list": torch.float32,
    }
    assert info["list"].tolist() == info["array"].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_flags_may_be_tensors_of_any_dtype(device, dtype):
    ring = Ring(flags_on(device).to(dtype), newest=9, is_full=True)
    index, info = Sequence(3).expand(np.array([3]), {}, ring)
    assert index.tolist() == [3, 4, 4]
    assert isinstance(index, np.ndarray)
    assert info["validity_mask"].tolist() == [True, True, False]


@pytest.mark.parametrize("as_tuple", [True, False])
def test_lanes_come_back_as_a_tuple_of_tensors(as_tuple):
    ring = Ring(torch.zeros(6, 2), newest=1, is_full=True)
    anchors = torch.tensor([[5, 1], [1, 0]])

    index, info = Sequence(2).expand(tuple(anchors.unbind(1)) if as_tuple else anchors, {}, ring)

    assert isinstance(index, tuple)
    assert torch.stack(index, 1).tolist() == [[5, 1], [0, 1], [1, 0], [1, 0]]
    assert info["anchor_index"].tolist() == [[5, 1], [5, 1], [1, 0], [1, 0]]


def test_a_tensor_entry_beside_array_anchors_stays_a_tensor():
    _, info = Sequence(2).expand(np.array([3]), {"weight": torch.tensor([2.0])}, STORE)
    assert torch.equal(info["weight"], torch.tensor([2.0, 2.0]))
    assert isinstance(info["sequence_id"], np.ndarray)


def test_read_only_arrays_are_no_obstacle():
    weight, anchors = np.ones(1), np.array([3])
    weight.flags.writeable = anchors.flags.writeable = False
    ring = Ring(torch.zeros(10), newest=9, is_full=True)
    assert Sequence(2).expand(anchors, {}, ring)[0].tolist() == [3, 4]
    _, info = Sequence(2).expand(torch.tensor([3]), {"weight": weight}, ring)
    assert info["weight"].tolist() == [1.0, 1.0]
