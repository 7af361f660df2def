"""The names of `expstore.buffer.preprocessors`, where RLightning has them."""

from expstore.buffer.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    NormalizePreprocessor,
    Preprocessor,
    default_obs_preprocessor,
    default_reward_preprocessor,
    get_preprocessor_cls,
)

__all__ = [
    "BoxFlattenPreprocessor",
    "DiscretePreprocessor",
    "NonPreprocessor",
    "NormalizePreprocessor",
    "Preprocessor",
    "default_obs_preprocessor",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
]
