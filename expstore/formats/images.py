"""Encoded images as arrays."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install
from expstore.formats.jobs import in_order
from expstore.formats.lazy_rows import LazyRows, rows_or_lazy

MODES = ("L", "LA", "RGB", "RGBA", "CMYK", "I;16")  # whose pixels are the image, not a palette

JPEG_MAGIC = b"\xff\xd8\xff"


def decode_jpegs(
    frames: Sequence[Any] | NDArray[Any],
    what: str,
    shape: tuple[int, ...] | None = None,
    jobs: int = 1,
) -> NDArray[np.uint8] | LazyRows:
    """JPEG files as pixels; see `decode_images`."""
    return decode_images(frames, what, shape, formats=("JPEG",), jobs=jobs)


def decode_images(
    frames: Sequence[Any] | NDArray[Any],
    what: str,
    shape: tuple[int, ...] | None = None,
    *,
    formats: tuple[str, ...] = ("JPEG", "PNG"),
    jobs: int = 1,
) -> NDArray[Any] | LazyRows:
    """Image files, each bytes or an array of bytes, as pixels: (N, height, width[, channels]).

    Args:
        frames: (N,) files, or (N, num_bytes).
        what: begins the errors.
        shape: of an image; by default that of the first.
        formats: which may occur, as Pillow calls them.
        jobs: threads that decode, each an image at a time; the result is the same.

    Returns:
        uint8, or uint16 for PNG files of 16 bits; a lazy column where that would be too much to
        hold at once.

    Raises:
        MissingExtraError: Pillow is not installed.
        SourceError: one of them is of no such format, is damaged, or of another size.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            f"{what} holds {' or '.join(formats)} images, which need Pillow; "
            f"{how_to_install('images')}"
        ) from error
    if not len(frames):
        return np.empty((0, *(shape or ())), np.uint8)
    first = _pixels(Image, frames[0], 0, what, shape, formats)

    def read(start: int, stop: int) -> NDArray[Any]:
        decoded = np.empty((stop - start, *first.shape), first.dtype)

        def decode(number: int) -> None:
            pixels = _pixels(Image, frames[number], number, what, first.shape, formats)
            if pixels.dtype != first.dtype:
                raise SourceError(f"image {number} of {what} must be {first.dtype}")
            decoded[number - start] = pixels

        in_order(decode, range(start, stop), jobs)
        return decoded

    return rows_or_lazy(len(frames), first.nbytes, read)  # type: ignore[no-any-return]


def _pixels(
    image_of: Any,
    frame: Any,
    number: int,
    what: str,
    shape: tuple[int, ...] | None,
    formats: tuple[str, ...],
) -> NDArray[Any]:
    """One image, of that shape if one is given."""
    content = frame if isinstance(frame, bytes) else np.asarray(frame).tobytes()
    try:
        # A foreign file is not to reach other decoders. The size is in its head.
        with image_of.open(io.BytesIO(content), formats=formats) as image:
            size = image.size[::-1]
            wanted = size if shape is None else shape[:2]
            if image.mode not in MODES:
                raise ValueError(f"its pixels are of mode {image.mode}")
            pixels = np.asarray(image) if size == wanted else None
    except (OSError, ValueError, SyntaxError, image_of.DecompressionBombError) as error:
        raise SourceError(f"image {number} of {what} cannot be decoded: {error}") from error
    if pixels is None or (shape is not None and pixels.shape != shape):
        found = size if pixels is None else pixels.shape
        raise SourceError(f"image {number} of {what} must have shape {shape}, got {found}")
    return pixels
