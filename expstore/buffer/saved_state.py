"""What a buffer remembers besides its data: the state of its sampler and of its functions."""

from __future__ import annotations

from typing import Any

from expstore.buffer.episode_storage import EpisodeStorage
from expstore.buffer.ingest import Report
from expstore.errors import DamagedError
from expstore.storage import files, priorities

STATE = "state"


def save_state(storage: EpisodeStorage, state: dict[str, Any]) -> None:
    """Save a state beside the data, durably."""
    store_id = storage.store.identities()[0]["store_id"]
    priorities.save_state(storage.directory / STATE, state, [store_id])


def load_state(storage: EpisodeStorage, report: Report) -> dict[str, Any]:
    """What was saved last; nothing, with a note in the report, if it is damaged."""
    try:
        return priorities.load_state(storage.directory / STATE) or {}
    except DamagedError as error:
        report.note(f"the states of the sampler and the functions are lost: {error}")
        files.remove_directory(storage.directory / STATE)
        return {}
