"""Saved priorities carried over to a store in which the same episodes have other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, FormatError, StateError
from expstore.ragged import spread
from expstore.spans import Spans
from expstore.storage.commits import Root
from expstore.storage.layout import PRIORITIES
from expstore.storage.priorities import load_state, read_pointer, save_state, set_names
from expstore.storage.store import Store


def carry_priorities(source: Store, target: Path, path: Path, root: Root) -> dict[str, str]:
    """Save every set of a store's priorities beside its copy, for the steps that are in it.

    Args:
        source: one store, whole; the copy has its episodes in their order, from step 0 on.
        target: the directory of the copy for the moment.
        path: the directory that it will have.
        root: of the copy.

    Returns:
        name -> why a set was left behind, for those that were.
    """
    directory, left = source.paths[0] / PRIORITIES, {}
    for name in set_names(directory):
        try:
            _carry(source, directory / name, target / PRIORITIES / name, path, root)
        except (DamagedError, FormatError, StateError) as error:
            left[name] = str(error)
    return left


def _carry(source: Store, old: Path, new: Path, path: Path, root: Root) -> None:
    pointer, state = read_pointer(old), load_state(old)
    if pointer is None or state is None:
        raise StateError(f"{old} has no priorities any more")
    (ours,) = source.identities()
    if pointer.store_ids != (ours["store_id"],):
        raise StateError(f"{old} belongs to several stores, or to another one")
    if any(saved["selection"] is not None for saved in state.get("stores", [])):
        raise StateError(f"{old} belongs to a view, of which its copy would be another one")
    state["stores"] = [
        {
            "path": str(path),
            "store_id": root.store_id,
            "commit": root.commit.number,
            "selection": None,
        }
    ]
    ahead = [_moved_draw(source.spans, drawn) for drawn in state.get("ahead", [])]
    state["ahead"] = [drawn for drawn in ahead if drawn is not None]
    save_state(new, _moved(source.spans, state), [root.store_id])


def _moved(spans: Spans, value: Any) -> Any:
    """A state with the numbers that its steps have in the copy: their positions in the source."""
    if isinstance(value, list):
        return [_moved(spans, member) for member in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _moved(spans, member) for key, member in value.items()}
    if "raw" in found and "runs" in found:
        steps = _steps_of(found["runs"])
        is_held = np.isin(steps, spans.steps_at(np.arange(spans.num_steps)))
        found["raw"] = found["raw"][is_held]
        found["runs"] = _runs_of(spans.positions_held(steps))
    if "seen" in found:
        found["seen"] = _runs_of(spans.positions_held(_steps_of(found["seen"])))
    return found


def _moved_draw(spans: Spans, drawn: Mapping[str, Any]) -> dict[str, Any] | None:
    """A batch that was drawn ahead; None if it holds a step that is not in the copy."""
    steps = np.array(drawn["steps"], np.int64)
    moved = spans.positions_held(steps)
    return {**drawn, "steps": moved.tolist()} if len(moved) == len(steps) else None


def _steps_of(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    return spread(runs[:, 0], runs[:, 1] - runs[:, 0])


def _runs_of(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """(R, 2) ascending steps (n,) as half-open ranges with gaps between them."""
    if not len(steps):
        return np.empty((0, 2), np.int64)
    cut = np.flatnonzero(np.diff(steps) != 1)
    return np.stack([steps[np.append(0, cut + 1)], steps[np.append(cut, -1)] + 1], axis=1)
