"""The configuration, the registry and the types."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from expstore.buffer import (
    BUFFERS,
    BatchedData,
    BufferConfig,
    DataBuffer,
    EnvRet,
    MainConfig,
    PolicyResponse,
    Registry,
    ReplayBuffer,
    SamplerConfig,
    StorageConfig,
    build_data_buffer,
    load_modules_from_config,
)
from expstore.errors import SchemaError

WHOLE = {
    "type": "RolloutBuffer",
    "capacity": 10,
    "sampler": {"type": "batch", "seed": 3},
    "auto_truncate_episode": True,
    "storage": {"mode": "fixed", "unit": "episode", "device": "cpu", "path": "b.exp"},
}


def test_a_configuration_is_made_of_a_dict_of_yaml_or_by_hand(tmp_path: Path) -> None:
    by_hand = BufferConfig(
        "RolloutBuffer",
        10,
        SamplerConfig("batch", seed=3),
        True,
        StorageConfig("fixed", unit="episode", path="b.exp"),
    )
    (tmp_path / "b.yaml").write_text(BufferConfig.from_dict(WHOLE).to_yaml())

    assert BufferConfig.from_dict(WHOLE) == by_hand
    assert BufferConfig.load_yaml(tmp_path / "b.yaml") == by_hand
    assert BufferConfig.from_dict(by_hand.to_dict()) == by_hand
    assert by_hand["capacity"] == by_hand.get("capacity") == 10
    assert by_hand.get("nothing", 3) == 3


def test_the_defaults() -> None:
    config = BufferConfig("ReplayBuffer", 5)

    assert config.sampler is None
    assert not config.auto_truncate_episode
    storage = config.storage
    assert (storage.mode, storage.type, storage.unit, storage.device, storage.path) == (
        "circular", "unified", "transition", "cpu", None,
    )  # fmt: skip


def test_any_object_with_the_attributes_will_do(tmp_path: Path) -> None:
    given = SimpleNamespace(type="ReplayBuffer", capacity=5, sampler=SimpleNamespace(type="all"))
    buffer = build_data_buffer("ReplayBuffer", given)  # type: ignore[arg-type]

    assert buffer.config == BufferConfig("ReplayBuffer", 5, SamplerConfig("all"))


def test_unknown_keys_are_kept_and_misspelt_ones_refused() -> None:
    config = BufferConfig.from_dict({"type": "X", "capacity": 1, "my_own": 3})

    assert config["my_own"] == config.my_own == config.get("my_own") == 3
    assert config.to_dict()["my_own"] == 3
    with pytest.raises(ValueError, match="no 'capcity'; did you mean 'capacity'"):
        BufferConfig.from_dict({"type": "X", "capacity": 1, "capcity": 1})
    with pytest.raises(AttributeError, match="no 'nothing'"):
        _ = config.nothing


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"capacity": 1.5}, "capacity must be an integer, got 1.5"),
        ({"capacity": True}, "capacity must be an integer, got True"),
        ({"type": 3}, "type must be a registered name"),
        ({"sampler": {"type": "wrong"}}, "sampler.type must be one of uniform, all"),
        ({"sampler": {}}, "SamplerConfig needs 'type'"),
        ({"storage": {"mode": "ring"}}, "storage.mode must be one of circular, fixed"),
        ({"storage": {"unit": "step"}}, "storage.unit must be one of"),
        ({"storage": {"device": "tpu"}}, "storage.device must be one of"),
        ({"storage": {"type": "sharded"}}, "a path of its own"),
        ({"storage": 3}, "StorageConfig must be given as such"),
    ],
)
def test_values_that_cannot_be_are_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BufferConfig.from_dict({**WHOLE, **change})
    with pytest.raises(SchemaError, match="needs 'capacity'"):
        BufferConfig.from_dict({"type": "X"})


def test_the_path_comes_from_keyword_or_configuration(tmp_path: Path) -> None:
    config = {**WHOLE, "storage": {"path": str(tmp_path / "a.exp")}}
    with build_data_buffer("RolloutBuffer", config) as buffer:
        buffer.init()
        assert buffer.path == tmp_path / "a.exp"
    with build_data_buffer("RolloutBuffer", config, path=tmp_path / "b.exp") as buffer:
        buffer.init()
        assert buffer.path == tmp_path / "b.exp"
    assert config["storage"] == {"path": str(tmp_path / "a.exp")}  # the caller's is not changed


def test_modules_are_imported_before_the_buffer_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BUFFERS, "_classes", dict(BUFFERS._classes))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_module.py").write_text(
        "from expstore.buffer import BUFFERS, ReplayBuffer\n"
        "@BUFFERS.register('Own')\nclass Own(ReplayBuffer): ...\n"
    )
    main = MainConfig.from_dict(
        {"imports": ["own_module"], "buffer": {"type": "Own", "capacity": 3}}
    )

    assert main.buffer is not None
    assert type(build_data_buffer(main.buffer.type, main.buffer)).__name__ == "Own"
    load_modules_from_config(SimpleNamespace(imports=None))
    with pytest.raises(ImportError):
        load_modules_from_config({"imports": ["no_such_module"]})


def test_the_registry_is_closed_to_duplicates() -> None:
    registry = Registry("things")

    @registry.register()
    class One: ...

    assert registry.get("One") is One
    with pytest.raises(KeyError, match="'One' is registered in things already"):

        @registry.register("One")
        class Two: ...

    with pytest.raises(KeyError, match="'Three' is not registered in things, which has 'One'"):
        registry.get("Three")
    with pytest.raises(KeyError, match="import the module"):
        build_data_buffer("Nothing", WHOLE)
    assert BUFFERS.get("ReplayBuffer") is ReplayBuffer
    assert issubclass(ReplayBuffer, DataBuffer)


# -- types ---------------------------------------------------------------------------------------


def test_an_env_ret_is_a_reset_by_default() -> None:
    before = time.time_ns()
    returned = EnvRet("a", [1.0])

    assert EnvRet.fields() == [
        "observation", "last_reward", "last_terminated", "last_truncated", "info",
    ]  # fmt: skip
    assert returned.to_dict() == {
        "observation": [1.0], "last_reward": 0.0, "last_terminated": False,
        "last_truncated": False, "info": {},
    }  # fmt: skip
    assert returned.ts_env_sent_ns >= before
    assert hash(returned) == hash("a")
    assert EnvRet("a", 0).info is not returned.info


def test_conversions_copy_env_rets_and_change_policy_responses() -> None:
    returned = EnvRet("a", {"x": torch.ones(2)}, info={"y": torch.ones(1)})
    converted = returned.numpy()
    assert isinstance(converted.observation["x"], np.ndarray)
    assert isinstance(converted.info["y"], np.ndarray)
    assert isinstance(returned.observation["x"], torch.Tensor)
    assert isinstance(returned.cpu().observation["x"], torch.Tensor)

    answer = PolicyResponse("a", action=torch.ones(2))
    assert answer.numpy() is answer
    assert isinstance(answer.action, np.ndarray)
    assert answer.compute_sent_latency() > 0


def test_batched_data_keeps_order_and_duplicates() -> None:
    batch = BatchedData(["b", "a", "b"], [1, 2, 3])

    assert batch.ids == ("b", "a", "b")
    assert batch["b"] == 1
    assert list(batch) == batch.items() == [("b", 1), ("a", 2), ("b", 3)]
    assert len(batch) == 3
    with pytest.raises(KeyError):
        batch["c"]
    with pytest.raises(ValueError, match="2 ids for 1 entries"):
        BatchedData(["a", "b"], [1])
