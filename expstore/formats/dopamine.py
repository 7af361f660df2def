"""Dopamine's replay checkpoints, as in the DQN Replay data set of Atari: a gzipped array per file.

`action`, `reward` and `terminal` of a row belong to its `observation`, one frame. The rows are a
ring; several checkpoints of it are read as one stream, and what they have in common once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.dopamine_checkpoint import Checkpoint, Piece, checkpoints
from expstore.formats.provenance import HashedFiles
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

PADDING = "zero rows that Dopamine puts before an episode, to stack frames"
HEADLESS = "rows before the first are not there, perhaps of the same episode"
LIVES = "terminal may be the loss of a life, and does not mark time-outs"
LOOKS_FOR = (
    "a folder, or its folder replay_logs, with gzipped arrays $store$_observation_ckpt.0.gz, "
    "$store$_action_ckpt.0.gz and so on"
)


@dataclass
class Begun:
    """An episode that is not read to its end yet."""

    start: int  # its first row, counted from the first that was ever added
    is_headless: bool
    parts: list[Mapping[str, NDArray[Any]]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    is_end: bool = False  # an end is set on its last row
    is_terminal: bool = False

    def add(self, piece: Piece, checkpoint: Checkpoint) -> None:
        self.parts.append(piece.rows)
        if checkpoint not in self.checkpoints:
            self.checkpoints.append(checkpoint)
        self.is_end, self.is_terminal = piece.is_end, piece.is_terminal

    def column(self, name: str) -> NDArray[Any]:
        parts = [part[name] for part in self.parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class DopamineLogs:
    """The episodes of all checkpoints; a key counts the rows that were added before its first."""

    num_episodes = None  # every terminal would have to be read
    num_steps = None

    def __init__(self, path: Path) -> None:
        folder = _folder(path)
        if folder is None:
            raise SourceError(f"{path} is not of Dopamine; looked for {LOOKS_FOR}")
        self.name = str(path.resolve())
        self.account = Account()
        self._hashes = HashedFiles(folder)
        self._checkpoints = checkpoints(folder, self.account)
        self._knows_ends = all(found.has_ends for found in self._checkpoints)
        self.boundary_rule = "an episode ends with the row that has terminal set"
        if self._knows_ends:
            self.boundary_rule += ", or is one of episode_end_indices, which truncated it"
        self.account.remark(LIVES if not self._knows_ends else "terminal may be the loss of a life")

    def describe(self) -> str:
        count = len(self._checkpoints)
        return f"{count:,} Dopamine {'checkpoint' if count == 1 else 'checkpoints'} in {self.name}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for begun, padding in self._all():
            key = begun.start
            num_padding = self._padding(begun, padding)
            num_steps = len(begun.column("reward")) - num_padding
            if key in imported.keys:
                length = imported.lengths.get(key, num_steps)
                if length != num_steps:
                    raise SourceError(
                        f"episode {key} of {self.name} has {num_steps} steps, but had {length} "
                        "when it was imported: it went on; import it to a new store"
                    )
                continue
            if num_padding:
                self.account.drop(num_padding, PADDING)
            yield self._episode(begun, num_padding)

    def close(self) -> None:
        pass

    def _all(self) -> Iterator[tuple[Begun, int]]:
        """Episodes over all checkpoints, and how many zero rows may be before their steps."""
        begun: Begun | None = None
        reached, padding = 0, 0
        for checkpoint in self._checkpoints:
            try:
                padding = checkpoint.load()
                for piece in checkpoint.pieces(reached, self.account):
                    if begun is not None and piece.start != reached:
                        yield begun, padding
                        begun = None
                    if begun is None:
                        begun = Begun(piece.start, is_headless=piece.start != reached)
                    begun.add(piece, checkpoint)
                    reached = piece.stop
                    if begun.is_end:
                        yield begun, padding
                        begun = None
            except SourceError as error:
                self.account.fail(f"checkpoint {checkpoint.suffix}", str(error))
            finally:
                checkpoint.unload()
        if begun is not None:
            yield begun, padding

    def _padding(self, begun: Begun, most: int) -> int:
        """How many rows at its start are zero in everything."""
        count = 0
        for row in range(min(most, len(begun.parts[0]["reward"]))):
            if any(np.any(values[row]) for values in begun.parts[0].values()):
                break
            count += 1
        return count

    def _episode(self, begun: Begun, num_padding: int) -> SourceEpisode:
        data: dict[str, Any] = {n: begun.column(n)[num_padding:] for n in begun.parts[0]}
        terminal = data.pop("terminal")
        self.account.dtype_changes["terminated"] = f"{terminal.dtype} to bool"
        data["terminated"] = terminal != 0
        if self._knows_ends:
            truncated = np.zeros(len(terminal), bool)
            truncated[-1:] = begun.is_end and not begun.is_terminal
            data["truncated"] = truncated
            self.account.found("episode_end_indices", begun.is_end)
        self.account.found("terminal", begun.is_terminal)
        if begun.is_headless:
            self.account.remark(HEADLESS, 1)
        if not begun.is_end:
            self.account.remark("no end flag on the last rows, so they are kept as incomplete", 1)
        names = [name for found in begun.checkpoints for name in found.file_names]
        return SourceEpisode(
            key=begun.start,
            data=data,
            end_reason=None if begun.is_end else "incomplete",
            metadata={"checkpoint": begun.checkpoints[0].suffix},
            provenance={"format": FORMAT.name, **self._hashes.together(names)},
        )


def _folder(path: Path) -> Path | None:
    """The folder with the files: itself, or its folder replay_logs."""
    for folder in (path, path / "replay_logs"):
        if folder.is_dir() and Checkpoint.is_in(folder):
            return folder
    return None


def _sniff(path: Path) -> bool:
    return _folder(path) is not None


FORMAT = Format(name="dopamine", looks_for=LOOKS_FOR, sniff=_sniff, open=DopamineLogs)
