"""Sequence: windows of consecutive steps around anchors, with masks that say what they hold."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from expstore.errors import AnchorShapeError, FieldNotFoundError, SchemaError
from expstore.sampling.anchors import Anchors, describe_windows
from expstore.sampling.ring import DoneKey, Ring
from expstore.sampling.window import Integers, WindowPlan, WindowShape, check_positions
from expstore.spans import Spans

_LARGEST_SPAN = 2**61  # so that no position plus offset leaves 64 bits
_EPISODE_ENDS = (("next", "done"), ("done",), "done")


@dataclass(frozen=True)
class Sequence:
    """The unit that makes a window of ``burn_in + length + bootstrap`` records of an anchor.

    Record k is the step ``(k - burn_in) * dilation`` away from the anchor. Records that would
    leave the anchor's episode repeat its nearest step and are marked invalid.

    Args:
        length: Records of the learning region, the first one at the anchor.
        episode_boundary: ``"pad"``: as above. ``"stop"``: where the episode ends too early,
            the window slides back so that it ends with the episode, at most to the episode's
            first step. ``"include_reset"``: windows run across episodes, bounded only by what
            was recorded (the write seam of a ring, the first and last step of a store).
        done_key: The flags that end an episode: ``("next", "done")`` and ``"done"`` are a
            store's episodes, another key bounds by exactly that field where it is not zero
            (``("info", "life_lost")``, a leading ``"next"`` is left out), None by nothing but
            what was recorded. A list becomes a tuple.
        burn_in: Records before the learning region; they never make a window slide.
        bootstrap: Records after the learning region.
        dilation: Steps between two records.

    Raises:
        SchemaError: An argument is out of range.
        TypeError: A length is not an int, or ``done_key`` not a key.

    >>> index, info = Sequence(length=3, burn_in=1).expand(
    ...     np.array([5]), {}, Ring(np.array([0, 0, 0, 0, 1, 0, 0]), newest=6, is_full=True))
    >>> index.tolist(), info["validity_mask"].tolist(), info["learning_mask"].tolist()
    ([5, 5, 6, 6], [False, True, True, False], [False, True, True, True])
    """

    length: int
    episode_boundary: Literal["pad", "stop", "include_reset"] = "pad"
    done_key: DoneKey = ("next", "done")
    burn_in: int = 0
    bootstrap: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        self._check_int("length", 1, "strictly positive")
        if self.episode_boundary not in ("pad", "stop", "include_reset"):
            raise SchemaError(f"Unknown episode_boundary {self.episode_boundary}")
        self._check_int("burn_in", 0, "non-negative")
        self._check_int("bootstrap", 0, "non-negative")
        self._check_int("dilation", 1, "strictly positive")
        object.__setattr__(self, "done_key", _as_key(self.done_key))
        if self.window * self.dilation > _LARGEST_SPAN:
            raise SchemaError(f"a window may span 2**61 steps, got {self.window * self.dilation}")

    def _check_int(self, name: str, lowest: int, rule: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")
        number = operator.index(value)
        if number < lowest:
            raise SchemaError(f"{name} must be {rule}, got {number}.")
        object.__setattr__(self, name, number)

    @property
    def window(self) -> int:
        """Number of records in a window, W."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def offsets(self) -> Integers:
        """(W,) distance in steps of each record from the anchor."""
        return self.shape.offsets

    @cached_property
    def learning(self) -> NDArray[np.bool_]:
        """(W,) which records belong to the learning region."""
        record = np.arange(self.window)
        return (record >= self.burn_in) & (record < self.burn_in + self.length)

    @cached_property
    def shape(self) -> WindowShape:
        """The integers of the window rule."""
        reach = self.dilation * (self.length + self.bootstrap - 1)
        need = reach if self.episode_boundary == "stop" else 0
        return WindowShape(self.window, self.burn_in, self.dilation, need)

    def plan(
        self, spans: Spans, anchors: Integers, boundaries: Integers | None = None
    ) -> WindowPlan:
        """Lay the window over each anchor, in O(log episodes) per anchor and without flags.

        Args:
            spans: The selected steps.
            anchors: (B,) positions in them.
            boundaries: Sorted last positions of the stretches that bound the windows, in
                place of the episodes; they are not read for ``"include_reset"``.

        Raises:
            StepRangeError: An anchor is not a position of ``spans``.
            FieldNotFoundError: ``done_key`` is a field, and its boundaries are not given.

        >>> spans = Spans.laid_out(start=np.array([0, 5]), length=np.array([5, 7]))
        >>> Sequence(length=3).plan(spans, np.array([4])).steps.tolist()
        [[4, 4, 4]]
        """
        anchors = np.asarray(anchors, np.int64)
        return WindowPlan(*self._laid(spans, anchors, boundaries, are_steps=False))

    def expand(self, index: Any, info: dict[str, Any], storage: Any) -> tuple[Any, dict[str, Any]]:
        """The records of every window, flat, and what each of them is.

        Args:
            index: (B,) anchors: rows of a ring, or step numbers of a store. For a ring with
                lanes a tuple of D arrays (B,), or (B, D). Arrays, lists or torch tensors.
            info: What the sampler says about its anchors; it is not changed.
            storage: A ``Ring``, or a store or view (anything with ``spans``).

        Returns:
            The (B * W,) rows or steps to read (a tuple of coordinates for lanes), and ``info``
            with one row per record: ``index``, ``anchor_index`` (before any slide back),
            ``validity_mask``, ``learning_mask``, ``sequence_id``, ``step_in_sequence``, and
            every entry that came with its rows repeated. Tensors, on the anchors' device, if
            the anchors are tensors, arrays otherwise.

        Raises:
            StepRangeError: An anchor is not in the storage.
            AnchorShapeError: The anchors have another number of coordinates than the storage.
            FieldNotFoundError: The storage has no ``done_key``.
            TypeError: The storage, an anchor or an entry of ``info`` is of no use.
        """
        anchors = Anchors.read(index)
        steps, valid = self._records_of(storage, anchors)
        described = describe_windows(anchors, steps, valid, self.learning, info)
        return described["index"], described

    def _records_of(self, storage: Any, anchors: Anchors) -> tuple[Integers, NDArray[np.bool_]]:
        """(B, W) steps, or rows of a ring, and which of them are valid."""
        if isinstance(storage, Ring):
            crosses = self.episode_boundary == "include_reset"
            plan = storage.plan(self.shape, anchors.coordinates, self.done_key, not crosses)
            return plan.steps, plan.valid
        spans = getattr(storage, "spans", None)
        spans = spans() if callable(spans) else spans
        if not isinstance(spans, Spans):
            raise TypeError(
                f"Sequence needs a store, a view or a Ring, got {type(storage).__name__}; wrap "
                "the end flags of another storage (a TensorStorage of a TensorDict, say) in "
                "expstore.Ring"
            )
        if len(anchors.coordinates) > 1:
            raise AnchorShapeError(
                "Multidimensional anchors must have shape [batch, storage.ndim]. "
                f"Got D = {len(anchors.coordinates)} for a store, whose steps have one number"
            )
        steps, valid, _ = self._laid(
            spans, anchors.coordinates[0], self.boundaries_in(storage), are_steps=True
        )
        return steps, valid

    @property
    def _reads_field(self) -> bool:
        runs_along = self.episode_boundary == "include_reset" or self.done_key is None
        return not runs_along and self.done_key not in _EPISODE_ENDS

    def boundaries_in(self, storage: Any) -> Integers | None:
        """What ``plan`` has to know of a storage besides its spans; None in most cases.

        Args:
            storage: A store or view. If ``done_key`` is a field, it must have a method
                ``boundaries`` that gives the ascending positions at which a key is true.

        Raises:
            FieldNotFoundError: The storage has no ``done_key``.
        """
        if not self._reads_field:
            return None
        if not hasattr(storage, "boundaries"):
            raise FieldNotFoundError(
                f"{type(storage).__name__} cannot say where the field {self.done_key!r} is true; "
                "use done_key=('next', 'done') for its episodes"
            )
        return cast(Integers, storage.boundaries(self.done_key))

    def edges_in(self, storage: Any) -> Integers:
        """Ascending positions at which the stretches begin that windows of a storage lie in.

        See ``boundaries_in`` for the argument and the errors.
        """
        edges, shift = self._edges(storage.spans, self.boundaries_in(storage))
        return edges + max(shift, 0)

    def _laid(
        self,
        spans: Spans,
        anchors: Integers,
        boundaries: Integers | None,
        *,
        are_steps: bool,
    ) -> tuple[Integers, NDArray[np.bool_], Integers]:
        """(B, W) steps, their validity, and their positions unless anchors are steps."""
        from expstore.sampling import kernels

        edges, shift = self._edges(spans, boundaries)
        shape = self.shape
        out = (len(anchors), shape.num_records)
        steps, valid = np.empty(out, np.int64), np.empty(out, np.bool_)
        positions = np.empty((0, 0) if are_steps else out, np.int64)
        bad = kernels.plan_spans(
            anchors, are_steps, spans.start, spans.first, spans.length, spans.streams,
            edges, shift, shape.burn_in, shape.dilation, shape.need, steps, valid, positions,
        )  # fmt: skip
        if bad >= 0:
            (spans.positions_of if are_steps else lambda at: check_positions(spans, at))(anchors)
        return steps, valid, positions

    def _edges(self, spans: Spans, boundaries: Integers | None) -> tuple[Integers, int]:
        """What bounds the windows, as the kernel takes it: see there."""
        if self.episode_boundary == "include_reset" or (
            self.done_key is None and boundaries is None
        ):
            return spans.streams, 0
        if boundaries is not None:
            return np.ascontiguousarray(boundaries, np.int64), 1
        if self._reads_field:
            raise FieldNotFoundError(f"the boundaries of done_key {self.done_key!r} were not given")
        return spans.first, -1


def _as_key(key: Any) -> DoneKey:
    """A key as a string, a tuple or None; lists come from configuration files."""
    if key is None or isinstance(key, str):
        return key
    path = tuple(key) if isinstance(key, Iterable) else ()
    if not path or not all(isinstance(name, str) for name in path):
        raise TypeError(f"done_key must be a string, a tuple of strings or None, got {key!r}.")
    return path


@dataclass
class SequenceConfig:
    """The arguments of a ``Sequence`` for Hydra, which builds it from ``_target_``.

    >>> SequenceConfig(length=4)._target_
    'expstore.Sequence'
    """

    length: int
    episode_boundary: str = "pad"
    done_key: Any = field(default=("next", "done"))
    burn_in: int = 0
    bootstrap: int = 0
    dilation: int = 1
    _target_: str = "expstore.Sequence"
