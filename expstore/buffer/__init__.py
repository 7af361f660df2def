"""The Data Buffer: record, preprocess, postprocess and sample, on a store that survives."""

from expstore.buffer.base_buffer import DataBuffer
from expstore.buffer.builders import build_data_buffer, load_data_buffer
from expstore.buffer.config import BufferConfig, MainConfig, SamplerConfig, StorageConfig
from expstore.buffer.journal import Quarantine, QuarantinedEpisode
from expstore.buffer.postprocess import RawEpisode, default_postprocess_fn
from expstore.buffer.preprocess import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from expstore.buffer.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    NormalizePreprocessor,
    Preprocessor,
    get_preprocessor_cls,
)
from expstore.buffer.registry import BUFFERS, Registry, load_modules_from_config
from expstore.buffer.replay_buffer import ReplayBuffer
from expstore.buffer.rollout_buffer import RolloutBuffer
from expstore.buffer.sampler import AllDataSampler, BaseSampler, BatchSampler, UniformSampler
from expstore.buffer.types import (
    BatchedData,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
    Processed_EnvRet_fields,
)

__all__ = [
    "BUFFERS",
    "AllDataSampler",
    "BaseSampler",
    "BatchSampler",
    "BatchedData",
    "BoxFlattenPreprocessor",
    "BufferConfig",
    "DataBuffer",
    "DiscretePreprocessor",
    "EnvMeta",
    "EnvRet",
    "MainConfig",
    "MultiAgentEnvRet",
    "MultiAgentPolicyResponse",
    "NonPreprocessor",
    "NormalizePreprocessor",
    "PolicyResponse",
    "Preprocessor",
    "Processed_EnvRet_fields",
    "Quarantine",
    "QuarantinedEpisode",
    "RawEpisode",
    "Registry",
    "ReplayBuffer",
    "RolloutBuffer",
    "SamplerConfig",
    "StorageConfig",
    "UniformSampler",
    "build_data_buffer",
    "default_env_ret_preprocess_fn",
    "default_obs_preprocessor",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
    "load_data_buffer",
    "load_modules_from_config",
]
