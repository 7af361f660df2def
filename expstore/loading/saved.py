"""Saved priorities seen from a loader: where they lie, and whether the stores have grown since."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from expstore.errors import StateError
from expstore.storage.layout import PRIORITIES
from expstore.storage.store import Store, absolute


def directory_of(store: Store, priorities_path: str | os.PathLike[str] | None) -> Path:
    """Where the sets of a store lie: beside its data, those of a union beside its first store's."""
    return store.paths[0] / PRIORITIES if priorities_path is None else absolute(priorities_path)


def check_priorities(sampler: Any) -> None:
    """Refuse a sampler that has no priorities."""
    if not hasattr(sampler, "update"):
        raise StateError(f"{type(sampler).__name__} has no priorities; give sampler=Prioritized()")


def has_grown(state: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether any store of `own` has a newer commit than in `state`, of the same stores.

    Raises:
        StateError: one has an older commit, whose steps would lose the priorities of later ones.
    """
    pairs = list(zip(state["stores"], own["stores"], strict=True))
    for saved, ours in pairs:
        if saved["commit"] > ours["commit"]:
            raise StateError(
                f"saved at commit {saved['commit']} of {ours['path']}, this is commit "
                f"{ours['commit']}; open the newest one"
            )
    return any(saved["commit"] != ours["commit"] for saved, ours in pairs)
