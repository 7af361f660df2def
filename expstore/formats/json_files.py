"""JSON files that hold one object, as the metadata of many formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expstore.errors import SourceError


def read_object(path: Path) -> dict[str, Any]:
    """The object.

    Raises:
        SourceError: the file cannot be read, is no JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} must hold one object, got {type(found).__name__}")
    return found
