"""Every error that expstore raises on purpose, grouped by what a handler would do."""


class ExpstoreError(Exception):
    """Root of all errors of this package; its text names the thing, the rule and the next move."""


class SchemaError(ExpstoreError, ValueError):
    """Data, a field or an argument does not fit; nothing was written."""


class CapacityError(ExpstoreError, ValueError):
    """An episode is longer than the store may ever hold; nothing was written."""


class StepRangeError(ExpstoreError, IndexError):
    """A step, an episode or an anchor lies outside of what the store holds."""


class EvictedError(StepRangeError):
    """A step or an episode was held once and has left the store."""


class FieldNotFoundError(ExpstoreError, KeyError):
    """A field was asked for that the store does not have."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr of the text


class FormatError(ExpstoreError, ValueError):
    """A file or directory is not what it claims to be, or was made by a newer version."""


class NotAStoreError(FormatError):
    """A directory, or no directory at all, was found where a store should be."""


class DamagedError(ExpstoreError, RuntimeError):
    """Committed data is missing, has the wrong size or fails its checksum."""


class StorageError(ExpstoreError, OSError):
    """The operating system refused to write, sync, rename or map a file."""


class StoreLockedError(ExpstoreError, RuntimeError):
    """Another writer holds the store."""


class WriterStateError(ExpstoreError, RuntimeError):
    """The writer cannot do this now: closed, forked, or an episode is still open."""


class ReadOnlyError(ExpstoreError, RuntimeError):
    """Something was written to what can only be read; nothing has changed."""


class StateError(ExpstoreError, ValueError):
    """A saved state belongs to another store, commit, sampler or unit."""


class SourceError(ExpstoreError, ValueError):
    """A source of episodes cannot be read, or does not say what it must."""


class ExportLossError(ExpstoreError, ValueError):
    """A format cannot express everything; nothing was written.

    Attributes:
        losses: what it cannot express, one line each.
    """

    def __init__(self, format: str, losses: list[str]) -> None:
        self.losses = tuple(losses)
        super().__init__(
            f"{format} cannot express all of the store, and would lose: {'; '.join(losses)}; give "
            "--lossy (lossy=True) to write the rest, or export with another format"
        )


class MissingExtraError(ExpstoreError, ImportError):
    """An optional package is needed; the text names what to install."""


def how_to_install(extra: str) -> str:
    """The next move where a `MissingExtraError` is raised.

    >>> how_to_install("hdf5")
    "install it with: pip install 'expstore[hdf5]', in a checkout: pip install '.[hdf5]'"
    """
    return (
        f"install it with: pip install 'expstore[{extra}]', in a checkout: pip install '.[{extra}]'"
    )


class AnchorShapeError(SchemaError, RuntimeError):
    """Anchors do not have one coordinate per storage dimension."""


class BufferFullError(CapacityError, RuntimeError):
    """A buffer of fixed capacity has no room for an episode; nothing was written."""


class ArgumentTypeError(ExpstoreError, TypeError):
    """An argument is of a type that cannot be used here; nothing has changed."""


class UnknownEnvError(ExpstoreError, KeyError):
    """An environment's id is not known to a buffer, or has no open episode."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr of the text


class RegistryError(ExpstoreError, KeyError):
    """A name is not registered, or is registered already."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr of the text


class PostprocessError(ExpstoreError, RuntimeError):
    """A postprocess function failed on an episode.

    A buffer has its raw rows in quarantine; a writer has written nothing.
    """
