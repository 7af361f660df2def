"""Functions that a user names as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from expstore.errors import SourceError


def imported(name: str, option: str, otherwise: str) -> Callable[..., Any]:
    """What a name leads to.

    Args:
        name: "module:function".
        option: what it was given for, "policy".
        otherwise: what it may be instead, for the error.

    Raises:
        SourceError: it is no such name, or nothing that can be imported and called.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise SourceError(
            f"--{option} ({option}=) must be {otherwise} or module:function, got {name!r}"
        )
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise SourceError(f"{option} {name!r} cannot be imported: {error}") from error
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SourceError(f"{option} {name!r}: {module} has no function {function!r}")
    return found  # type: ignore[no-any-return]
