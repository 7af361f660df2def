"""The same names as in `expstore.buffer.utils`, one level deeper."""

from expstore.buffer.utils import (
    default_compute_gae,
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)

__all__ = [
    "default_compute_gae",
    "default_env_ret_preprocess_fn",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
]
