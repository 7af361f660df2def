"""Names at the places where code written for RLightning looks for them."""

from expstore.buffer.postprocess import default_postprocess_fn
from expstore.buffer.preprocess import (
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_preprocess_fn,
)
from expstore.buffer.returns import default_compute_gae

__all__ = [
    "default_compute_gae",
    "default_env_ret_preprocess_fn",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
]
