"""Experience from environments: `Recorder` and `RecordExperience` wrap one of gymnasium's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["RecordExperience", "Recorder"]


def Recorder(
    env: Any,
    target: Any,
    *,
    info: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Wrap an environment of gymnasium so that its episodes are stored.

    It steps and resets as before, and gives back what it gave. Vector environments are recorded
    in the autoreset mode that their metadata names: steps that only reset are no steps, and
    where the step that ends an episode gives the next one's first observation, the final one is
    taken from its info. Actions are kept in the dtype of their space, rewards as float64. An
    episode that a reset breaks off, or `close`, ends as `cut`; one in which the environment
    raises, as `incomplete`.

    Args:
        env: a `gymnasium.Env` or a `gymnasium.vector.VectorEnv`.
        target: a `Writer`, which gets an `append` for each episode, or a `DataBuffer`, which gets
            its rows.
        info: keys of `info` that every step has, recorded as fields `info/<key>`.
        metadata: kept with every episode, besides `seed`, `options`, `env_id`, `versions`,
            `wall_time_s` and, of a vector environment, `env_number`.

    Returns:
        The wrapped environment. It has `recording`, with `num_episodes` stored so far.

    Raises:
        SchemaError: a space without fields of fixed size.
        SourceError: a vector environment that does not say how it resets.
        MissingExtraError: gymnasium is not installed.

    Example:
        >>> import gymnasium, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     env = Recorder(gymnasium.make("CartPole-v1"), writer)
        ...     _, _ = env.reset(seed=3)
        ...     for _ in range(5):
        ...         _ = env.step(0)
        ...     env.close()
        >>> expstore.open(path).episodes[0]["seed"], expstore.open(path).num_steps
        (3, 5)
    """
    from expstore.ingest.recording import record

    return record(env, target, info=info, metadata=metadata)


def RecordExperience(
    env: Any,
    path: str | os.PathLike[str],
    *,
    info: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
    **writer_options: Any,
) -> Any:
    """Wrap an environment so that all its episodes go to the store at `path`.

    Args:
        env: as for `Recorder`.
        path: of the store, which is created or appended to. It is closed with the environment.
        info: as for `Recorder`.
        metadata: as for `Recorder`.
        **writer_options: of the `Writer`: `layout`, `capacity_steps` and so on.
    """
    from expstore.ingest.recording import record_to

    return record_to(path, env, info=info, metadata=metadata, **writer_options)
