"""Registry: classes by name, closed to duplicates."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from expstore.errors import RegistryError

Kind = TypeVar("Kind", bound=type)


class Registry:
    """Classes by the name under which a configuration asks for them.

    >>> animals = Registry("animals")
    >>> @animals.register("cat")
    ... class Cat: ...
    >>> animals.get("cat") is Cat, list(animals)
    (True, ['cat'])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._classes: dict[str, type] = {}

    def register(self, name: str | None = None) -> Callable[[Kind], Kind]:
        """A decorator that registers a class, by default under its own name.

        Raises:
            RegistryError: the name is taken.
        """

        def add(cls: Kind) -> Kind:
            key = name or cls.__name__
            if key in self._classes and not _is_reload(self._classes[key], cls):
                raise RegistryError(
                    f"{key!r} is registered in {self.name} already, as "
                    f"{self._classes[key].__module__}.{self._classes[key].__qualname__}; "
                    "choose another name"
                )
            self._classes[key] = cls
            return cls

        return add

    def get(self, key: str) -> Any:
        """The class of that name.

        Raises:
            RegistryError: there is none.
        """
        if key not in self._classes:
            raise RegistryError(
                f"{key!r} is not registered in {self.name}, which has "
                f"{', '.join(map(repr, self)) or 'nothing'}; import the module that registers it, "
                "or name that module under imports:"
            )
        return self._classes[key]

    def __contains__(self, key: object) -> bool:
        return key in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


def _is_reload(old: type, new: type) -> bool:
    """Whether a module is imported anew, and brings its class again."""
    is_same = (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    return is_same and "<locals>" not in new.__qualname__


BUFFERS = Registry("buffers")


def import_modules(modules: Iterable[str]) -> None:
    """Import modules by dotted name, so that what they register is there."""
    for module in modules:
        importlib.import_module(module)


def load_modules_from_config(config: Any) -> None:
    """Import what a configuration lists under `imports:`; None, or nothing, imports nothing."""
    get = config.get if hasattr(config, "get") else lambda name: getattr(config, name, None)
    import_modules(get("imports") or ())
