"""Fingerprints of functions, by which one notices that another one ran."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

DIGITS = 8


def fingerprint(function: Callable[..., Any]) -> str:
    """`module:name#digest`; the digest is over the source and what is bound to it.

    >>> def double(episode): return episode
    >>> fingerprint(double).startswith("expstore.storage.fingerprint:double#")
    True
    """
    digest = hashlib.sha256("\n".join(_parts(function, 0)).encode()).hexdigest()[:DIGITS]
    return f"{name_of(function)}#{digest}"


def name_of(function: Callable[..., Any]) -> str:
    """`module:name` of a function, or of the class of a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _parts(function: Any, depth: int) -> list[str]:
    """What tells it from another one: its code, defaults, closure and parameters."""
    if depth > 3:
        return []
    if isinstance(function, functools.partial):
        bound = [*function.args, *sorted(function.keywords.items())]
        return [*_parts(function.func, depth + 1), *_described(bound, depth)]
    if isinstance(function, MethodType):
        return [*_parts(function.__func__, depth + 1), *_parts(function.__self__, depth + 1)]
    if inspect.isfunction(function):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        bound = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *cells]
        return [_source(function), *_described(bound, depth)]
    if is_dataclass(function) and not isinstance(function, type):
        values = [(f.name, getattr(function, f.name)) for f in fields(function) if f.init]
        return [_source(type(function)), *_described(values, depth)]
    return [_source(function if isinstance(function, type) else type(function))]


def _described(values: list[Any], depth: int) -> list[str]:
    parts = []
    for value in values:
        for member in value if isinstance(value, tuple) else (value,):
            if callable(member):
                parts += [name_of(member), *_parts(member, depth + 1)]
            elif isinstance(member, (bool, int, float, str, bytes, type(None))):
                parts.append(repr(member))
            else:  # the repr of others may hold an address
                parts.append(type(member).__qualname__)
    return parts


def _source(what: Any) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):  # typed in, or compiled
        code = getattr(what, "__code__", None)
        return repr((code.co_code, code.co_names)) if code else name_of(what)
