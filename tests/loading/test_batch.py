"""A batch is a nested mapping of tensors with their description beside it."""

import pytest

torch = pytest.importorskip("torch")

from expstore.errors import FieldNotFoundError  # noqa: E402
from expstore.loading.batch import Batch, Info  # noqa: E402


def batch() -> Batch:
    fields = {"observation/image": torch.zeros(2, 3, 4), "observation/state": torch.ones(2, 3)}
    return Batch({**fields, "action": torch.arange(2)}, Info({"index": torch.arange(6)}))


def test_nested_fields_are_read_by_parts_and_by_path():
    assert batch()["observation"]["image"].shape == (2, 3, 4)
    assert batch()["observation/image"].shape == (2, 3, 4)
    assert list(batch()) == ["observation", "action"]
    assert list(batch()["observation"]) == ["image", "state"]


def test_an_unknown_field_is_named_with_those_that_exist():
    with pytest.raises(FieldNotFoundError, match=r"no field 'obs'.*'observation/image'"):
        batch()["obs"]


def test_info_is_read_as_entries_and_as_attributes():
    assert batch().info.index is not None
    assert batch().info["index"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(AttributeError, match="no info 'weight'; it has index"):
        _ = batch().info.weight


def test_a_batch_moves_as_a_whole():
    moved = batch().to("cpu")
    assert moved.batch_size == 2
    assert {name: tensor.shape for name, tensor in moved.fields.items()} == {
        name: tensor.shape for name, tensor in batch().fields.items()
    }
