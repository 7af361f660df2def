"""Fresh random rings give the windows that the installed torchrl gives."""

import warnings

import numpy as np
import pytest

from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrl's, about its compiled part and about torch
    pytest.importorskip("torchrl", reason="torchrl is not installed", exc_type=ImportError)
    tensordict = pytest.importorskip("tensordict", exc_type=ImportError)
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data import Sequence as Reference

ENTRIES = ("anchor_index", "validity_mask", "learning_mask", "sequence_id", "step_in_sequence")


def arguments(rng):
    return {
        "length": int(rng.integers(1, 9)),
        "episode_boundary": str(rng.choice(["pad", "stop", "include_reset"])),
        "done_key": [("next", "done"), "done", None][rng.integers(3)],
        "burn_in": int(rng.integers(0, 5)),
        "bootstrap": int(rng.integers(0, 4)),
        "dilation": int(rng.integers(1, 4)),
    }


def written_buffer(rng, num_rows, lanes):
    """A torchrl ring after a few writes, and the number of rows written."""
    size = num_rows * int(np.prod(lanes))
    buffer = ReplayBuffer(storage=LazyTensorStorage(size, ndim=1 + len(lanes)), batch_size=1)
    total = 0
    for _ in range(rng.integers(1, 6)):
        count = int(rng.integers(1, num_rows + 1))
        done = torch.tensor(rng.random((count, *lanes, 1)) < rng.choice([0.05, 0.3]))
        data = {"done": done, "next": {"done": done.clone()}}
        rows = tensordict.TensorDict(data, [count, *lanes])
        buffer.extend(rows.transpose(0, len(lanes)) if lanes else rows)  # it wants time last
        total += count
    return buffer, total


@pytest.mark.parametrize("lanes", [(), (2,), (2, 3)])
@pytest.mark.parametrize("seed", range(60))
def test_a_ring_gives_the_windows_of_torchrl(seed, lanes):
    rng = np.random.default_rng([seed, *lanes])
    num_rows = int(rng.integers(1, 16))
    options = arguments(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer, total = written_buffer(rng, num_rows, lanes)
        num_live = min(total, num_rows)
        anchors = tuple(torch.tensor(rng.integers(0, size, 5)) for size in (num_live, *lanes))
        index = anchors if lanes else anchors[0]
        info = {"weight": torch.arange(5.0), "number": 2}
        expected_index, expected = Reference(**options).expand(index, info, buffer.storage)
        stored = buffer.storage[:]
    flags = torch.ones((num_rows, *lanes, 1), dtype=torch.bool)
    flags[:num_live] = stored["done"][:num_live]
    ring = Ring(flags, newest=(total - 1) % num_rows, is_full=total >= num_rows)

    found_index, found = Sequence(**options).expand(index, info, ring)

    if lanes:
        assert len(found_index) == len(expected_index)
        found_index, expected_index = torch.stack(found_index), torch.stack(expected_index)
    assert torch.equal(found_index, expected_index)
    for key in (*ENTRIES, "weight"):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key]), key
    assert found["number"] is expected["number"]


@pytest.mark.parametrize(
    "bad",
    [
        {"length": 0},
        {"length": -4},
        {"length": 1, "episode_boundary": "wrap"},
        {"length": 1, "burn_in": -1},
        {"length": 1, "bootstrap": -1},
        {"length": 1, "dilation": 0},
        {"length": 0, "dilation": 0, "burn_in": -1},
    ],
)
def test_a_bad_argument_gets_the_text_of_torchrl(bad):
    with pytest.raises(ValueError) as expected:
        Reference(**bad)
    with pytest.raises(ValueError) as found:
        Sequence(**bad)
    assert str(found.value) == str(expected.value)
