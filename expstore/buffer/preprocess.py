"""What is made of each row before it is kept: the default functions, and who excludes whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expstore.buffer.types import EnvRet, PolicyResponse
from expstore.errors import ArgumentTypeError, SchemaError

Row = dict[str, Any]


def default_obs_preprocessor(obs: Any) -> Any:
    """The observation as it is."""
    return obs


def default_reward_preprocessor(reward: Any) -> Any:
    """The reward as it is."""
    return reward


def default_env_ret_preprocess_fn(
    transition_dict: Row,
    env_ret: Any,
    obs_preprocessor: Callable[[Any], Any] = default_obs_preprocessor,
    reward_preprocessor: Callable[[Any], Any] = default_reward_preprocessor,
) -> Row:
    """Add an `EnvRet`'s fields to the row, observation and reward preprocessed.

    Raises:
        ArgumentTypeError: it is no EnvRet.
        SchemaError: an extra field has the name of a field.
    """
    if not isinstance(env_ret, EnvRet):
        raise ArgumentTypeError(f"env_ret must be an EnvRet, got {type(env_ret).__name__}")
    row = env_ret.to_dict()
    row["observation"] = obs_preprocessor(row["observation"])
    row["last_reward"] = reward_preprocessor(row["last_reward"])
    transition_dict.update(row)
    return transition_dict


def default_policy_resp_preprocess_fn(transition_dict: Row, policy_resp: Any) -> Row:
    """Add a `PolicyResponse`'s fields to the row; they win over fields of the same name.

    Raises:
        ArgumentTypeError: it is no PolicyResponse.
    """
    if not isinstance(policy_resp, PolicyResponse):
        raise ArgumentTypeError(
            f"policy_resp must be a PolicyResponse, got {type(policy_resp).__name__}"
        )
    transition_dict.update(policy_resp.to_dict())
    return transition_dict


def default_preprocess_fn(
    transition_dict: Row,
    env_ret: EnvRet | None = None,
    policy_resp: PolicyResponse | None = None,
    obs_preprocessor: Callable[[Any], Any] = default_obs_preprocessor,
    reward_preprocessor: Callable[[Any], Any] = default_reward_preprocessor,
    env_ret_preprocess_fn: Callable[..., Row] = default_env_ret_preprocess_fn,
    policy_resp_preprocess_fn: Callable[..., Row] = default_policy_resp_preprocess_fn,
) -> Row:
    """Add what is given to the row: the environment's fields first, then the policy's.

    Raises:
        SchemaError: neither is given, or they belong to different environments.
    """
    if env_ret is None and policy_resp is None:
        raise SchemaError("env_ret and policy_resp are both None; give at least one of them")
    if env_ret is not None and policy_resp is not None:
        check_same_env(env_ret.env_id, policy_resp.env_id)
    if env_ret is not None:
        transition_dict = env_ret_preprocess_fn(
            transition_dict, env_ret, obs_preprocessor, reward_preprocessor
        )
    if policy_resp is not None:
        transition_dict = policy_resp_preprocess_fn(transition_dict, policy_resp)
    return transition_dict


def check_same_env(env_id: str, other: str) -> None:
    """Refuse a pair that belongs to two environments."""
    if env_id != other:
        raise SchemaError(
            f"the ids must be the same, got {env_id!r} and {other!r}; pair each EnvRet with the "
            "answer to it"
        )


DEFAULTS: dict[str, Callable[..., Any]] = {
    "obs_preprocessor": default_obs_preprocessor,
    "reward_preprocessor": default_reward_preprocessor,
    "env_ret_preprocess_fn": default_env_ret_preprocess_fn,
    "policy_resp_preprocess_fn": default_policy_resp_preprocess_fn,
    "preprocess_fn": default_preprocess_fn,
}

# (inner, outer): a custom outer function takes the place of the default one that calls the inner.
BYPASSED = (
    ("obs_preprocessor", "env_ret_preprocess_fn"),
    ("reward_preprocessor", "env_ret_preprocess_fn"),
    ("obs_preprocessor", "preprocess_fn"),
    ("reward_preprocessor", "preprocess_fn"),
    ("env_ret_preprocess_fn", "preprocess_fn"),
    ("policy_resp_preprocess_fn", "preprocess_fn"),
)


def check_exclusion(functions: dict[str, Callable[..., Any]]) -> None:
    """Refuse a custom function that another custom one would bypass.

    Raises:
        SchemaError: names both.
    """
    custom = {name for name, default in DEFAULTS.items() if functions[name] is not default}
    for inner, outer in BYPASSED:
        if inner in custom and outer in custom:
            raise SchemaError(
                f"{inner} cannot be given together with {outer}, which would bypass it; call it "
                f"inside {outer} and leave {inner} out"
            )
