"""Pickles read without running what they name: objects become their attributes, arrays stay in
the file until rows of them are asked for.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from expstore.errors import SourceError
from expstore.formats.pickled_arrays import InFile, StoredArray, StoredDtype

HEAD_BYTES = 4096  # in which the first class is named
LARGE = 64 << 10  # bytes; the content of smaller arrays is held
NUMPY = ("numpy.core.", "numpy._core.")
CUT_OFF = ("exhausted before end of frame", "data was truncated")
UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError),
    *(TypeError, ValueError, OverflowError, MemoryError, struct.error, UnicodeError),
    *(RecursionError, AssertionError),
)
_PYTHONS_OWN: Any = vars(pickle)["_Unpickler"]  # the one in C cannot leave bytes in the file


class Inert:
    """Stands for an object of a class that is named, but neither imported nor called."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


class _Unpickler(_PYTHONS_OWN):  # type: ignore[misc]
    """Python's own unpickler in Python, with nothing to find but what is harmless."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PYTHONS_OWN.dispatch)

    def __init__(self, file: BinaryIO, path: Path, known: Sequence[str]) -> None:
        super().__init__(file)
        self._source, self._path, self._known = file, path, tuple(known)
        self._num_bytes = path.stat().st_size

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(NUMPY):
            if name == "_reconstruct":
                return lambda *_: StoredArray()
            if name == "_frombuffer":
                return lambda *state: StoredArray().fill(*state)
            if name == "scalar":
                return _scalar
        found = _HARMLESS.get((module, name))
        if found is not None:
            return found
        is_dtype = module == "numpy" and hasattr(np, name) and isinstance(getattr(np, name), type)
        if is_dtype or module.split(".")[0] in self._known or module.startswith("numpy.random"):
            return type(name, (Inert,), {"origin": f"{module}.{name}"})
        raise SourceError(
            f"{self._path} names {module}.{name}, which is no part of such a buffer, and "
            "unpickling it would run code; if you trust whoever made the file, use --trust "
            "(trust=True)"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise SourceError(f"{self._path} refers to what lies elsewhere")

    def _bytes(self, num_bytes: int) -> Any:
        """So many bytes; where they are many, only where they lie."""
        if num_bytes < LARGE or self._unframer.current_frame is not None:
            return self.read(num_bytes)
        found = InFile(self._path, self._source.tell(), num_bytes)
        if found.offset + num_bytes > self._num_bytes:
            raise EOFError(f"{found.offset + num_bytes:,} bytes, {self._num_bytes:,} are there")
        self._source.seek(num_bytes, io.SEEK_CUR)
        return found

    def _load_long_bytes(self) -> None:
        (num_bytes,) = struct.unpack("<Q", self.read(8))
        self.append(self._bytes(num_bytes))

    def _load_bytes(self) -> None:
        (num_bytes,) = struct.unpack("<I", self.read(4))
        self.append(self._bytes(num_bytes))

    dispatch[pickle.BINBYTES8[0]] = _load_long_bytes
    dispatch[pickle.BYTEARRAY8[0]] = _load_long_bytes
    dispatch[pickle.BINBYTES[0]] = _load_bytes


def read_pickle(path: Path, known: Sequence[str]) -> Any:
    """What a pickle holds, objects as `Inert` with attributes and arrays as `StoredArray`.

    Args:
        known: packages whose classes may be named; none of them is imported.

    Raises:
        SourceError: something else is named, or the file is cut off or damaged.
    """
    with path.open("rb") as file:
        return _load(file, path, known)


def parse_pickle(content: bytes, path: Path) -> Any:
    """Likewise of bytes that were read from `path`; numbers, texts and their collections only."""
    return _load(io.BytesIO(content), path, ())


def _load(file: BinaryIO, path: Path, known: Sequence[str]) -> Any:
    try:
        return _Unpickler(file, path, known).load()
    except SourceError:
        raise
    except UNREADABLE as error:
        if isinstance(error, EOFError) or any(text in str(error) for text in CUT_OFF):
            detail = f" ({_text(error)})" if str(error) else ""
            raise SourceError(
                f"{path} is cut off{detail}: a pickle is read whole or not at all; copy it again"
            ) from error
        raise SourceError(f"{path} cannot be read as a pickle: {_text(error)}") from error


def run_pickle(path: Path) -> Any:
    """What a pickle makes of itself; it may run any code.

    Raises:
        SourceError: whatever it raised.
    """
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except Exception as error:
        raise SourceError(f"{path} cannot be unpickled: {_text(error)}") from error


def first_class(path: Path) -> tuple[str, str] | None:
    """Module and name of the first class that a pickle names; nothing of it is run."""
    texts: list[str] = []
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(pickle.PROTO):
            for opcode, argument, _ in pickletools.genops(head):
                if opcode.name == "GLOBAL":
                    module, _, name = str(argument).partition(" ")
                    return module, name
                if opcode.name == "STACK_GLOBAL":
                    return (texts[-2], texts[-1]) if len(texts) > 1 else None
                if isinstance(argument, str):
                    texts.append(argument)
    except (ValueError, OSError, UnicodeError):  # the head ends in the middle of something
        pass
    return None


def _scalar(dtype: StoredDtype, content: bytes) -> Any:
    return np.frombuffer(content, dtype.dtype)[0]


def _reconstructor(cls: Callable[..., Any], *_: Any) -> Any:
    return cls()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How bytes lie in pickles of old protocols."""
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError(f"bytes as {encoding} are not read")
    return text.encode("latin1")


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_HARMLESS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): StoredDtype,
    ("numpy", "ndarray"): Inert,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "deque"): Inert,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copy_reg", "_reconstructor"): _reconstructor,
    ("builtins", "object"): Inert,
    ("__builtin__", "object"): Inert,
    ("__builtin__", "set"): set,
}
