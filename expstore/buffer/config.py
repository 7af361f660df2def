"""The configuration of a buffer: plain dataclasses, from dicts and YAML."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from expstore.buffer.registry import import_modules
from expstore.errors import MissingExtraError, SchemaError, how_to_install

Own = TypeVar("Own", bound="Config")


@dataclass
class Config:
    """What every part of a configuration can do.

    Keys that no field has are kept in `extra` and read like fields; one that looks like a
    mistyped field is refused.
    """

    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)

    nested: ClassVar[dict[str, Any]] = {}

    @classmethod
    def from_dict(cls: type[Own], data: Mapping[str, Any]) -> Own:
        """Of a mapping, nested ones included.

        Raises:
            SchemaError: a required key is missing, a value cannot be, or a key is misspelt.
        """
        if not isinstance(data, Mapping):
            raise SchemaError(f"{cls.__name__} must be made of a mapping, got {data!r}")
        known = {f.name: f for f in fields(cls) if f.name != "extra"}
        given: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in data.items():
            if key in known:
                kind = cls.nested.get(key)
                given[key] = kind.of(value) if kind and isinstance(value, Mapping) else value
            elif close := difflib.get_close_matches(str(key), known, 1, 0.85):
                raise SchemaError(f"{cls.__name__} has no {key!r}; did you mean {close[0]!r}?")
            else:
                extra[str(key)] = value
        for name, f in known.items():
            if name not in given and f.default is MISSING and f.default_factory is MISSING:
                raise SchemaError(f"{cls.__name__} needs {name!r}, got {list(data)}; add it")
        return cls(**given, extra=extra)

    @classmethod
    def of(cls: type[Own], given: Any) -> Own:
        """Of a configuration, a mapping, or any object with these attributes."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            names = [f.name for f in fields(cls) if hasattr(given, f.name) and f.name != "extra"]
            if not names:
                raise SchemaError(
                    f"{cls.__name__} must be given as such or as a mapping, got {given!r}"
                )
            given = {name: getattr(given, name) for name in names}
        return cls.from_dict(given)

    @classmethod
    def load_yaml(cls: type[Own], path: str | os.PathLike[str]) -> Own:
        """Of a YAML file.

        Raises:
            MissingExtraError: PyYAML is not installed.
        """
        loaded = _yaml().safe_load(Path(path).read_text(encoding="utf-8"))
        return cls.from_dict({} if loaded is None else loaded)

    @classmethod
    def from_omegaconf(cls: type[Own], config: Any) -> Own:
        """Of an OmegaConf configuration, resolved."""
        from omegaconf import OmegaConf  # it is there if there is such a configuration

        return cls.from_dict(OmegaConf.to_container(config, resolve=True))

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        plain = {k: v.to_dict() if isinstance(v, Config) else v for k, v in own.items()}
        return {**plain, **self.extra}

    def to_yaml(self) -> str:
        """The same as YAML text."""
        return str(_yaml().safe_dump(self.to_dict(), sort_keys=False))

    def get(self, name: str, default: Any = None) -> Any:
        """A value by its key, extra ones included."""
        known = {f.name for f in fields(self)} - {"extra"}
        return getattr(self, name) if name in known else self.extra.get(name, default)

    def __getitem__(self, name: str) -> Any:
        known = {f.name for f in fields(self)} - {"extra"}
        return getattr(self, name) if name in known else self.extra[name]

    def __getattr__(self, name: str) -> Any:
        extra = self.__dict__.get("extra", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


@dataclass
class SamplerConfig(Config):
    """Which sampler a buffer makes for itself.

    Attributes:
        type: "uniform", "all", "batch" or "prioritized".
        seed: any integer; the same one gives the same draws.
        alpha, beta, eps: of "prioritized", see `expstore.Prioritized`.
    """

    type: str
    seed: int = 0
    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_choice("sampler.type", self.type, ("uniform", "all", "batch", "prioritized"))


@dataclass
class StorageConfig(Config):
    """Where a buffer keeps its episodes.

    Attributes:
        mode: "circular": whole oldest episodes leave; "fixed": a full buffer refuses.
        type: "unified"; stores of several writers are read as one by `expstore.open([...])`.
        unit: "transition" or "episode": of `size`, indices and batches.
        device: "cpu", "cuda" or "cuda:1": where postprocessing runs and batches come.
        path: the store's directory; None for a temporary one.
        commit_interval_s: seconds between two durable commits.
        journal: write the rows of open episodes down, so that a kill does not lose them.
    """

    mode: str = "circular"
    type: str = "unified"
    unit: str = "transition"
    device: str = "cpu"
    path: str | None = None
    commit_interval_s: float = 5.0
    journal: bool = False

    def __post_init__(self) -> None:
        _check_choice("storage.mode", self.mode, ("circular", "fixed"))
        _check_choice("storage.unit", self.unit, ("transition", "episode"))
        _check_choice("storage.device", str(self.device).split(":")[0], ("cpu", "cuda"))
        if self.type == "sharded":
            raise SchemaError(
                "storage.type must be 'unified', got 'sharded'; give each writer a buffer with a "
                "path of its own, and read them as one with expstore.open([...])"
            )
        _check_choice("storage.type", self.type, ("unified",))
        if self.path is not None:
            self.path = os.fspath(self.path)


@dataclass
class BufferConfig(Config):
    """A whole buffer.

    Attributes:
        type: a name registered in `BUFFERS`: "ReplayBuffer", "RolloutBuffer" or your own.
        capacity: transitions.
        sampler: None for the usual one: uniform for a ReplayBuffer, all for a RolloutBuffer.
        auto_truncate_episode: an episode ends by itself with its flag.
        storage: see `StorageConfig`.

    >>> config = BufferConfig.from_dict({"type": "ReplayBuffer", "capacity": 1000})
    >>> config.storage.unit, config.sampler
    ('transition', None)
    """

    type: str
    capacity: int
    sampler: SamplerConfig | None = None
    auto_truncate_episode: bool = False
    storage: StorageConfig = field(default_factory=StorageConfig)
    node_affinity_env: bool = False
    node_affinity_train: bool = False

    nested: ClassVar[dict[str, Any]] = {"sampler": SamplerConfig, "storage": StorageConfig}

    def __post_init__(self) -> None:
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int):
            raise SchemaError(f"capacity must be an integer, got {self.capacity!r}")
        if self.capacity < 1:
            raise SchemaError(f"capacity must be at least 1, got {self.capacity}")
        if not isinstance(self.type, str):
            raise SchemaError(f"type must be a registered name, got {self.type!r}")
        if self.sampler is not None:
            sampler: Any = self.sampler
            given = {"type": sampler} if isinstance(sampler, str) else sampler
            self.sampler = SamplerConfig.of(given)
        self.storage = StorageConfig.of(self.storage)


@dataclass
class MainConfig(Config):
    """The entry configuration: modules to import, and the buffer.

    The modules are imported before anything is resolved, so that what they register can be
    named as `buffer.type`.
    """

    buffer: BufferConfig | None = None
    imports: list[str] = field(default_factory=list)

    nested: ClassVar[dict[str, Any]] = {"buffer": BufferConfig}

    def __post_init__(self) -> None:
        import_modules(self.imports)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SchemaError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"YAML needs PyYAML; {how_to_install('yaml')}; or give a dict to from_dict"
        ) from error
    return yaml
