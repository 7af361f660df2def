"""The examples of offline learning run, at small size."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")

import expstore  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def pendulum() -> Iterator[ModuleType]:
    """The module that the examples share; nothing of them stays."""
    before, threads = dict(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    yield loaded("pendulum")
    torch.set_num_threads(threads)
    for name in ("pendulum", "td3_bc", "decision_transformer", "world_model"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Short episodes of the pendulum's shapes, which need no environment."""
    rng, path = np.random.default_rng(0), tmp_path / "pendulum.exp"
    with expstore.Writer(path) as writer:
        for _ in range(3):
            flags = {name: np.zeros(30, bool) for name in ("terminated", "truncated")}
            flags["truncated"][-1] = True
            observation = rng.normal(size=(31, 3)).astype(np.float32)
            action = rng.uniform(-2, 2, (30, 1)).astype(np.float32)
            writer.append(
                {"observation": observation, "action": action, "reward": -rng.random(30), **flags}
            )
    return path


def test_td3_bc_learns(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td3_bc = loaded("td3_bc")
    monkeypatch.setattr(td3_bc.pendulum, "mean_return", lambda act, episodes: act([1, 0, 0])[0])

    curve = td3_bc.train(str(store), steps=4, every=2)

    assert [step for step, _ in curve] == [0, 2, 4]
    assert all(abs(action) <= 2 for _, action in curve)
    assert len({float(action) for _, action in curve}) == 3


def test_a_decision_transformer_learns(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = loaded("decision_transformer")
    monkeypatch.setattr(transformer, "WIDTH", 8)
    seen = []

    def judged(model, mean, std, target, seed):  # type: ignore[no-untyped-def]
        seen.append((seed, target))
        return float((model.head[1].weight.detach() @ torch.arange(1.0, 9.0)).item())

    monkeypatch.setattr(transformer, "episode_return", judged)

    curve = transformer.train(str(store), steps=2, every=1, episodes=2)

    assert [step for step, _ in curve] == [0, 1, 2]
    assert len({value for _, value in curve}) == 3
    assert [seed for seed, _ in seen] == [1000, 1001] * 3


def test_what_comes_later_does_not_change_an_action() -> None:
    transformer = loaded("decision_transformer")
    torch.manual_seed(0)
    model = transformer.DecisionTransformer(3, 1, 2.0).eval()
    to_go, states, actions = torch.randn(1, 5), torch.randn(1, 5, 3), torch.randn(1, 5, 1)
    before = model(to_go, states, actions, torch.arange(5)[None])

    states[:, 3:], actions[:, 2:], to_go[:, 3:] = 9.0, 9.0, 9.0

    after = model(to_go, states, actions, torch.arange(5)[None])
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


def test_a_world_model_learns_across_resets(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "frames.exp"
    with expstore.Writer(path) as writer:
        for length in (9, 14, 30):
            writer.append(
                {
                    "observation": rng.integers(0, 255, (length + 1, 40, 40, 3), np.uint8),
                    "action": rng.integers(0, 4, length),
                    "reward": rng.random(length),
                }
            )

    curve = loaded("world_model").train(str(path), steps=2, every=1)

    assert [step for step, _ in curve] == [1, 2]
    assert all(np.isfinite(loss) for _, loss in curve)
