"""The registry of buffers, where RLightning has it."""

from expstore.buffer.registry import BUFFERS, Registry, load_modules_from_config

__all__ = ["BUFFERS", "Registry", "load_modules_from_config"]
