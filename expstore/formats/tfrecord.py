"""TFRecord files: records of bytes, each between checksums of its length and of itself.

A record is the length (uint64, little-endian), the masked CRC32C of these 8 bytes, the content,
and its masked CRC32C.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from expstore.errors import SourceError

HEAD_BYTES, TAIL_BYTES = 12, 4
_MASK = 0xA282EAD8


class DamagedRecord(SourceError):
    """One record's content is not what was written; those after it can still be read."""


def masked_crc(content: bytes) -> int:
    """The checksum that stands behind `content`.

    >>> masked_crc(b"")
    2726488792
    """
    crc = int(google_crc32c.value(content))
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


class TFRecords:
    """The records of a file, read forward."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def __iter__(self) -> Iterator[int]:
        """The length of each record in turn; `read` or `skip` it before the next.

        Raises:
            SourceError: the file is cut off, or a length is damaged; nothing more can be found.
        """
        while self._left:
            head = self._take(HEAD_BYTES, "the file is cut off in the length of a record")
            length = int.from_bytes(head[:8], "little")
            if int.from_bytes(head[8:], "little") != masked_crc(head[:8]):
                raise SourceError("the length of a record is damaged, so none after it is found")
            if length + TAIL_BYTES > self._left:
                raise SourceError(
                    f"the file is cut off: {self._left:,} of the {length + TAIL_BYTES:,} bytes of "
                    "a record are there"
                )
            yield length

    def read(self, length: int) -> bytes:
        """The record's content.

        Raises:
            DamagedRecord: its checksum is another one.
        """
        content = self._take(length, "the file is cut off")
        crc = int.from_bytes(self._take(TAIL_BYTES, "the file is cut off"), "little")
        if crc != masked_crc(content):
            raise DamagedRecord("its checksum is not that of its bytes: it is damaged")
        return content

    def skip(self, length: int) -> None:
        """Go behind the record."""
        self._file.seek(length + TAIL_BYTES, 1)
        self._left -= length + TAIL_BYTES

    def _take(self, num_bytes: int, problem: str) -> bytes:
        content = self._file.read(num_bytes)
        if len(content) != num_bytes:
            raise SourceError(problem)
        self._left -= num_bytes
        return content


def begins_as_tfrecord(path: Path) -> bool:
    """Whether a file begins with a length and its checksum."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return len(head) == HEAD_BYTES and int.from_bytes(head[8:], "little") == masked_crc(head[:8])
