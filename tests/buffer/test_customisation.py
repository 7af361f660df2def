"""Functions of one's own: what runs when, on what, and which exclude each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.buffer import (
    BoxFlattenPreprocessor,
    DataBuffer,
    DiscretePreprocessor,
    EnvMeta,
    EnvRet,
    NonPreprocessor,
    NormalizePreprocessor,
    PolicyResponse,
    build_data_buffer,
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    get_preprocessor_cls,
)
from expstore.errors import ArgumentTypeError, SchemaError
from tests.buffer.feeding import config, env_ret, feed, numbers_of, opened, response

# -- mutual exclusion ----------------------------------------------------------------------------

POINTS: dict[str, Callable[..., Any]] = {
    "obs_preprocessor": lambda obs: obs,
    "reward_preprocessor": lambda reward: reward,
    "env_ret_preprocess_fn": lambda *given: default_env_ret_preprocess_fn(*given),
    "policy_resp_preprocess_fn": lambda *given: default_policy_resp_preprocess_fn(*given),
    "preprocess_fn": lambda *given: default_preprocess_fn(*given),
    "postprocess_fn": lambda raw: default_postprocess_fn(raw),
}
REFUSED = {
    ("obs_preprocessor", "env_ret_preprocess_fn"),
    ("reward_preprocessor", "env_ret_preprocess_fn"),
    ("obs_preprocessor", "preprocess_fn"),
    ("reward_preprocessor", "preprocess_fn"),
    ("env_ret_preprocess_fn", "preprocess_fn"),
    ("policy_resp_preprocess_fn", "preprocess_fn"),
}


@pytest.mark.parametrize("pair", list(itertools.combinations(POINTS, 2)), ids="+".join)
def test_the_15_combinations(pair: tuple[str, str]) -> None:
    functions: Any = {name: POINTS[name] for name in pair}

    for build in (
        lambda: DataBuffer(config(), **functions),
        lambda: build_data_buffer("ReplayBuffer", config(), **functions),
    ):
        if pair in REFUSED:
            with pytest.raises(ValueError, match=f"{pair[0]} cannot be given together .* bypass"):
                build()
        else:
            build()


def test_a_preprocessor_that_does_nothing_is_a_custom_one_and_none_is_not() -> None:
    from gymnasium.spaces import Box

    custom = POINTS["preprocess_fn"]
    with pytest.raises(ValueError, match="obs_preprocessor"):
        DataBuffer(config(), NonPreprocessor(Box(0, 1)), preprocess_fn=custom)
    DataBuffer(config(), None, preprocess_fn=custom)


# -- what runs when ------------------------------------------------------------------------------


def test_observation_and_reward_preprocessors_see_every_row(tmp_path: Path) -> None:
    functions = {
        "obs_preprocessor": lambda obs: obs * 10,
        "reward_preprocessor": lambda reward: reward + 1,
    }
    with opened(tmp_path / "b.exp", functions=functions) as buffer:
        feed(buffer, [1, 2, 3], cut=True)

        assert numbers_of(buffer) == [10, 20]
        assert numbers_of(buffer, "reward") == [3, 4]


def test_env_ret_and_policy_functions_decide_the_fields(tmp_path: Path) -> None:
    calls: list[str] = []

    def of_env(row: Any, returned: EnvRet, observe: Any, reward: Any) -> Any:
        calls.append("env")
        return {**row, "observation": returned.observation, "doubled": returned.last_reward * 2}

    def of_policy(row: Any, answer: PolicyResponse) -> Any:
        calls.append("policy")
        assert "doubled" in row
        return {**row, "action": answer.action}

    functions = {"env_ret_preprocess_fn": of_env, "policy_resp_preprocess_fn": of_policy}
    with opened(tmp_path / "b.exp", functions=functions) as buffer:
        feed(buffer, [0, 1, 2], cut=True)

        assert set(buffer.get_all()) == {"observation", "next_observation", "doubled", "action"}
        assert numbers_of(buffer, "doubled") == [0, 2]  # no last_: rows 0 to N - 1
    assert calls[:4] == ["env", "policy", "env", "policy"]


def test_preprocess_fn_takes_all_seven_arguments_positionally(tmp_path: Path) -> None:
    given: list[Any] = []

    def whole(*arguments: Any) -> Any:
        given.append(arguments)
        return default_preprocess_fn(*arguments)

    with opened(tmp_path / "b.exp", functions={"preprocess_fn": whole}) as buffer:
        feed(buffer, [0])
        buffer.add_data_async("other", env_ret(0, "other"))

    assert [len(arguments) for arguments in given] == [7, 7]
    assert given[0][0] == {} or "observation" in given[0][0]
    assert given[1][2] is None  # a half-row


def test_the_default_functions_refuse_what_they_cannot_read() -> None:
    with pytest.raises(TypeError, match="must be an EnvRet"):
        default_env_ret_preprocess_fn({}, {"observation": 1})
    with pytest.raises(ArgumentTypeError, match="must be a PolicyResponse"):
        default_policy_resp_preprocess_fn({}, None)
    with pytest.raises(ValueError, match="both None"):
        default_preprocess_fn({})
    with pytest.raises(ValueError, match="ids must be the same"):
        default_preprocess_fn({}, EnvRet("a", 0), PolicyResponse("b"))


def test_a_policys_field_wins_over_one_of_the_environment() -> None:
    row = default_preprocess_fn({}, EnvRet("a", 0, info=1), PolicyResponse("a", info=2))

    assert row["info"] == 2


def test_extra_fields_are_merged_and_may_not_hide_a_field() -> None:
    assert EnvRet("a", 0, _extra={"lives": 3}).to_dict()["lives"] == 3
    with pytest.raises(KeyError, match="'observation', which is a field"):
        EnvRet("a", 0, _extra={"observation": 3}).to_dict()


def test_a_custom_postprocess_function_sees_lists_of_tensors_for_arrays(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}

    def look(raw: dict[str, list[Any]]) -> Any:
        seen.update(raw)
        return {"last_reward": torch.tensor(raw["last_reward"]), "depth": raw["depth"]}

    with opened(tmp_path / "b.exp", functions={"postprocess_fn": look}) as buffer:
        feed(buffer, [0, 1, 2], depth=np.array([1000, 65535], np.uint16), cut=True)

        assert buffer.get_all()["depth"].dtype == torch.uint16
        assert buffer.get_all()["depth"].tolist() == [[1000, 65535]] * 3  # all N + 1 rows
        assert numbers_of(buffer, "last_reward") == [0, 1, 2]  # its own names stay
    assert isinstance(seen["observation"][0], torch.Tensor)
    assert seen["last_reward"] == [0.0, 1.0, 2.0]
    assert seen["info"] == [{}, {}, {}]


# -- default_postprocess_fn ----------------------------------------------------------------------


def example_a() -> dict[str, list[Any]]:
    return {
        "observation": [torch.full((2,), float(k)) for k in range(4)],
        "last_reward": [0.0, 1.0, 2.0, 3.0],
        "last_terminated": [False, False, False, True],
        "last_truncated": [False] * 4,
        "action": [0, 1, 0, 1],
        "log_prob": [-0.1] * 4,
        "info": [{}] * 4,
    }


def test_worked_example_a() -> None:
    out = default_postprocess_fn(example_a())

    assert {name: (tuple(t.shape), t.dtype) for name, t in out.items()} == {
        "next_observation": ((3, 2), torch.float32),
        "observation": ((3, 2), torch.float32),
        "reward": ((3,), torch.float32),
        "terminated": ((3,), torch.bool),
        "truncated": ((3,), torch.bool),
        "action": ((3,), torch.int64),
        "log_prob": ((3,), torch.float32),
    }
    assert out["observation"][:, 0].tolist() == [0, 1, 2]
    assert out["next_observation"][:, 0].tolist() == [1, 2, 3]
    assert out["reward"].tolist() == [1, 2, 3]
    assert out["terminated"].tolist() == [False, False, True]
    assert out["action"].tolist() == [0, 1, 0]


def test_the_defaults_corollaries() -> None:
    out = default_postprocess_fn(
        {
            "observation": [0.0, 1.0, 2.0],
            "information_state": [1, 2, 3],
            "model_info": [1, 2, 3],
            "lives": [3, 2, 1],
            "last_foo": [5, 6, 7],
            "reward": [9, 9, 9],
            "terminated": [9, 9, 9],
        }
    )

    assert {name: t.tolist() for name, t in out.items()} == {
        "next_observation": [1, 2],
        "observation": [0, 1],
        "lives": [3, 2],
        "foo": [6, 7],
        "last_foo": [5, 6],
    }
    assert default_postprocess_fn({"observation": [1.0]})["observation"].shape == (0,)
    with pytest.raises(IndexError):
        default_postprocess_fn({"observation": []})


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.0, 1.0], torch.float32),
        ([0.0, 1], torch.float32),
        ([0.0, np.float64(1)], torch.float64),
        ([0.0, np.float32(1)], torch.float32),
        ([np.float16(0), np.float16(1)], torch.float16),
        ([1, np.int64(2)], torch.int64),
        ([1, 2], torch.int64),
        ([False, np.bool_(True)], torch.bool),
        ([np.zeros(2), np.zeros(2)], torch.float64),
        ([0.0, torch.ones(3, dtype=torch.float64)], torch.float64),
        ([np.uint16(1000), np.uint16(2)], torch.uint16),
        ([[0, 1], [2, 3]], torch.int64),
        ([[0.0, 1], [2, 3]], torch.float32),
    ],
)
def test_dtypes_of_rows(values: list[Any], dtype: torch.dtype) -> None:
    rows = default_postprocess_fn({"observation": values})["observation"]

    assert rows.dtype == dtype


def test_nested_observations_are_shifted_leaf_by_leaf(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        for number in range(3):
            seen = {"image": np.full((2, 2), number, np.uint8), "joints": (float(number), [1, 2])}
            buffer.add_transition("env", EnvRet("env", seen), response(number))
        buffer.truncate_one_episode("env")

        rows = buffer.get_all()
        assert rows["observation"]["image"][:, 0, 0].tolist() == [0, 1]
        assert rows["next_observation"]["image"][:, 0, 0].tolist() == [1, 2]
        assert rows["next_observation"]["joints"]["0"].tolist() == [1, 2]
        assert rows["observation"]["joints"]["1"].tolist() == [[1, 2], [1, 2]]


def test_text_and_values_of_varying_length_are_stored_as_such(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        for number in range(3):
            answer = response(number, word="ab"[: number + 1], points=np.zeros((number + 1, 3)))
            buffer.add_transition("env", env_ret(number), answer)
        buffer.truncate_one_episode("env")

        rows = buffer.sample(2)[0]
        assert set(rows["word"]) <= {"a", "ab"}
        assert {points.shape[1] for points in rows["points"]} == {3}
        assert buffer[1]["word"] == "ab"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([None, None], "'x' has None of type NoneType"),
        ([np.zeros(2), np.zeros((2, 2))], "'x' has rows of different shapes"),
        ([{"a": 1}, {"b": 1}], r"'x' must have \['b'\] in every row"),
        ([torch.zeros(2), torch.zeros(2).int()], "'x' has rows of different"),
        ([object(), object()], "'x' has <object"),
        ([2**70, 1], "'x' cannot be a tensor: .* convert it"),
        ([np.zeros(1, np.longdouble)] * 2, "'x' cannot be a tensor: .* convert it"),
        ([np.zeros(1, np.complex64)] * 2, "'x' has array"),
    ],
)
def test_rows_that_make_no_column_are_named(values: list[Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        default_postprocess_fn({"x": values})


# -- preprocessors -------------------------------------------------------------------------------


def test_the_usual_preprocessor_of_a_space() -> None:
    from gymnasium import spaces

    assert get_preprocessor_cls(spaces.Box(0, 1, (2,))) is BoxFlattenPreprocessor
    assert get_preprocessor_cls(spaces.Discrete(2)) is DiscretePreprocessor
    assert get_preprocessor_cls(spaces.MultiBinary(2)) is NonPreprocessor


def test_a_box_is_flattened_row_by_row_in_vector_environments() -> None:
    from gymnasium.spaces import Box, Discrete

    flatten = BoxFlattenPreprocessor(Box(0, 1, (2, 3)))
    assert flatten.shape == (6,)
    assert flatten(np.zeros((2, 3))).shape == (6,)
    assert flatten(torch.zeros(4, 2, 3)).shape == (4, 6)
    assert flatten.batch_transform(np.zeros((5, 2, 3))).shape == (5, 6)
    assert [a.shape for a in flatten.batch_transform((np.zeros((2, 3)),) * 2)] == [(6,), (6,)]
    assert BoxFlattenPreprocessor(Box(0, 1, ()))(np.float32(1)).shape == (1,)
    with pytest.raises(ValueError, match="needs a Box"):
        BoxFlattenPreprocessor(Discrete(2))


def test_discrete_values_become_one_hot_whatever_gymnasium_gives() -> None:
    from gymnasium.spaces import Box, Discrete

    hot = DiscretePreprocessor(Discrete(3, start=5))
    for value in (6, np.int64(6), np.array(6), torch.tensor(6)):
        assert hot(value).tolist() == [0, 1, 0]
    assert hot.batch_transform(np.array([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert (hot.shape, hot(6).dtype) == ((3,), np.float32)
    with pytest.raises(ValueError, match="from 5 to 7"):
        hot(4)
    with pytest.raises(TypeError, match="must be integers"):
        hot(5.5)
    with pytest.raises(ValueError, match="needs a Discrete"):
        DiscretePreprocessor(Box(0, 1))


def test_running_statistics_are_those_of_all_values() -> None:
    values = np.random.default_rng(0).normal(3, 2, (50, 4))
    from gymnasium.spaces import Box

    normalize = NormalizePreprocessor(Box(-9, 9, (4,)))
    for value in values[:30]:
        normalize(value)
    normalize.batch_transform(values[30:])

    np.testing.assert_allclose(normalize.mean, values.mean(axis=0))
    np.testing.assert_allclose(normalize.variance, values.var(axis=0))


def test_a_resets_dummy_reward_does_not_count(tmp_path: Path) -> None:
    scale = NormalizePreprocessor()
    with opened(
        tmp_path / "b.exp", functions={"reward_preprocessor": scale}, auto_truncate_episode=True
    ) as buffer:
        for numbers in ([0, 5, 7], [0, 9]):
            feed(buffer, numbers, end="terminated")

        assert (scale.count, float(scale.mean)) == (3, 7.0)
        assert buffer.num_transitions == 3


def test_dummy_rewards_of_some_sub_environments_do_not_count(tmp_path: Path) -> None:
    scale = NormalizePreprocessor()
    with opened(
        tmp_path / "b.exp",
        functions={"reward_preprocessor": scale},
        auto_truncate_episode=True,
        metas=[EnvMeta("env", num_envs=2)],
    ) as buffer:
        for rewards, ends in [(0.0, (0, 0)), ((1, 2), (1, 0)), ((0, 6), (0, 0)), ((5, 7), (0, 0))]:
            returned = EnvRet(
                "env", np.zeros((2, 1)), np.array(rewards, float) if rewards else 0.0,
                np.array(ends, bool) if rewards else False,
            )  # fmt: skip
            buffer.add_transition("env", returned, PolicyResponse("env", action=np.zeros(2)))

    assert (scale.count, float(scale.mean)) == (5, (1 + 2 + 6 + 5 + 7) / 5)


# -- the documented examples, as written but for the import root ---------------------------------

REFERENCE = Path(__file__).parents[3] / "shared/reference/rlightning-customize-buffer.txt"

GAE = '''
import torch

def compute_gae(rewards, values, dones, gamma, gae_lambda):
    """Compute Generalized Advantage Estimation (GAE)."""
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])

    for t in reversed(range(rewards.shape[0])):
        next_not_done = 1.0 - dones[t].float()
        current_value = values[t]
        next_value = values[t + 1]
        delta = rewards[t] + gamma * next_value * next_not_done - current_value
        lastgaelam = delta + gamma * gae_lambda * next_not_done * lastgaelam
        advantages[t] = lastgaelam

    returns = advantages + values[:-1]
    return advantages, returns


def episode_postprocess_fn(raw_episode: dict[str, list]) -> dict[str, torch.Tensor]:
    """Post-process raw episode data with GAE computation."""
    # 1. Convert lists to tensors
    episode = {}
    for key, value in raw_episode.items():
        if key in ["info"]:
            continue
        if isinstance(value[0], torch.Tensor):
            episode[key] = torch.stack(value).squeeze()
        else:
            episode[key] = torch.tensor(value, device="cuda")

    # 2. Align timestep offsets
    episode["last_reward"] = episode["last_reward"][1:]
    dones = torch.logical_or(episode["last_terminated"], episode["last_truncated"])
    episode["done"] = dones[1:]
    episode["action"] = episode["action"][:-1]
    episode["last_terminated"] = episode["last_terminated"][1:]
    episode["last_truncated"] = episode["last_truncated"][1:]
    episode["log_prob"] = episode["log_prob"][:-1]
    episode["entropy"] = episode["entropy"][:-1]
    episode["observation"] = episode["observation"][:-1]

    # 3. Compute GAE
    rewards = episode["last_reward"]
    values = episode["value"]
    episode["value"] = episode["value"][:-1]
    dones = episode["done"]

    GAMMA = 0.8
    GAE_LAMBDA = 0.9
    advantages, returns = compute_gae(rewards, values, dones, GAMMA, GAE_LAMBDA)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    episode["advantages"] = advantages
    episode["returns"] = returns

    return episode
'''

NORMALIZE = '''
from expstore.buffer.utils.preprocessors import Preprocessor

class NormalizePreprocessor(Preprocessor):
    """Normalize observations by subtracting mean and dividing by std."""

    def __init__(self, space, mean, std):
        super().__init__(space)
        self.mean = mean
        self.std = std

    def transform(self, data):
        return (data - self.mean) / (self.std + 1e-8)

    def batch_transform(self, batched_data):
        return (batched_data - self.mean) / (self.std + 1e-8)

    @property
    def shape(self):
        return self.original_space.shape
'''

LOGGING = '''
from expstore.utils.registry import BUFFERS
from expstore.buffer.base_buffer import DataBuffer
from expstore.utils.logger import get_logger

logger = get_logger(__name__)

@BUFFERS.register("LoggingReplayBuffer")
class LoggingReplayBuffer(DataBuffer):
    """Replay buffer that logs sampling statistics."""

    def sample(self, batch_size=None, shuffle=True, drop_last=True):
        sample_data = super().sample(batch_size, shuffle=shuffle, drop_last=drop_last)
        logger.info(f"Sampled {len(sample_data)} batches, buffer size: {self.size()}")
        return sample_data
'''

CONFIG = """
imports:
  - my_project.buffers

buffer:
  type: LoggingReplayBuffer
  capacity: 100000
"""


def run(text: str, name: str = "my_project.utils") -> dict[str, Any]:
    if not torch.cuda.is_available():
        text = text.replace('"cuda"', '"cpu"')  # the one thing that needs a GPU
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(text, "<documented>", "exec"), namespace)
    return namespace


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs the reference pages")
@pytest.mark.parametrize("text", [GAE, NORMALIZE, LOGGING, CONFIG])
def test_the_examples_here_are_the_documented_ones(text: str) -> None:
    documented = REFERENCE.read_text().replace("rlightning", "expstore")

    for line in filter(None, text.splitlines()):
        assert line in documented, line


@pytest.mark.parametrize(
    ("is_done", "advantages", "returns", "normalised"),
    [
        (True, [3.54448, 3.784, 2.7], [4.04448, 4.184, 3.0], [0.354126, 0.774749, -1.128875]),
        (
            False,
            [3.627425, 3.8992, 2.86],
            [4.127425, 4.2992, 3.16],
            [0.306558, 0.810835, -1.117393],
        ),
    ],
)
def test_worked_example_c(
    tmp_path: Path,
    is_done: bool,
    advantages: list[float],
    returns: list[float],
    normalised: list[float],
) -> None:
    from expstore.buffer import RolloutBuffer
    from expstore.utils.builders import build_data_buffer
    from expstore.utils.config import BufferConfig

    documented = run(GAE)
    cfg = BufferConfig.from_dict(config("RolloutBuffer"))
    built = build_data_buffer(
        buffer_cls=cfg.type,
        buffer_cfg=cfg,
        postprocess_fn=documented["episode_postprocess_fn"],
    )
    made = RolloutBuffer(config=cfg, postprocess_fn=documented["episode_postprocess_fn"])
    for buffer in (built, made):
        with buffer:
            buffer.init()
            for row, value in enumerate([0.5, 0.4, 0.3, 0.2]):
                end = "terminated" if is_done and row == 3 else ""
                answer = response(row, value=value, log_prob=-0.1, entropy=1.0)
                buffer.add_transition("env", env_ret(row, end=end), answer)
            buffer.truncate_one_episode("env")
            (batch,) = buffer.sample(shuffle=False)

            assert batch["advantages"].tolist() == pytest.approx(normalised, abs=1e-5)
            assert batch["returns"].tolist() == pytest.approx(returns, abs=1e-5)
            assert batch["done"].tolist() == [False, False, is_done]
            assert batch["last_reward"].tolist() == [1, 2, 3]
    gae = documented["compute_gae"](
        torch.tensor([1.0, 2, 3]), torch.tensor([0.5, 0.4, 0.3, 0.2]),
        torch.tensor([False, False, is_done]), 0.8, 0.9,
    )  # fmt: skip
    assert gae[0].tolist() == pytest.approx(advantages, abs=1e-5)


def test_the_documented_preprocessor(tmp_path: Path) -> None:
    from gymnasium.spaces import Box

    documented = run(NORMALIZE)["NormalizePreprocessor"]
    obs_space = Box(0, 255, (2,))
    functions = {"obs_preprocessor": documented(obs_space, mean=0.0, std=255.0)}

    with opened(tmp_path / "b.exp", functions=functions) as buffer:
        feed(buffer, [0, 255, 254], cut=True)
        assert numbers_of(buffer) == pytest.approx([0, 1])


def test_the_documented_buffer_class_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from expstore.buffer import BUFFERS
    from expstore.utils.config import MainConfig

    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/__init__.py").write_text("")
    (tmp_path / "my_project/buffers.py").write_text(LOGGING)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(BUFFERS, "_classes", dict(BUFFERS._classes))

    main = MainConfig.load_yaml(tmp_path / "config.yaml")
    assert main.buffer is not None
    with build_data_buffer(main.buffer.type, main.buffer, path=tmp_path / "b.exp") as buffer:
        buffer.init()
        feed(buffer, [0, 1, 2], cut=True)
        with pytest.raises(ValueError, match=r"sampler: \{type: uniform\}"):
            buffer.sample(2)  # no usual one is known of a type of your own
        buffer.sampler = expstore.buffer.UniformSampler()
        with caplog.at_level("INFO", "my_project.buffers"):
            assert len(buffer.sample(2)) == 1
    assert type(buffer).__name__ == "LoggingReplayBuffer"
    assert "Sampled 1 batches, buffer size: 2" in caplog.text


def test_the_documented_signatures_run(tmp_path: Path) -> None:
    def custom_preprocess_fn(
        transition_dict: dict[str, Any],
        env_ret: Any = None,
        policy_resp: Any = None,
        obs_preprocessor: Any = None,
        reward_preprocessor: Any = None,
        env_ret_preprocess_fn: Any = None,
        policy_resp_preprocess_fn: Any = None,
    ) -> dict[str, Any]:
        if env_ret is not None:
            transition_dict["observation"] = math.sqrt(env_ret.observation[0])
        if policy_resp is not None:
            transition_dict["action"] = policy_resp.action
        return transition_dict

    functions = {"preprocess_fn": custom_preprocess_fn}
    with opened(tmp_path / "b.exp", functions=functions) as buffer:
        feed(buffer, [0, 4, 9], cut=True)
        assert numbers_of(buffer, "next_observation") == [2, 3]
