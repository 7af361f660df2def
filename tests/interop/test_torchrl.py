"""A store under TorchRL's own replay buffers gives the records that ours gives."""

import json
import multiprocessing
import warnings

import numpy as np
import pytest

import expstore
from expstore.errors import (
    FieldNotFoundError,
    ReadOnlyError,
    SchemaError,
    StateError,
    StepRangeError,
)

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrl's, about its compiled part and about torch
    pytest.importorskip("torchrl", reason="torchrl is not installed", exc_type=ImportError)
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data import (
        ImmutableDatasetWriter,
        ReplayBuffer,
        TensorDictReplayBuffer,
    )
    from torchrl.data import Sequence as Reference
    from torchrl.data.replay_buffers.samplers import (
        RandomSampler,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
    )

from expstore.interop.columns import Columns  # noqa: E402
from expstore.interop.torchrl import ExperienceStorage  # noqa: E402
from tests.loading.making import fill  # noqa: E402

LENGTHS = [7, 1, 12, 3, 5, 2, 9]
FIELDS = ("observation", "action", "reward", "terminated", "done", "has_next")

MASKS = ("validity_mask", "learning_mask", "sequence_id", "step_in_sequence")
DESCRIBED = {"index", "anchor_index", *MASKS}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same rule for a store, an evicted one, a view, a union and a view of a union."""
    folder = tmp_path_factory.mktemp("stores")
    whole = fill(folder / "whole.exp", LENGTHS)
    evicted = fill(folder / "evicted.exp", LENGTHS * 3, capacity_steps=60, commit_interval_s=0)
    assert evicted.spans.start[0] > 0
    union = expstore.open([folder / "whole.exp", folder / "evicted.exp"])
    return {
        "store": whole,
        "evicted": evicted,
        "view": whole.filter([0, 2, 3, 6]),
        "union": union,
        "view of a union": union.filter(lambda row: row["length"] != 3),
    }


def assert_same_records(sample, store, steps):
    """Every tensor of a flat sample is what the store has at these steps, byte for byte."""
    next_fields = store.read(steps, ["next_observation"])["next_observation"]
    rows = store.read(steps, FIELDS)
    expected = {
        ("observation", "state"): rows["observation"]["state"],
        ("observation", "image"): rows["observation"]["image"],
        ("next", "observation", "state"): next_fields["state"],
        ("next", "observation", "image"): next_fields["image"],
        "action": rows["action"],
        ("next", "reward"): rows["reward"][:, None],
        ("next", "done"): rows["done"][:, None],
        ("next", "terminated"): rows["terminated"][:, None],
        ("next", "truncated"): (rows["done"] & ~rows["terminated"])[:, None],
        ("next", "has_next"): rows["has_next"][:, None],
        **{flag: np.zeros((len(steps), 1), bool) for flag in ("done", "terminated", "truncated")},
    }
    assert sample.batch_size == (len(steps),)
    assert {*sample.keys(include_nested=True, leaves_only=True)} - DESCRIBED == {*expected}
    for key, values in expected.items():
        found = sample[key].numpy()
        assert (found.dtype, found.shape) == (values.dtype, values.shape), key
        assert found.tobytes() == values.tobytes(), key


UNITS = [
    {"length": 5},
    {"length": 4, "burn_in": 3, "bootstrap": 2},
    {"length": 4, "episode_boundary": "stop"},
    {"length": 3, "episode_boundary": "stop", "burn_in": 2, "bootstrap": 1, "dilation": 2},
    {"length": 2, "dilation": 3, "done_key": ("next", "terminated")},
]
ALONG = [
    {"length": 6, "episode_boundary": "include_reset", "burn_in": 2},
    {"length": 6, "done_key": None, "bootstrap": 1},
]


@pytest.mark.parametrize("kind", ["store", "evicted", "view", "union", "view of a union"])
@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_windows_of_torchrl_are_ours(stores, kind, unit):
    assert_same_windows(stores[kind], unit)


@pytest.mark.parametrize("kind", ["store", "evicted", "view"])
@pytest.mark.parametrize("unit", ALONG, ids=str)
def test_windows_that_ignore_episodes_are_ours_and_stop_at_the_seam(stores, kind, unit):
    assert_same_windows(stores[kind], unit)


def assert_same_windows(store, unit):
    storage = ExperienceStorage(store)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=RandomSampler(),
        sample_unit=Reference(**unit),
        batch_size=60,
        generator=torch.Generator().manual_seed(3),
    )
    unit = {k: "terminated" if v == ("next", "terminated") else v for k, v in unit.items()}
    ours = expstore.Sequence(**unit)

    sample = buffer.sample()

    anchors = storage.steps_at(sample["anchor_index"].view(60, -1)[:, 0])
    steps, info = ours.expand(anchors, {}, store)
    assert_same_records(sample, store, steps.numpy())
    assert torch.equal(storage.steps_at(sample["index"]), steps)
    for name in MASKS:
        assert torch.equal(sample[name], info[name]), name
    assert not info["validity_mask"].all()  # else nothing was tried


def test_no_window_runs_from_the_last_row_into_the_first(tmp_path):
    with expstore.Writer(tmp_path / "s.exp") as writer:
        for ends in (True, False):
            terminated = np.array([False, False, ends])
            writer.append({"action": np.zeros(3), "terminated": terminated})
    storage = ExperienceStorage(expstore.open(tmp_path / "s.exp"))
    unit = Reference(length=3, burn_in=1, done_key=("next", "terminated"))

    index, info = unit.expand(torch.tensor([4, 0]), {}, storage)

    assert index.tolist() == [3, 4, 5, 5, 0, 0, 1, 2]
    assert info["validity_mask"].tolist() == [True] * 3 + [False, False] + [True] * 3


def test_every_last_and_first_row_is_an_anchor_once(stores):
    store = stores["store"]
    buffer = ReplayBuffer(
        storage=ExperienceStorage(store),
        sampler=SamplerWithoutReplacement(),
        sample_unit=Reference(length=3),
        batch_size=13,
    )

    anchors = [buffer.sample(return_info=True)[1]["anchor_index"][::3] for _ in range(3)]

    assert sorted(torch.cat(anchors).tolist()) == list(range(store.num_steps))


@pytest.mark.parametrize(
    "options", [{}, {"end_key": ("next", "terminated")}, {"traj_key": "episode"}], ids=str
)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_are_runs_of_one_episode(stores, kind, options):
    # Without replacement, torchrl raises where every episode that it drew is too short.
    store = stores["union"].filter(lambda row: row["length"] >= 5)
    fields = (*FIELDS, "next_observation", "episode")
    storage = ExperienceStorage(store, fields)
    sampler = kind(slice_len=5, strict_length=True, **options)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=15)

    sample = buffer.sample()

    index = sample["index"][:, 0]  # torchrl gives one coordinate
    steps = storage.steps_at(index).numpy()
    slices = steps.reshape(-1, 5)  # without replacement, a batch may be short
    assert (np.diff(slices, axis=1) == 1).all()
    episodes = store.read(slices, ["episode"])["episode"]
    assert (episodes == episodes[:, :1]).all()
    assert np.array_equal(sample["episode"], episodes.ravel())
    assert sample["next", "done"].view(-1, 5)[:, -1].all()
    for flag in ("done", "truncated"):  # the sampler marks where it cut
        sample["next", flag] = storage[index]["next", flag]
    assert_same_records(sample.exclude("episode"), store, steps)


def test_finding_slices_reads_end_flags_and_no_column(stores, monkeypatch):
    storage = ExperienceStorage(stores["store"])
    sampler = SliceSampler(slice_len=5)
    read = []
    rows = ExperienceStorage._rows
    monkeypatch.setattr(
        ExperienceStorage,
        "_rows",
        lambda self, at, gather: read.append(at.size) or rows(self, at, gather),
    )

    TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=10).sample()

    assert read == [1, 10, 10]  # the keys of a row, then torchrl reads its batch twice
    Reference(length=4).expand(torch.tensor([1, 2]), {}, storage)
    assert len(read) == 3


def test_two_threads_ahead_give_whole_records(stores):
    store = stores["union"]
    storage = ExperienceStorage(store)
    buffer = TensorDictReplayBuffer(
        storage=storage, sample_unit=Reference(length=4), batch_size=8, prefetch=2
    )

    samples = [buffer.sample() for _ in range(40)]  # kept: no buffer may be filled anew

    for sample in samples:
        assert_same_records(sample, store, storage.steps_at(sample["index"]).numpy())


def sample_there(buffer, pipe):
    pipe.send(buffer.sample()["index"].tolist())
    pipe.send([len(buffer), buffer.storage.state_dict()])


def test_a_buffer_goes_to_a_spawned_process(stores):
    storage = ExperienceStorage(stores["view"], ["action"])
    buffer = TensorDictReplayBuffer(
        storage=storage, sample_unit=Reference(length=4), batch_size=8, shared=True
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sample_there, args=(buffer, there))

    process.start()
    there.close()
    index, (length, state) = here.recv(), here.recv()
    process.join()

    assert len(index) == 32
    assert max(index) < length == stores["view"].num_steps
    assert state == storage.state_dict()


# -- rows and columns ----------------------------------------------------------------------------


def test_rows_are_chosen_as_in_a_tensor(stores):
    store = stores["view"]
    storage = ExperienceStorage(store, ["action"])
    action = torch.from_numpy(store.read(store.spans.steps_at(np.arange(len(store))))["action"])

    for index in [3, -1, slice(2, 20, 3), slice(-3, None), [4, 4, -2], np.array([1, 0])]:
        found = storage[index]
        assert torch.equal(found["action"], action[index]), index
        assert found.batch_size == action[index].shape
    mask = torch.arange(len(store)) % 5 == 0
    for index in [torch.tensor([[1, 2], [-1, 0]]), mask, (torch.tensor([5, 6]),)]:
        assert torch.equal(storage[index]["action"], action[index])
    assert storage[[]].batch_size == (0,)
    assert (len(storage), storage.shape, storage.ndim) == (len(store), (len(store),), 1)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        ([0, 31], StepRangeError, "rows must be from 0 to 30, got 31"),
        (torch.tensor([-32]), StepRangeError, "rows must be from 0 to 30, got -32"),
        (1.5, SchemaError, "chosen by integers, or a mask .N,., got float64"),
        ((1, 2), SchemaError, "one dimension, got 2 coordinates"),
        ("image", FieldNotFoundError, r"no \('image',\); it has \('action',\), \('next', 'done'"),
        (("next", "observation"), FieldNotFoundError, "storage has no"),
        ("done", FieldNotFoundError, r"never true; the ends are at \('next', 'done'\)"),
    ],
)
def test_a_row_or_column_that_is_not_there_is_an_error(stores, index, error, text):
    storage = ExperienceStorage(stores["view"], ["action"])
    assert len(storage) == 31

    with pytest.raises(error, match=text):
        storage.get(index)


def test_an_unknown_done_key_is_a_key_error(stores):
    unit = Reference(length=2, done_key=("next", "life_lost"))
    buffer = ReplayBuffer(
        storage=ExperienceStorage(stores["store"]), sample_unit=unit, batch_size=2
    )

    with pytest.raises(KeyError, match="life_lost"):
        buffer.sample()


@pytest.mark.parametrize("kind", ["evicted", "union"])
def test_the_whole_storage_is_columns(stores, kind, monkeypatch):
    monkeypatch.setattr("expstore.interop.torchrl.BLOCK_STEPS", 16)
    store = stores[kind]
    storage = ExperienceStorage(store)
    buffer = ReplayBuffer(storage=storage, batch_size=2)

    columns = buffer[:]

    assert isinstance(columns, Columns)
    steps = store.spans.steps_at(np.arange(len(store)))
    assert_same_records(columns.to_tensordict(), store, steps)
    whole = columns.to_tensordict()
    assert set(columns.keys()) == set(whole.keys())
    assert columns.shape == columns.batch_size == whole.batch_size
    for key in whole.keys(include_nested=True):
        if key in ("done", "terminated", "truncated"):
            continue
        same = columns[key] == whole[key]
        assert same.all() if is_tensor_collection(same) else torch.all(same), key
        assert key in columns
    assert columns.get("nothing", 7) == 7
    assert torch.equal(columns[2:5]["action"], whole["action"][2:5])
    assert [row["action"].item() for row in columns] == whole["action"].tolist()


def test_shapes_and_dtypes_are_as_recorded(tmp_path):
    with expstore.Writer(tmp_path / "s.exp") as writer:
        for length in (3, 2):
            writer.append(
                {
                    "observation": np.zeros((length + 1, 2), np.float16),
                    "action": np.zeros((length, 4), np.int8),
                    "reward": np.ones((length, 1), np.float32),
                    "truncated": np.arange(length) == length - 1,
                    "info/speed": np.arange(length, dtype=np.float64),
                    "points": [np.full((t, 2), t, np.float32) for t in range(length)],
                }
            )
    storage = ExperienceStorage(expstore.open(tmp_path / "s.exp"))

    rows = storage[[4, 2]]

    assert rows["observation"].dtype == torch.float16
    assert (rows["action"].dtype, rows["action"].shape) == (torch.int8, (2, 4))
    assert rows["next", "reward"].shape == (2, 1)
    assert rows["info", "speed"].tolist() == [1.0, 2.0]
    assert rows["points", "length"].tolist() == [1, 2]
    assert rows["points", "values"].tolist() == [[[1, 1], [0, 0]], [[2, 2], [2, 2]]]
    assert rows["next", "truncated"].tolist() == [[True], [True]]
    assert rows["next", "terminated"].tolist() == [[False], [False]]
    assert storage.get(("points", "length")).tolist() == [0, 1, 2, 0, 1]
    assert storage.get("points")["values"].shape == (5, 2, 2)
    assert str(rows.device) == "cpu"  # without one TorchRL pins nothing


def test_flags_that_were_not_recorded_come_from_the_end_reasons(tmp_path):
    with expstore.Writer(tmp_path / "s.exp") as writer:
        for reason in ("terminated", "truncated", "cut"):
            writer.append({"observation": np.zeros(3), "action": np.zeros(2)}, end_reason=reason)
    storage = ExperienceStorage(expstore.open(tmp_path / "s.exp").filter([0, 2]), "action")

    for rows in (storage[[0, 1, 2, 3]], storage[:]):
        assert rows["next", "done"].squeeze().tolist() == [False, True, False, True]
        assert rows["next", "terminated"].squeeze().tolist() == [False, True, False, False]
        assert rows["next", "truncated"].squeeze().tolist() == [False, False, False, True]
    assert set(storage[:].keys()) == {"action", "next", "done", "terminated", "truncated"}


def test_a_missing_next_observation_is_marked(tmp_path):
    with expstore.Writer(tmp_path / "s.exp") as writer:
        writer.append({"observation": np.ones(2), "reward": np.ones(2)})
        writer.append({"observation": np.ones(3), "reward": np.ones(2)})
    rows = ExperienceStorage(expstore.open(tmp_path / "s.exp"))[[0, 1, 2, 3]]

    assert rows["next", "has_next"].squeeze().tolist() == [True, False, True, True]
    assert rows["next", "observation"].tolist() == [1, 0, 1, 1]


def test_fields_are_checked_when_the_storage_is_made(stores):
    with pytest.raises(FieldNotFoundError, match="no field 'rewards'"):
        ExperienceStorage(stores["store"], ["rewards"])
    with pytest.raises(SchemaError, match=r"'reward' and 'next_reward' both belong at \('next', "):
        ExperienceStorage(stores["store"], ["reward", "next_reward"])
    with pytest.raises(SchemaError, match=r"must be what expstore.open returned, got str"):
        ExperienceStorage("whole.exp")


def test_an_empty_store_is_refused_by_the_sampler(tmp_path):
    with expstore.Writer(tmp_path / "s.exp"):
        pass
    storage = ExperienceStorage(expstore.open(tmp_path / "s.exp"))

    assert (len(storage), storage.get(("next", "done")).shape) == (0, (0, 1))
    with pytest.raises(RuntimeError, match="empty"):
        ReplayBuffer(storage=storage, batch_size=2).sample()


# -- nothing is written --------------------------------------------------------------------------

WRITES = {
    "add": lambda buffer, row: buffer.add(row[0]),
    "extend": lambda buffer, row: buffer.extend(row),
    "rows": lambda buffer, row: buffer.__setitem__(slice(0, 1), row),
    "a column": lambda buffer, row: buffer.__setitem__("action", row["action"]),
    "set_": lambda buffer, row: buffer.set_("action", row["action"]),
    "set_at_": lambda buffer, row: buffer.set_at_("action", row["action"], 0),
    "update_": lambda buffer, row: buffer.update_({"action": 0}),
    "empty": lambda buffer, row: buffer.empty(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_and_changes_nothing(stores, write):
    storage = ExperienceStorage(stores["store"], ["action"])
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    row = TensorDict({"action": torch.tensor([99])}, [1])

    with pytest.raises(ReadOnlyError, match=r"whole.exp is read-only.*append whole episodes"):
        WRITES[write](buffer, row)

    assert len(buffer) == sum(LENGTHS)
    assert buffer[:]["action"].tolist() == list(range(sum(LENGTHS)))
    assert buffer.sample().batch_size == (4,)


def test_a_sample_is_the_callers_to_change(stores):
    storage = ExperienceStorage(stores["store"])

    for key in ("action", ("next", "done")):
        before = storage[:][key]
        storage[[3]][key].zero_()
        storage[:][key].zero_()
        assert before.any()
        assert torch.equal(storage[:][key], before)
        assert torch.equal(storage[[3]][key], before[[3]])


# -- saved with the buffer -----------------------------------------------------------------------


def buffer_on(store, seed):
    return TensorDictReplayBuffer(
        storage=ExperienceStorage(store),
        sampler=SamplerWithoutReplacement(),
        writer=ImmutableDatasetWriter(),
        batch_size=6,
        generator=torch.Generator().manual_seed(seed),
    )


def test_a_buffer_that_was_saved_goes_on_with_the_next_batch(stores, tmp_path):
    buffer = buffer_on(stores["view"], seed=1)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    state = json.loads((tmp_path / "saved/storage/expstore.json").read_text())
    held = buffer.state_dict()
    following = [buffer.sample()["index"].tolist() for _ in range(3)]

    dumped, stated = buffer_on(stores["view"], seed=2), buffer_on(stores["view"], seed=3)
    dumped.loads(tmp_path / "saved")
    stated.load_state_dict(held)

    assert state == held["_storage"]
    assert [dumped.sample()["index"].tolist() for _ in range(3)] == following
    assert [stated.sample()["index"].tolist() for _ in range(3)] == following


@pytest.mark.parametrize(
    ("kind", "text"),
    [("evicted", "belongs to store"), ("view", "another view"), ("union", "belongs to 1 stores")],
)
def test_a_state_of_other_steps_is_refused(stores, tmp_path, kind, text):
    buffer_on(stores["store"], seed=1).dumps(tmp_path / "saved")

    with pytest.raises(StateError, match=text):
        buffer_on(stores[kind], seed=1).loads(tmp_path / "saved")


def test_a_state_of_another_commit_or_storage_is_refused(tmp_path):
    storage = ExperienceStorage(fill(tmp_path / "s.exp", [3]))
    grown = ExperienceStorage(fill(tmp_path / "s.exp", [4]))

    with pytest.raises(StateError, match=r"at commit 1 .* this is commit 2"):
        grown.load_state_dict(storage.state_dict())
    with pytest.raises(StateError, match="a state must have version, stores"):
        grown.load_state_dict({"_storage": {}, "initialized": True, "_len": 3})
    with pytest.raises(StateError, match=r"expstore.json cannot be read: .*No such file"):
        grown.loads(tmp_path / "nothing")
