"""A function that runs on each finished episode before it is appended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import NONE, end_of, flatten, is_ragged, nest, to_array
from expstore.errors import PostprocessError, SchemaError
from expstore.schema import FLAGS, Field
from expstore.storage.fingerprint import fingerprint

POSTPROCESS_KEY = "postprocess"  # of an episode's metadata: what ran on it
Function = Callable[["FinishedEpisode"], Mapping[str, Any]]


class FinishedEpisode(dict[str, Any]):
    """An episode as it was given, nested, for a postprocess function to read and to change.

    Columns of numbers are numpy arrays (T, *shape), copies of what the caller has; any of them
    may have one row more, which is of the time after the last step. Texts, other columns of
    varying length, and torch's bfloat16 stay what they were.

    Attributes:
        end_reason: "terminated", "truncated", "cut" or "incomplete".
        metadata: of the episode; what a function changes in it is stored.
    """

    def __init__(
        self, fields: Mapping[str, Any], end_reason: str = "cut", metadata: Any = None
    ) -> None:
        super().__init__(fields)
        self.end_reason = end_reason
        self.metadata: dict[str, Any] = {} if metadata is None else metadata


class Postprocess:
    """Runs one function on episode after episode, and says so in their metadata.

    Args:
        function: from a `FinishedEpisode` to the fields that are to be stored.

    Attributes:
        name: what ran, with its parameters if it is a dataclass, and a digest of its source.
    """

    def __init__(self, function: Function | Any) -> None:
        if not callable(function) or isinstance(function, type):
            raise SchemaError(
                f"postprocess must be a function from an episode to its fields, got {function!r}"
            )
        self.name = fingerprint(function)
        if is_dataclass(function):
            name, _, digest = self.name.partition("#")
            self.name = f"{name.partition(':')[0]}:{function!r}#{digest}"
        self._function = function

    def __call__(
        self,
        data: Mapping[str, Any],
        end_reason: str | None,
        metadata: Mapping[str, Any],
        where: str,
        known: Mapping[str, Field] = NONE,
    ) -> tuple[Mapping[str, Any], str, dict[str, Any]]:
        """The fields, the end reason and the metadata that are to be stored.

        Args:
            known: fields of the store; as for `Columns.of`.

        Raises:
            SchemaError: the episode itself is none.
            PostprocessError: names the function and `where` ("in episode 12").
        """
        if POSTPROCESS_KEY in metadata:
            raise SchemaError(
                f"metadata {POSTPROCESS_KEY!r} {where} says what ran on the episode; rename it"
            )
        fields = {
            name: _given(name, value, where, known)
            for name, value in flatten(data, where, known).items()
        }
        reason = end_of({flag: fields[flag] for flag in FLAGS if flag in fields}, where, end_reason)
        episode = FinishedEpisode(nest(fields), reason, dict(metadata))
        try:
            made = self._function(episode)
        except Exception as error:
            raise self._failed(where, f"{type(error).__name__}: {error}") from error
        if not isinstance(made, Mapping):
            raise self._failed(where, f"it must return the fields, got {type(made).__name__}")
        return made, reason, {**episode.metadata, POSTPROCESS_KEY: self.name}

    def _failed(self, where: str, why: str) -> PostprocessError:
        return PostprocessError(
            f"postprocess {self.name} failed {where}: {why}; nothing was written: mend the "
            "function or the episode and append it again"
        )


def _given(name: str, value: Any, where: str, known: Mapping[str, Field]) -> Any:
    """A column of numbers as an array of the function's own; all others as they came."""
    if is_ragged(value, known.get(name.removeprefix("next_"))):
        return value
    array, dtype = to_array(value, f"field {name!r} {where}")
    if dtype == "bfloat16":
        return value
    if not array.ndim or not len(array):
        raise SchemaError(f"field {name!r} {where} must have one row per step, got {value!r}")
    own: NDArray[Any] = np.array(array)
    return own
