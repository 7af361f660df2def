"""Mixture: batches whose anchors come from several stores in fixed shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.sampling.draw import Draw, Sampler, check_batch, check_state, fold
from expstore.sampling.prioritized import Prioritized
from expstore.sampling.runs import STREAM_BITS
from expstore.sampling.uniform import Uniform
from expstore.sampling.updates import check_update
from expstore.spans import Spans

_FINEST = 10**9  # shares are understood as fractions with denominators up to this


class Shares:
    """How many anchors of each batch come from each part.

    The shares are exact over time: the counts depend on how many anchors were drawn before,
    so that after any number of batches each part has had its share of all of them, rounded.
    (The first part is rounded, the second gets its share of what is left, and so on; since
    every running count only grows, no count is negative, and nothing must be remembered.)

    Args:
        shares: The share of each part, positive, 1 in all.

    Raises:
        SchemaError: No parts, or shares that are not so.

    >>> shares = Shares([0.5, 0.25, 0.25])
    >>> [shares.counts(num_drawn, 3) for num_drawn in (0, 3, 6, 9)]
    [[2, 1, 0], [1, 1, 1], [2, 0, 1], [1, 1, 1]]
    """

    def __init__(self, shares: list[float]) -> None:
        for share in shares:
            if not 0 < share <= 1:
                raise SchemaError(f"a share must be above 0 and at most 1, got {share}")
        if not math.isclose(math.fsum(shares), 1, abs_tol=1e-6):
            raise SchemaError(f"the shares must sum to 1, got {math.fsum(shares):g} from {shares}")
        exact = [Fraction(share).limit_denominator(_FINEST) for share in shares]
        rest = [sum(exact[k:], Fraction(0)) for k in range(len(exact))]
        # of what the parts before have left
        self._parts = [share / left for share, left in zip(exact, rest, strict=True)]
        self.names = [str(share / rest[0]) for share in exact]

    def counts(self, num_drawn: int, batch_size: int) -> list[int]:
        """One count per part, ``batch_size`` in all, after ``num_drawn`` anchors."""
        before, after = self._running(num_drawn), self._running(num_drawn + batch_size)
        return [b - a for a, b in zip(before, after, strict=True)]

    def _running(self, num_drawn: int) -> list[int]:
        counts, left = [], num_drawn
        for part in self._parts:
            counts.append(math.floor(left * part + Fraction(1, 2)))
            left -= counts[-1]
        return counts


@runtime_checkable
class Member(Protocol):
    """A store, view or union that a mixture draws a share from."""

    def identities(self) -> list[dict[str, Any]]:
        """For each of its stores a dict with ``path``, ``store_id``, ``commit``, ``selection``."""
        ...


class Mixture:
    """Draws from several parts of a union in fixed shares, each part by a sampler of its own.

    A part is one store of the union, or several in a row. The anchors of a batch come part by
    part, in the order of ``shares``. Parts are given by any names, or as the stores themselves:
    then ``Replay`` makes sure that they are the parts of what it draws from. The mixture keeps
    what identifies a store and not the store, which would keep its evicted files.

    Args:
        shares: The share of each part in the anchors, by its name or store; 1 in all. Names say
            nothing of which store a part is: the n-th share is that of the n-th store.
        samplers: By the same keys; ``Uniform()`` where there is none. Each serves this only.
        num_streams: How many stores of the union each named part has, by the same names; 1
            where there is none.

    Attributes:
        shares: By name; the name of a store is its path, with a number if that is there already.
        samplers: By name, too.

    Raises:
        SchemaError: Shares that do not sum to 1, or a name that is not among them.

    >>> parts = [Spans.laid_out(np.array([start]), np.array([9])) for start in (0, 2**40)]
    >>> mixture = Mixture({"offline": 0.25, "online": 0.75})
    >>> draw = mixture.draw(Spans.concatenate(parts), batch_size=4, seed=0)
    >>> (draw.anchors < 9).tolist()
    [True, False, False, False]
    """

    def __init__(
        self,
        shares: Mapping[Any, float],
        samplers: Mapping[Any, Sampler] | None = None,
        num_streams: Mapping[Any, int] | None = None,
    ) -> None:
        samplers, num_streams = samplers or {}, num_streams or {}
        _check_names(shares, samplers, num_streams)
        names = _names_of(shares)
        self.shares = {names[key]: share for key, share in shares.items()}
        self.samplers: dict[Any, Sampler] = {
            names[key]: samplers[key] if key in samplers else Uniform() for key in shares
        }
        self._members = [key.identities() if isinstance(key, Member) else None for key in shares]
        self.num_drawn = 0
        self._counts = Shares(list(self.shares.values()))
        sizes = [
            num_streams.get(key, 1) if member is None else len(member)
            for key, member in zip(shares, self._members, strict=True)
        ]
        self._streams = np.cumsum([0, *sizes])
        self._spans: Spans | None = None  # of which _parts are the parts
        self._parts: list[Spans] = []

    def __repr__(self) -> str:
        return f"Mixture({self.shares}, {self.samplers})"

    def check_union(self, identities: list[dict[str, Any]]) -> None:
        """Refuse a selection that is not made of the stores given as keys, in their order.

        Args:
            identities: Of the selection, as of a ``Member``.

        Raises:
            SchemaError: Another store, another view of it, or another number of stores; or a
                name that is the path of a store in another place.
        """
        if len(identities) != self._streams[-1]:
            raise SchemaError(self._of_other_stores(len(identities)))
        for k, (name, member) in enumerate(zip(self.shares, self._members, strict=True)):
            found = identities[self._streams[k] : self._streams[k + 1]]
            where = ", ".join(str(one["path"]) for one in found)
            if member is None:
                is_elsewhere = any(_is_path(name, one) for one in identities)
                if is_elsewhere and not any(_is_path(name, one) for one in found):
                    raise SchemaError(
                        f"part {name} of the mixture is the path of another store than the one in "
                        f"its place, {where}; give the stores themselves as keys, or name them in "
                        "the order of the union"
                    )
            elif not all(map(_is_same, member, found)):
                is_view = [one["store_id"] for one in member] == [one["store_id"] for one in found]
                what = "another view of" if is_view else "not"
                raise SchemaError(
                    f"part {name} of the mixture is {what} what stands in its place in the union, "
                    f"{where}; give Replay expstore.union of the same stores and views in the "
                    "order of the mixture"
                )

    def _of_other_stores(self, num_stores: int) -> str:
        return (
            f"the mixture is of {int(self._streams[-1])} stores, the selection of {num_stores}; "
            "give num_streams for parts of several stores, and Replay the union of all of them"
        )

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """See ``Sampler.draw``; a part that has its epoch end goes on with its next one.

        Raises:
            StepRangeError: A part that is to be drawn from holds no step.
            SchemaError: ``spans`` is a union of another number of stores.
        """
        check_batch(spans, batch_size)
        parts = self._parts_of(spans)
        counts = self._counts.counts(self.num_drawn, batch_size)
        for name, part, count in zip(self.shares, parts, counts, strict=True):
            if count and not part.num_steps:
                raise StepRangeError(
                    f"part {name} of the mixture holds no step to draw from; append an episode to "
                    "it and commit() it, or draw from the other parts alone until then"
                )
        draws = []
        for k, (name, count) in enumerate(zip(self.shares, counts, strict=True)):
            first = int(spans.streams[self._streams[k]])
            share = self.shares[name]
            while count:
                draw = self.samplers[name].draw(parts[k], count, fold(seed, k))
                draws.append(Draw(draw.anchors + first, draw.probability * share, draw.weight))
                count -= len(draw.anchors)
        self.num_drawn += batch_size
        return Draw(
            np.concatenate([draw.anchors for draw in draws]),
            np.concatenate([draw.probability for draw in draws]),
            np.concatenate([draw.weight for draw in draws]),
        )

    def update(self, spans: Spans, steps: NDArray[np.int64], priority: NDArray[Any]) -> None:
        """Give steps new priorities; those of parts that are not `Prioritized` are not needed.

        Raises:
            StepRangeError: A step of no part; see `Prioritized.update` for everything else. No
                priority of any part has changed.
        """
        steps, priority = check_update(steps, priority)
        part = np.searchsorted(self._streams, steps >> STREAM_BITS, side="right") - 1
        if (wrong := (part < 0) | (part >= len(self.shares))).any():
            at = int(np.flatnonzero(wrong)[0])
            raise StepRangeError(
                f"steps[{at}] is {int(steps[at])}, a step of no part of the mixture; give step "
                "numbers as in a batch's anchor_index"
            )
        writes = []
        for k, (spans_of_part, sampler) in enumerate(
            zip(self._parts_of(spans), self.samplers.values(), strict=True)
        ):
            here = part == k
            if here.any() and isinstance(sampler, Prioritized):
                writes.append(sampler.prepare(spans_of_part, steps[here], priority[here]))
        for write in writes:
            write()

    def state_dict(self) -> dict[str, Any]:
        """How many anchors were drawn, and the state of each part's sampler."""
        return {
            "kind": "mixture",
            "num_drawn": self.num_drawn,
            "shares": " ".join(self._counts.names),
            "parts": [sampler.state_dict() for sampler in self.samplers.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Sampler.load_state_dict``."""
        check_state(state, "mixture", ("num_drawn",))
        parts, shares = state.get("parts"), " ".join(self._counts.names)
        if state.get("shares") != shares or not isinstance(parts, list):
            raise StateError(
                f"the state was saved with shares {state.get('shares')}, this mixture has {shares}"
            )
        if len(parts) != len(self.samplers):
            raise StateError(f"the state has {len(parts)} parts, not {len(self.samplers)}")
        for sampler, part in zip(self.samplers.values(), parts, strict=True):
            sampler.load_state_dict(part)
        self.num_drawn = int(state["num_drawn"])

    def _parts_of(self, spans: Spans) -> list[Spans]:
        """The spans of each part, the same objects for as long as ``spans`` is the same."""
        if spans is not self._spans:
            if len(spans.streams) - 1 != self._streams[-1]:
                raise SchemaError(self._of_other_stores(len(spans.streams) - 1))
            bounds = zip(self._streams[:-1], self._streams[1:], strict=True)
            self._parts = [_cut(spans, int(low), int(high)) for low, high in bounds]
            self._spans = spans
        return self._parts


def _cut(spans: Spans, low: int, high: int) -> Spans:
    """The streams from low to high - 1 as spans of their own."""
    begin, stop = spans.streams[low], spans.streams[high]
    episodes = slice(*np.searchsorted(spans.first, [begin, stop]))
    return Spans(
        spans.start[episodes],
        spans.first[episodes] - begin,
        spans.length[episodes],
        spans.streams[low : high + 1] - begin,
    )


def _names_of(keys: Iterable[Any]) -> dict[Any, Any]:
    """A name for each key: itself, or the paths of a store."""
    names: dict[Any, Any] = {}
    for key in keys:
        name = key
        if isinstance(key, Member):
            name = path = ", ".join(str(identity["path"]) for identity in key.identities())
            number = 1
            while name in names.values():
                number += 1
                name = f"{path} ({number})"
        names[key] = name
    return names


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are the same selection of a store, as far as can be told between commits."""
    is_same_view = one["commit"] != other["commit"] or one["selection"] == other["selection"]
    return bool(one["store_id"] == other["store_id"]) and is_same_view


def _is_path(name: Any, identity: dict[str, Any]) -> bool:
    path = Path(identity["path"])
    return isinstance(name, (str, PathLike)) and Path(name) in (path, Path(path.name))


def _check_names(shares: Mapping[Any, float], *others: Iterable[Any]) -> None:
    if not isinstance(shares, Mapping):
        raise SchemaError(
            f"shares must be a dict of a share for each store or name, got {shares!r}; for "
            "example {offline: 0.25, online: 0.75}"
        )
    for other in others:
        for name in other:
            if name not in shares:
                raise SchemaError(
                    f"{name!r} is not among the parts of the mixture: {', '.join(map(str, shares))}"
                )
