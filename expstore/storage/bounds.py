"""Where episodes and their metadata lie, found anew where rows of the index are damaged."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expstore.errors import ExpstoreError
from expstore.storage.layout import METADATA_VALUES
from expstore.storage.reading import Snapshot


def sound_bounds(snapshot: Snapshot) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(E,) start and length of every live episode, found anew for index rows that are damaged.

    An episode begins where the one before ends. Where several in a row are damaged, `steps/done`
    tells where they end; failing that, they get some lengths that add up.
    """
    index, first = snapshot.index, snapshot.first_episode
    starts = np.array(index.column("start"), np.int64)
    lengths = np.array(index.column("length"), np.int64)
    sound = np.array([_is_sound(snapshot, e) for e in range(first, snapshot.stop_episode)], bool)
    at = 0
    while at < len(starts):
        if sound[at]:
            at += 1
            continue
        stop = at
        while stop < len(starts) and not sound[stop]:
            stop += 1
        low = int(starts[at - 1] + lengths[at - 1]) if at else snapshot.first_step
        high = int(starts[stop]) if stop < len(starts) else snapshot.stop_step
        lengths[at:stop] = _lengths_between(snapshot, low, high, stop - at)
        starts[at:stop] = low + np.cumsum(lengths[at:stop]) - lengths[at:stop]
        at = stop
    return starts, lengths


def split_metadata(snapshot: Snapshot, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """(E,) where the metadata of each episode ends, found anew where a checksum tells.

    Args:
        ends: (E,) some that do not descend.
    """
    index, first = snapshot.index, snapshot.first_episode
    low, high = snapshot.root.commit.dims.get(METADATA_VALUES, (0, 0))
    ends = ends.copy()
    for at in range(len(ends) - 1):
        start, stop = int(ends[at - 1]) if at else low, int(ends[at + 1])
        if not low <= start <= stop <= high:
            continue
        stored = int(index.column("index_crc32c")[at])
        rows = snapshot.columns["episodes/metadata/values"].slice(start, stop, low, high)
        text = rows.tobytes()
        row = index.row_without_metadata(first + at)
        if replace(row, metadata=text[: int(ends[at]) - start]).checksum() == stored:
            continue
        # One JSON object follows another, or nothing.
        places = [0, len(text), *(found.start() + 1 for found in re.finditer(rb"\}\{", text))]
        for place in places:
            if replace(row, metadata=text[:place]).checksum() == stored:
                ends[at] = start + place
                break
    return ends


def ends_of_episodes(snapshot: Snapshot) -> NDArray[np.int64]:
    """(E,) last step of every live episode, likewise."""
    starts, lengths = sound_bounds(snapshot)
    return starts + lengths - 1


def _is_sound(snapshot: Snapshot, number: int) -> bool:
    at = number - snapshot.first_episode
    try:
        row = snapshot.index.row(number)
    except ExpstoreError:
        return False
    is_inside = snapshot.first_step <= row.start < row.start + row.length <= snapshot.stop_step
    return is_inside and row.checksum() == int(snapshot.index.column("index_crc32c")[at])


def _lengths_between(
    snapshot: Snapshot, low: int, high: int, num_episodes: int
) -> NDArray[np.int64]:
    if num_episodes > 1:
        done = np.asarray(snapshot.rows("done", low, high)).view(np.uint8)
        ends = np.flatnonzero(done == 1)
        if len(ends) == num_episodes and ends[-1] == high - low - 1:
            return np.diff(ends, prepend=-1)
    lengths = np.ones(num_episodes, np.int64)
    lengths[-1] = high - low - (num_episodes - 1)
    return lengths
