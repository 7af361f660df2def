"""The configuration classes, where RLightning has them."""

from expstore.buffer.config import BufferConfig, Config, MainConfig, SamplerConfig, StorageConfig

__all__ = ["BufferConfig", "Config", "MainConfig", "SamplerConfig", "StorageConfig"]
