"""Sources of episodes: what every format offers, and how a path is recognised by its content."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from expstore.errors import SourceError

# name -> module, which has a `FORMAT`; the most particular first, as the first that fits is taken.
FORMATS = {
    "minari": "expstore.formats.minari",
    "lerobot": "expstore.formats.lerobot",
    "d3rlpy": "expstore.formats.d3rlpy",
    "d4rl": "expstore.formats.d4rl",
    "robomimic": "expstore.formats.robomimic",
    "aloha": "expstore.formats.aloha",
    "diffusion_policy": "expstore.formats.diffusion_policy",
    "ogbench": "expstore.formats.ogbench",
    "rllib": "expstore.formats.rllib",
    "torchrl": "expstore.formats.torchrl",
    "rlds": "expstore.formats.rlds",
    "sb3": "expstore.formats.sb3",
    "tianshou": "expstore.formats.tianshou",
    "dopamine": "expstore.formats.dopamine",
    "flashbax": "expstore.formats.flashbax",
    "vd4rl": "expstore.formats.vd4rl",
    "dreamer": "expstore.formats.dreamer",
    "npz": "expstore.formats.npz",
}


DROP = "drop"


@dataclass(frozen=True)
class SourceEpisode:
    """One episode as its source has it, in the alignment that `Writer.append` takes.

    Attributes:
        key: what the episode is called in its source, unique there: a file name or a number.
        data: fields, nested or not, as in `Writer.append`; not written to after it was given.
        end_reason: where the source says more than the flags do.
        metadata: what the source knows of this episode; `seed` gets a column.
        provenance: where it was found, such as size and hash of its file.
    """

    key: int | str
    data: Mapping[str, Any]
    end_reason: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """What a store has of a source already."""

    keys: frozenset[int | str] = frozenset()
    num_steps: int = 0
    lengths: Mapping[int | str, int] = field(default_factory=dict)  # key -> steps
    unwanted: frozenset[int | str] = frozenset()  # of `keys`: not there, but not asked for either

    @property
    def num_episodes(self) -> int:
        return len(self.keys) - len(self.unwanted)


NOTHING = Imported()


@dataclass(frozen=True)
class Failure:
    """A part of a source that is not in the store, and why."""

    key: str
    reason: str


@dataclass
class Account:
    """What a source read, left out and changed so far."""

    unfinished_steps: int = 0  # read of the episode that is being read
    dropped_steps: dict[str, int] = field(default_factory=dict)  # reason -> steps
    skipped_episodes: dict[str, int] = field(default_factory=dict)  # reason -> episodes
    failures: list[Failure] = field(default_factory=list)
    dtype_changes: dict[str, str] = field(default_factory=dict)  # field -> "int32 to int64"
    shape_changes: dict[str, str] = field(default_factory=dict)  # field -> "(1,) to ()"
    left_out: dict[str, str] = field(default_factory=dict)  # a part of every episode -> why
    flags: dict[str, int] = field(default_factory=dict)  # the source's name -> episodes it ended
    remarks: dict[str, int] = field(default_factory=dict)  # text -> episodes, 0 where of none
    listener: Callable[[], None] = lambda: None  # called by `reached`

    def drop(self, steps: int, reason: str) -> None:
        """Rows that do not reach the store."""
        self.dropped_steps[reason] = self.dropped_steps.get(reason, 0) + steps

    def skip(self, reason: str) -> None:
        """An episode in which there is nothing to store."""
        self.skipped_episodes[reason] = self.skipped_episodes.get(reason, 0) + 1

    def found(self, flag: str, is_set: bool) -> None:
        """The source has such an end flag, and whether it ended the episode."""
        self.flags[flag] = self.flags.get(flag, 0) + is_set

    def remark(self, text: str, episodes: int = 0) -> None:
        """What is stored as it is, but not as one would expect."""
        self.remarks[text] = self.remarks.get(text, 0) + episodes

    def fail(self, key: int | str, reason: str) -> None:
        """A part that cannot be read, or does not fit; the import goes on after it."""
        self.failures.append(Failure(str(key), reason))

    def reached(self, steps: int) -> None:
        """So many steps of an episode were read; whoever shows the progress hears of it."""
        self.unfinished_steps = steps
        self.listener()


class Source(Protocol):
    """Where episodes come from: a file, a directory, an environment.

    Attributes:
        name: tells this source from every other one; kept with each episode, so that a later
            run knows what a store has of it already.
        boundary_rule: in words, what ends an episode here.
        account: what was read, left out and changed so far.
    """

    name: str
    boundary_rule: str
    account: Account

    @property
    def num_episodes(self) -> int | None:
        """How many there are in all, those already imported included; None if nobody knows."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Likewise for steps."""
        ...

    def describe(self) -> str:
        """One line for people: what it is and how much there is."""
        ...

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        """The episodes that are not imported yet, in the source's order.

        What cannot be read is reported to the account and left out.

        Raises:
            SourceError: nothing more can be read.
        """
        ...

    def close(self) -> None:
        """Let go of files and environments."""
        ...


@dataclass(frozen=True)
class Format:
    """One foreign format, as its module offers it by the name `FORMAT`."""

    name: str  # as in --format
    looks_for: str  # what `sniff` wants to see, to complete "looked for ..."
    sniff: Callable[[Path], bool]  # by content, never by a file's name alone; quick
    open: Callable[..., Source]  # given the path, and those of its options that were given
    options: frozenset[str] = frozenset()  # names of what can be asked of it


def open_source(path: str | os.PathLike[str], format: str | None = None, **options: Any) -> Source:
    """Open a file or directory in a known format.

    Args:
        path: what to read.
        format: a name out of `FORMATS`; by default the content decides.
        options: what only some formats know, such as `infos`; see `ingest_from`.

    Raises:
        SourceError: there is nothing, it is of no known format, `format` is unknown, or the
            format does not know one of the options.
        MissingExtraError: the format needs an optional package.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise SourceError(f"there is nothing at {path} to import")
    if format is not None:
        return _open(format_named(format), path, options)
    known = [format_named(name) for name in FORMATS]
    try:
        for candidate in known:
            if candidate.sniff(path):
                return _open(candidate, path, options)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    looked_for = "; ".join(f"{f.looks_for} ({f.name})" for f in known)
    raise SourceError(
        f"{path} is of no format that is known here; looked for {looked_for}. If it is one of "
        "them all the same, name it with --format"
    )


def _open(found: Format, path: Path, options: Mapping[str, Any]) -> Source:
    # Whoever leaves fields out does so himself; a format that knows of it saves the reading.
    options = {n: v for n, v in options.items() if n != DROP or (v and n in found.options)}
    for name in options:
        if name not in found.options:
            flag = f"--{name.replace('_', '-')} ({name}=)"
            raise SourceError(
                f"{path} is of format {found.name}, which has no {flag}; leave it out"
            )
    return found.open(path, **options)


def format_named(name: str) -> Format:
    """The format of that name; its module is imported only now."""
    if name not in FORMATS:
        raise SourceError(f"--format (format=) must be one of {', '.join(FORMATS)}, got {name!r}")
    found = importlib.import_module(FORMATS[name]).FORMAT
    assert isinstance(found, Format), name
    return found
