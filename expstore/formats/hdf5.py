"""HDF5 files: opened with errors that say what is wrong, and read without decoding twice."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install
from expstore.formats.cut_hdf5 import CutFile, MissingRowsError, check_there, cut_at
from expstore.formats.lazy_rows import rows_or_lazy

MAGIC = b"\x89HDF\r\n\x1a\n"
# What h5py raises for what is damaged, or is not what its name says.
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, MemoryError)
BLOCK_BYTES = 8 << 20  # of one dataset, held at a time
_TRUNCATED = re.compile(r"truncated file: eof = \d+.*stored_eof = (\d+)")


def is_hdf5(path: Path) -> bool:
    """Whether a file begins as HDF5 does, or does so after a block that its owner put there."""
    if not path.is_file():
        return False
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        at = 0
        while at + len(MAGIC) <= num_bytes:
            file.seek(at)
            if file.read(len(MAGIC)) == MAGIC:
                return True
            at = max(512, 2 * at)  # the places that the specification allows
    return False


def load_h5py() -> Any:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(f"HDF5 files need h5py; {how_to_install('hdf5')}") from error
    return h5py


def open_file(path: Path) -> Any:
    """An `h5py.File` for reading.

    Of one that is cut off, `member` and `datasets` refuse what lies beyond its end.

    Raises:
        MissingExtraError: h5py is not installed.
        SourceError: it is no HDF5 file, is damaged, or open for writing elsewhere; or it is cut
            off, and what finds the data is missing.
    """
    h5py = load_h5py()
    if not is_hdf5(path):
        raise SourceError(f"{path} is no HDF5 file: it does not begin as one")
    try:
        return h5py.File(path, "r")
    except BlockingIOError as error:
        raise SourceError(
            f"{path} is open for writing in another process; import it when that has closed it"
        ) from error
    except OSError as error:
        if found := _TRUNCATED.search(str(error)):
            return _open_cut(CutFile(path, int(found[1])), error)
        raise SourceError(f"{path} cannot be opened as HDF5: {reason(error)}") from error


def _open_cut(cut: CutFile, error: OSError) -> Any:
    try:
        file = load_h5py().File(cut, "r")
        names = list(file)
        if not names or any(_is_listed(file, name) for name in names):
            return file
    except UNREADABLE:
        pass
    cut.close()
    raise SourceError(
        f"{cut.path} is cut off: {cut.account}, and what finds the data is in the rest; copy it "
        "again, or import another copy. If its writer was killed, h5clear of the HDF5 tools may "
        "open it"
    ) from error


def _is_listed(group: Any, name: str) -> bool:
    """Whether a member can be found, and what is in it."""
    try:
        node = group[name]
        return not is_group(node) or list(node) is not None
    except UNREADABLE:
        return False


@contextlib.contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Give what h5py raises as a SourceError; our own errors pass."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, SourceError):
            raise
        cut = cut_at(what) if isinstance(what, Path) else None
        why = reason(error) if cut is None else f"it is cut off: {cut.account}; {reason(error)}"
        raise SourceError(f"{what} cannot be read: {why}") from error


def member(group: Any, name: str) -> Any:
    """What is at `name`, None where there is nothing, or only a link that leads nowhere."""
    if name not in group:
        return None
    check_own(group, name)
    return group[name]  # `get` would hide damage, too


def check_own(group: Any, name: str) -> None:
    """Refuse data that lies in another file: who made this one may not say what else is read.

    Raises:
        SourceError: an external link, or a dataset whose bytes are elsewhere, or missing.
    """
    h5py = load_h5py()
    what = f"{group.name.rstrip('/')}/{name}"
    if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
        raise SourceError(f"{what} is a link into another file; copy the data into this one")
    node = group[name]
    if not isinstance(node, h5py.Dataset):
        return
    check_there(node)
    sources = [source.file_name for source in node.virtual_sources()] if node.is_virtual else []
    # A data set may lie in several files side by side, as long as it cannot point elsewhere.
    if node.external or any(Path(s).is_absolute() or ".." in Path(s).parts for s in sources):
        raise SourceError(f"{what} has its data in other files; copy the data into this one")


def names_of(group: Any) -> list[str]:
    """Names of the members; one that is no UTF-8 as Python shows it, for h5py gives bytes."""
    return [name if isinstance(name, str) else repr(name) for name in group]


def found_in(file: Any) -> str:
    """The first names, for an error that says what was looked for."""
    return ", ".join(names_of(file)[:8]) or "nothing"


def is_dataset(node: Any) -> bool:
    return isinstance(node, load_h5py().Dataset)


def is_group(node: Any) -> bool:
    return isinstance(node, load_h5py().Group)


def datasets(
    group: Any, prefix: str = "", *, lost: dict[str, str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Every dataset under a group, by its path in it; links that lead nowhere are left out.

    Args:
        lost: takes those that a file which is cut off has no more, with the reason.

    Raises:
        SourceError: groups that contain themselves; or one is lost, and there is no `lost`.
    """
    if prefix.count("/") > 32:
        raise SourceError(f"groups in {prefix[:80]}... are nested too deeply")
    for name in group:
        try:
            node = member(group, name)
        except MissingRowsError as error:
            if lost is None:
                raise
            lost[f"{prefix}{name}"] = str(error)
            continue
        if is_dataset(node):
            yield f"{prefix}{name}", node
        elif is_group(node):
            yield from datasets(node, f"{prefix}{name}/", lost=lost)


def is_text(dataset: Any) -> bool:
    return load_h5py().check_string_dtype(dataset.dtype) is not None


def is_ragged_bytes(dataset: Any) -> bool:
    """Whether each element is a run of bytes of its own length."""
    kind = load_h5py().check_vlen_dtype(dataset.dtype)
    return kind is not None and np.dtype(kind) == np.uint8


def check_sources(dataset: Any, path: Path) -> None:
    """Refuse a dataset that lies in other files which are not there: HDF5 would give zeros.

    Raises:
        SourceError: names the first file that is missing.
    """
    if not dataset.is_virtual:
        return
    for found in dataset.virtual_sources():
        if found.file_name != "." and not (path.parent / found.file_name).exists():
            raise SourceError(
                f"{dataset.name} of {path} lies in {found.file_name}, which is not beside it; "
                "put it there"
            )


def rows_of(dataset: Any) -> Any:
    """All rows of a dataset, or a lazy column where they are many bytes."""
    return stretch_of(RowReader(dataset), 0, len(dataset), dataset.name)


def stretch_of(reader: RowReader, start: int, stop: int, what: str) -> Any:
    """Rows `start` to `stop`, or a lazy column where they are many bytes.

    One number a row is read at once: it is little, and flags and rewards are looked at first.
    """

    def read(first: int, last: int) -> NDArray[Any]:
        with reading(what):
            return reader.read(start + first, start + last)

    if reader.row_size == 1:
        return read(0, stop - start)
    return rows_or_lazy(stop - start, reader.row_bytes, read)


def plain_value(value: Any) -> Any:
    """An attribute, or a dataset without rows, as JSON has it.

    Raises:
        ValueError: it has no such form.
    """
    if isinstance(value, load_h5py().Empty):
        return None
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{type(value).__name__} has no form in JSON")


def reason(error: BaseException) -> str:
    """The text of an error of h5py, on one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


class RowReader:
    """Rows of one dataset, read forward, in blocks of whole chunks: none is decoded twice.

    What is given is a view of a block, which is never written to after.
    """

    def __init__(self, dataset: Any, block_bytes: int = BLOCK_BYTES) -> None:
        self._dataset = dataset
        self.row_size = math.prod(dataset.shape[1:])
        self.row_bytes = row_bytes = dataset.dtype.itemsize * self.row_size
        self._chunk = dataset.chunks[0] if dataset.chunks else 1
        rows = max(1, block_bytes // max(row_bytes, 1))
        self._block = max(self._chunk, rows - rows % self._chunk)
        self._first = self._stop = 0  # rows that are held
        self._rows = np.empty((0, *dataset.shape[1:]), dataset.dtype)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The rows `start` to `stop`; `start` must not go back.

        Raises:
            OSError: among others, where a chunk is damaged; rows after it can still be read.
        """
        assert self._first <= start <= stop <= len(self._dataset), (self._first, start, stop)
        if stop > self._stop:
            try:
                self._fill(start, stop)
            except UNREADABLE:  # perhaps only of rows that were not asked for
                return np.asarray(self._dataset[start:stop])
        return self._rows[start - self._first : stop - self._first]

    def _fill(self, start: int, stop: int) -> None:
        kept = self._rows[start - self._first :] if start < self._stop else self._rows[:0]
        begin = self._stop if len(kept) else max(self._stop, start - start % self._chunk)
        blocks = -(-(stop - begin) // self._block)
        end = min(len(self._dataset), begin + blocks * self._block)
        rows = np.empty((len(kept) + end - begin, *self._rows.shape[1:]), self._rows.dtype)
        rows[: len(kept)] = kept
        self._dataset.read_direct(rows, np.s_[begin:end], np.s_[len(kept) :])
        self._first = start if len(kept) else begin
        self._rows, self._stop = rows, end
