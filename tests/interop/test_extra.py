"""Without torchrl or tensordict the error says what to install."""

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

from expstore.errors import MissingExtraError  # noqa: E402
from expstore.loading.batch import Batch, Info  # noqa: E402


def test_without_torchrl_the_module_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "expstore.interop.torchrl", raising=False)
    monkeypatch.setitem(sys.modules, "torchrl.data.replay_buffers.checkpointers", None)

    with pytest.raises(MissingExtraError, match=r"needs torchrl.*'expstore\[torchrl\]'"):
        importlib.import_module("expstore.interop.torchrl")


def test_without_tensordict_a_batch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)

    with pytest.raises(MissingExtraError, match=r"needs tensordict.*'expstore\[torchrl\]'"):
        Batch({"action": torch.zeros(2)}, Info()).to_tensordict()
