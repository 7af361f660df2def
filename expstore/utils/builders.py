"""`build_data_buffer`, where RLightning has it."""

from expstore.buffer.builders import build_data_buffer

__all__ = ["build_data_buffer"]
