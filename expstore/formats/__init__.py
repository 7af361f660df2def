"""Foreign formats of experience: recognised, read as episodes, written."""

from expstore.formats.source import (
    FORMATS,
    Account,
    Failure,
    Format,
    Imported,
    Source,
    SourceEpisode,
    open_source,
)

__all__ = [
    "FORMATS",
    "Account",
    "Failure",
    "Format",
    "Imported",
    "Source",
    "SourceEpisode",
    "open_source",
]
