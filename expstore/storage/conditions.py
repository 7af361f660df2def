"""Condition: which episodes are meant, as a text of a fixed small grammar.

    condition  = comparison { "and" comparison }
    comparison = name operator literal
    operator   = "<" | "<=" | ">" | ">=" | "==" | "!="
    literal    = number | string in quotes | "true" | "false" | "null"

Nothing of it is ever evaluated as a program.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError, SchemaError
from expstore.storage.table import Episodes

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
EXAMPLE = """return < 10 and policy == "sac" """.strip()
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<operator><=|>=|==|!=|<|>)
      | (?P<number>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf\b|nan\b))
      | (?P<string>"(?:[^"\\]|\\.)*"|'[^'\\]*')
      | (?P<name>[A-Za-z_][A-Za-z0-9_./-]*)
    )""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "null": None}
_MISSING = object()
_SHAPE = (("name",), ("operator",), ("number", "string", "name"), ("name",))  # the last is `and`


@dataclass(frozen=True)
class Comparison:
    """One comparison of a column of the table, or of a key of the metadata, with a literal."""

    name: str
    operator: str
    literal: Any  # int, float, str, bool or None

    def of_column(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """(E,) whether it holds for each value of a column of numbers or strings."""
        if values.ndim > 1:
            raise SchemaError(
                f"{self.name!r} has shape {values.shape[1:]} in each episode and cannot be "
                "compared; give delete a function of the episode's row"
            )
        example = values[0].item() if len(values) else self.literal
        if self._is_comparable(example):
            return np.asarray(OPERATORS[self.operator](values, self.literal), np.bool_)
        return np.full(len(values), self._of_others(example, "the episodes"))

    def of_value(self, value: Any, where: str) -> bool:
        """Whether it holds for one value; never for one that is missing, unless null is meant."""
        if self.literal is None:
            is_null = value is None or value is _MISSING
            return is_null == (self.operator == "==")
        if value is None or value is _MISSING:
            return False
        if self._is_comparable(value):
            return bool(OPERATORS[self.operator](value, self.literal))
        return self._of_others(value, where)

    def _is_comparable(self, value: Any) -> bool:
        return _kind(value) == _kind(self.literal) != "other"

    def _of_others(self, value: Any, where: str) -> bool:
        if self.operator in ("==", "!=") and _kind(value) != "other":
            return self.operator == "!="
        raise SchemaError(
            f"{self.name!r} of {where} is {value!r}, which {self.operator} cannot compare with "
            f"{self.literal!r}; compare it with a {_kind(value)}"
            if _kind(value) != "other"
            else f"{self.name!r} of {where} is no single value and cannot be compared; give "
            "delete a function of the episode's row"
        )


@dataclass(frozen=True)
class Condition:
    """Comparisons that must all hold."""

    comparisons: tuple[Comparison, ...]

    @staticmethod
    def parse(text: str) -> Condition:
        """Read a condition.

        Raises:
            SchemaError: it is none; the text says where it stops being one.

        >>> Condition.parse("return < 10 and policy == 'sac'").comparisons[1]
        Comparison(name='policy', operator='==', literal='sac')
        """
        return Condition(tuple(_comparisons(text, _tokens(text))))

    def mask(self, episodes: Episodes) -> NDArray[np.bool_]:
        """(E,) for which episodes of a table it holds.

        Raises:
            SchemaError: values that cannot be compared.
            FieldNotFoundError: a name that no episode has.
        """
        masks = [self._mask_of(comparison, episodes) for comparison in self.comparisons]
        return np.asarray(np.logical_and.reduce(masks), np.bool_)

    def _mask_of(self, comparison: Comparison, episodes: Episodes) -> NDArray[np.bool_]:
        name = comparison.name
        if name in episodes.columns and name not in ("seed", "metadata"):
            return comparison.of_column(np.asarray(episodes[name]))
        mask, is_known = np.zeros(len(episodes), bool), name == "seed"
        for at, row in enumerate(episodes):
            value = row["seed"] if name == "seed" else _looked_up(row["metadata"], name)
            is_known = is_known or value is not _MISSING
            mask[at] = comparison.of_value(value, f"episode {row['number']}")
        if len(episodes) and not is_known:
            raise FieldNotFoundError(
                f"no episode has {name!r}; there is {', '.join(episodes.columns)}, and what the "
                "metadata brings"
            )
        return mask


def _looked_up(metadata: Mapping[str, Any], name: str) -> Any:
    """A key of the metadata; `a.b` is the key `b` of what stands at `a`, unless there is `a.b`."""
    if name in metadata:
        return metadata[name]
    found: Any = metadata
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "other"


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """Kind, spelling and place of each token."""
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, at, _hint(text, at, ""))
        kind = match.lastgroup
        assert kind is not None
        tokens.append((kind, match[kind], match.start(kind)))
        at = match.end()
    return tokens


def _comparisons(text: str, tokens: Sequence[tuple[str, str, int]]) -> list[Comparison]:
    found: list[Comparison] = []
    for first in range(0, max(1, len(tokens)), 4):
        part = tokens[first : first + 4]
        for at, allowed in enumerate(_SHAPE):
            if at == len(part) == 3 and first + 3 == len(tokens):
                break  # nothing follows the last one
            if at >= len(part) or part[at][0] not in allowed:
                place = part[at][2] if at < len(part) else len(text)
                raise _error(text, place, _hint(text, place, allowed[0]))
        if len(part) == 4 and (part[3][1] != "and" or first + 4 == len(tokens)):
            raise _error(text, part[3][2], _hint(text, part[3][2], "and"))
        (_, name, _), (_, sign, _), literal = part[:3]
        found.append(Comparison(name, sign, _literal(text, *literal)))
    return found


def _literal(text: str, kind: str, spelled: str, at: int) -> Any:
    if kind == "name":
        if spelled not in _WORDS:
            raise _error(text, at, f"; put quotes around {spelled}, if it is a text")
        return _WORDS[spelled]
    if kind == "number":
        return int(spelled) if re.fullmatch(r"[+-]?\d+", spelled) else float(spelled)
    if spelled[0] == "'":
        return spelled[1:-1]
    try:
        return json.loads(spelled)
    except ValueError:
        raise _error(text, at) from None


def _hint(text: str, at: int, expected: str) -> str:
    rest = text[at:].lstrip()
    if rest.startswith("="):
        return "; write == to compare"
    if rest.startswith("&") or rest[:3].lower() == "and":
        return "; join comparisons by a small and"
    if rest.startswith("|") or rest[:3].lower() == "or ":
        return "; there is no or: filter twice, or give a function of the episode's row"
    if expected == "name" and rest:
        return "; a comparison begins with the name of a column or of a key of the metadata"
    return ""


def _error(text: str, at: int, hint: str = "") -> SchemaError:
    rest = text[at:].strip()[:40]
    what = f"is no condition from {rest!r} on" if rest else "is no condition, it ends too early"
    return SchemaError(f"{text!r} {what}: it must be like {EXAMPLE}{hint}")
