"""What a recording runs on: the environment, the policy, and their versions."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from expstore.errors import MissingExtraError, SourceError, how_to_install
from expstore.ingest.lookup import imported

LOG = logging.getLogger(__name__)

Policy = Callable[[Any], Any]  # observation -> action

PREFIX = "gym:"
VERSIONED = ("gymnasium", "numpy", "mujoco", "ale_py")  # what decides how an episode goes


def make_environment(env_id: str) -> Any:
    """`gymnasium.make`, with the Atari games registered where they are installed.

    Raises:
        MissingExtraError: gymnasium, or what the environment needs, is not installed.
        SourceError: there is no such environment.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError(f"recording needs gymnasium; {how_to_install('gym')}") from error
    if env_id.startswith("ALE/"):
        _register_atari(gymnasium)
    try:
        # The checker warns about how an environment is made; here it is recorded as it is.
        module, _, registered = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        with _quiet_models(gymnasium.spec(registered).entry_point):
            return gymnasium.make(registered, disable_env_checker=True)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{env_id} cannot run: {error}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise SourceError(f"{PREFIX}{env_id} cannot be made: {error}") from error


@contextlib.contextmanager
def _quiet_models(entry_point: Any) -> Iterator[None]:
    """Keep MuJoCo from writing its remarks on gymnasium's models to stderr and a file here.

    What it has to say of a simulation, later, is heard as ever.
    """
    if "mujoco" not in str(entry_point):
        yield
        return
    mujoco = importlib.import_module("mujoco")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(LOG.debug)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def _register_atari(gymnasium: Any) -> None:
    try:
        import ale_py
    except ImportError as error:
        raise MissingExtraError(
            "Atari games need ale-py; install it with: pip install ale-py"
        ) from error
    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def policy_of(policy: str | Policy) -> tuple[Policy | None, str]:
    """The function, None for random actions, and the name that is kept with each episode.

    Raises:
        SourceError: it is neither "random" nor something that can be imported and called.
    """
    if callable(policy):
        named = policy if hasattr(policy, "__qualname__") else type(policy)
        return policy, f"{named.__module__}:{named.__qualname__}"
    if policy == "random":
        return None, policy
    return imported(policy, "policy", "random"), policy


def versions_of(environment: Any) -> dict[str, str]:
    """Versions of the packages that decide how an episode goes, as far as they are loaded."""
    home = type(environment.unwrapped).__module__.split(".")[0]
    modules = {name: sys.modules.get(name) for name in (*VERSIONED, home)}
    return {
        name: str(module.__version__)
        for name, module in modules.items()
        if module is not None and hasattr(module, "__version__")
    }
