"""Buffers built by name, and reopened by their directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from expstore.buffer.base_buffer import DataBuffer
from expstore.buffer.config import BufferConfig
from expstore.buffer.episode_storage import DIRECTORY, DOCUMENT, has_buffer, read_document
from expstore.buffer.registry import BUFFERS
from expstore.errors import NotAStoreError
from expstore.storage.layout import PRIVATE
from expstore.storage.store import absolute

Function = Callable[..., Any]


def build_data_buffer(
    buffer_cls: str,
    buffer_cfg: BufferConfig | Mapping[str, Any],
    obs_preprocessor: Function | None = None,
    reward_preprocessor: Function | None = None,
    env_ret_preprocess_fn: Function | None = None,
    policy_resp_preprocess_fn: Function | None = None,
    preprocess_fn: Function | None = None,
    postprocess_fn: Function | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    journal: bool | None = None,
) -> DataBuffer:
    """A buffer of a registered class; `init` is still to be called.

    Args:
        buffer_cls: the name.
        buffer_cfg: see `BufferConfig`; the other arguments as for `DataBuffer`.

    Raises:
        RegistryError: no class of that name.

    >>> buffer = build_data_buffer("ReplayBuffer", {"type": "ReplayBuffer", "capacity": 100})
    >>> type(buffer).__name__
    'ReplayBuffer'
    """
    buffer: DataBuffer = BUFFERS.get(buffer_cls)(
        buffer_cfg,
        obs_preprocessor=obs_preprocessor,
        reward_preprocessor=reward_preprocessor,
        env_ret_preprocess_fn=env_ret_preprocess_fn,
        policy_resp_preprocess_fn=policy_resp_preprocess_fn,
        preprocess_fn=preprocess_fn,
        postprocess_fn=postprocess_fn,
        **({} if path is None else {"path": path}),
        **({} if journal is None else {"journal": journal}),
    )
    return buffer


def load_data_buffer(path: str | os.PathLike[str], **functions: Function) -> DataBuffer:
    """The buffer that was kept at `path`, as it was configured, and opened.

    Args:
        path: the store's directory.
        **functions: its customisation points, which no file can hold.

    Raises:
        NotAStoreError: no buffer was kept there.
    """
    directory = absolute(path)
    if not has_buffer(directory):
        raise NotAStoreError(f"{directory} holds no buffer; build one with path=")
    document = read_document(directory / PRIVATE / DIRECTORY / DOCUMENT)
    config = BufferConfig.from_dict({**document.config})
    given: dict[str, Any] = dict(functions)
    buffer = build_data_buffer(config.type, config, **given, path=directory)
    buffer.init()
    return buffer
