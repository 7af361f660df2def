"""What an import did: counts, and everything that did not arrive as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from expstore.formats.source import Failure


@dataclass(frozen=True)
class IngestProgress:
    """How far an import is."""

    num_episodes: int  # appended in this run
    num_steps: int  # read in this run, those of the unfinished episode included
    num_bytes: int  # appended in this run, as arrays
    remaining_episodes: int | None  # at the start of this run; None if nobody knows
    remaining_steps: int | None


@dataclass(frozen=True)
class IngestReport:
    """What an import did, and everything that did not arrive as it was.

    Attributes:
        source: the name that tells the source from others; kept with each episode.
        description: of the source, for people.
        store: the store's directory.
        num_episodes: appended in this run.
        num_steps: appended in this run.
        num_bytes: appended in this run, as arrays.
        duration_s: of this run.
        episodes_before: of this source, in the store before this run.
        store_episodes: in the store now, of all sources.
        store_steps: likewise.
        commit: number of the store's newest commit.
        end_reasons: how many of the appended episodes ended so.
        boundary_rule: in words, what ended an episode in the source.
        final_observations: appended episodes of which the observation after the last step is
            known.
        dropped_steps: rows that did not reach the store, by reason.
        skipped_episodes: episodes that did not, since there was nothing in them, by reason.
        failures: parts of the source that could not be read or did not fit.
        dtype_changes: field -> "float32 to float64", made by the source.
        shape_changes: field -> "(1,) to ()", made by the source.
        left_out: what no episode was given of, though the source has it -> why.
        flags: end flag, by the source's name -> appended or failed episodes that it ended.
        remarks: what is stored, but not as one would expect -> in how many episodes; 0 where
            it is about the source as a whole.
        postprocess: what ran on each episode before it was appended.
        casts: field -> rows cast to the dtype of the store (`cast=True`).
        lost_episodes: appended by an earlier, killed writer of the store, but never committed.
        is_interrupted: Ctrl-C ended it; every whole episode was kept.
    """

    source: str
    description: str
    store: str
    num_episodes: int
    num_steps: int
    num_bytes: int
    duration_s: float
    episodes_before: int
    store_episodes: int
    store_steps: int
    commit: int
    end_reasons: Mapping[str, int]
    boundary_rule: str
    final_observations: int
    dropped_steps: Mapping[str, int] = field(default_factory=dict)
    skipped_episodes: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    dtype_changes: Mapping[str, str] = field(default_factory=dict)
    shape_changes: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)
    postprocess: str | None = None
    casts: Mapping[str, int] = field(default_factory=dict)
    lost_episodes: int = 0
    is_interrupted: bool = False

    @property
    def source_episodes(self) -> int:
        """Episodes of this source that the store has now."""
        return self.episodes_before + self.num_episodes


class IngestInterrupted(KeyboardInterrupt):
    """Ctrl-C during an import; `report` says what was kept."""

    def __init__(self, report: IngestReport) -> None:
        super().__init__("the import was interrupted; every whole episode was kept")
        self.report = report
