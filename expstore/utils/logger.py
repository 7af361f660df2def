"""`get_logger`, where RLightning has it: Python's own loggers."""

from logging import getLogger as get_logger

__all__ = ["get_logger"]
