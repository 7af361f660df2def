"""Which episodes of a source are asked for: the first so many, or a range."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from expstore.errors import SourceError
from expstore.formats.source import NOTHING, Imported, Source, SourceEpisode


@dataclass(frozen=True)
class ChosenEpisodes:
    """The episodes from number `start` of the source on, before number `stop`."""

    start: int = 0
    stop: int | None = None

    @staticmethod
    def of(episodes: int | slice | None) -> ChosenEpisodes:
        """The first so many, a slice, or all.

        Raises:
            SourceError: a negative number, a stride, or a range that stops before it starts.
        """
        rows = episodes if isinstance(episodes, slice) else slice(0, episodes)
        start, stop = rows.start or 0, rows.stop
        if start < 0 or (stop is not None and stop < 0):
            raise SourceError(f"--episodes (episodes=) must be >= 0, got {min(start, stop or 0)}")
        if rows.step not in (None, 1) or (stop is not None and stop < start):
            raise SourceError(
                f"--episodes (episodes=) must be a number N or a range START:STOP, got {episodes}"
            )
        return ChosenEpisodes(start, stop)

    def count(self, num_episodes: int | None) -> int | None:
        """How many there are, of a source that has so many; None if nobody knows."""
        known = [n for n in (num_episodes, self.stop) if n is not None]
        return max(0, min(known) - self.start) if known else None

    def among(self, source: Source, imported: Imported) -> Iterator[SourceEpisode]:
        """Those of a source that are not imported yet."""
        if not self.start:
            yield from source.episodes(imported)
            return
        keys = getattr(source, "keys", None)
        if keys is None:
            yield from self._counted(source, imported)
            return
        wanted = set(keys[self.start : self.stop])
        unwanted = frozenset(key for key in keys if key not in wanted) - imported.keys
        known = imported.keys | unwanted
        yield from source.episodes(dataclasses.replace(imported, keys=known, unwanted=unwanted))

    def _counted(self, source: Source, imported: Imported) -> Iterator[SourceEpisode]:
        """Of a source that does not say what its episodes are called before it has read them."""
        account, failed = source.account, len(source.account.failures)
        number = 0
        for episode in source.episodes(NOTHING):
            number += len(account.failures) - failed  # each stands where an episode was to be
            if self.stop is not None and number >= self.stop:
                return
            if number >= self.start and episode.key not in imported.keys:
                yield episode
            failed = len(account.failures)  # those of the episode that was given, too
            number += 1
