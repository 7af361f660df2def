"""What a sampler's anchor stands for: single steps, windows, and what is made of their records."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.sampling.window import WindowPlan
from expstore.schema import Field, Schema
from expstore.spans import Spans

if TYPE_CHECKING:
    from expstore.loading.rows import Records


class Unit(Protocol):
    """Makes the steps of a batch of its anchors."""

    @property
    def window(self) -> int:
        """W, records per anchor."""
        ...

    @property
    def learning(self) -> NDArray[np.bool_]:
        """(W,) which records belong to the learning region."""
        ...

    def plan(self, spans: Spans, anchors: NDArray[np.int64]) -> WindowPlan:
        """Lay the window over anchors (B,), which are positions."""
        ...


@dataclass(frozen=True)
class Step:
    """Single steps: fields come as (B, *shape), info as (B,).

    >>> Step().window
    1
    """

    @property
    def window(self) -> int:
        return 1

    @property
    def learning(self) -> NDArray[np.bool_]:
        return np.ones(1, bool)

    def plan(self, spans: Spans, anchors: NDArray[np.int64]) -> WindowPlan:
        """The anchors themselves, as windows (B, 1)."""
        steps = spans.steps_at(anchors)[:, None]
        return WindowPlan(steps, np.ones(steps.shape, bool), anchors[:, None])


class Layer:
    """A unit around another one: the same records, of which it makes something else.

    However layers are nested, they are laid over each other by `order`, lowest first, so that
    `Stack(4, unit=NStep(3, 0.99))` and `NStep(3, 0.99, unit=Stack(4))` are the same.
    """

    order: ClassVar[int]
    unit: Unit

    @property
    def window(self) -> int:
        """W, records per anchor."""
        return self.unit.window

    @property
    def learning(self) -> NDArray[np.bool_]:
        """(W,) which records belong to the learning region."""
        return self.unit.learning

    def plan(self, spans: Spans, anchors: NDArray[np.int64]) -> WindowPlan:
        """The windows of the unit inside."""
        return self.unit.plan(spans, anchors)

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What a batch holds of the fields that were asked for.

        Raises:
            FieldNotFoundError: there is no field that the unit needs.
            SchemaError: a field of no use to it.
        """
        raise NotImplementedError

    def apply(self, records: Records) -> Records:
        """The same records, read another way."""
        raise NotImplementedError


def base_of(unit: Unit) -> Unit:
    """The unit within all layers, which says what the records are.

    >>> base_of(Step())
    Step()
    """
    while isinstance(unit, Layer):
        unit = unit.unit
    return unit


def layers_of(unit: Unit) -> list[Layer]:
    """The layers around it, in the order in which they are laid."""
    layers = []
    while isinstance(unit, Layer):
        layers.append(unit)
        unit = unit.unit
    return sorted(reversed(layers), key=lambda layer: layer.order)


def check_unit(unit: Any) -> None:
    """Refuse what is no unit, also within another one."""
    if isinstance(unit, type) or not hasattr(unit, "plan"):
        raise SchemaError(f"unit must be Step(), Sequence(length=...) or the like, got {unit!r}")


def check_once(layer: Layer) -> None:
    """Refuse a layer around no unit, or around one of its own kind."""
    check_unit(layer.unit)
    kind = type(layer)
    if any(isinstance(other, kind) for other in layers_of(layer.unit)):
        raise SchemaError(f"{kind.__name__} is around another {kind.__name__}; leave one out")


def as_count(name: str, value: Any, least: int = 1) -> int:
    """An integer of at least `least`, also one of numpy's."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise SchemaError(f"{name} must be an integer of at least {least}, got {value!r}")
    return operator.index(value)


def as_share(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    try:
        number = float("nan") if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1:
        raise SchemaError(f"{name} must be a number from 0 to 1, got {value!r}")
    return number
