"""Encoded images as arrays."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install

MODES = ("L", "LA", "RGB", "RGBA", "CMYK", "I;16")  # whose pixels are the image, not a palette

JPEG_MAGIC = b"\xff\xd8\xff"


def decode_jpegs(
    frames: Sequence[Any] | NDArray[Any], what: str, shape: tuple[int, ...] | None = None
) -> NDArray[np.uint8]:
    """JPEG files as pixels; see `decode_images`."""
    return decode_images(frames, what, shape, formats=("JPEG",))


def decode_images(
    frames: Sequence[Any] | NDArray[Any],
    what: str,
    shape: tuple[int, ...] | None = None,
    *,
    formats: tuple[str, ...] = ("JPEG", "PNG"),
) -> NDArray[Any]:
    """Image files, each bytes or an array of bytes, as pixels: (N, height, width[, channels]).

    Args:
        frames: (N,) files, or (N, num_bytes).
        what: begins the errors.
        shape: of an image; by default that of the first.
        formats: which may occur, as Pillow calls them.

    Returns:
        uint8, or uint16 for PNG files of 16 bits.

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
    decoded: NDArray[Any] | None = None
    for number, frame in enumerate(frames):
        content = frame if isinstance(frame, bytes) else np.asarray(frame).tobytes()
        try:
            # A foreign file is not to reach other decoders. The size is in its head.
            with Image.open(io.BytesIO(content), formats=formats) as image:
                size = image.size[::-1]
                wanted = size if shape is None else shape[:2]
                if image.mode not in MODES:
                    raise ValueError(f"its pixels are of mode {image.mode}")
                pixels = np.asarray(image) if size == wanted else None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise SourceError(f"image {number} of {what} cannot be decoded: {error}") from error
        shape = shape if shape is not None or pixels is None else pixels.shape
        if pixels is None or pixels.shape != shape:
            found = size if pixels is None else pixels.shape
            raise SourceError(f"image {number} of {what} must have shape {shape}, got {found}")
        if decoded is None:
            decoded = np.empty((len(frames), *pixels.shape), pixels.dtype)
        if pixels.dtype != decoded.dtype:
            raise SourceError(f"image {number} of {what} must be {decoded.dtype}")
        decoded[number] = pixels
    return np.empty((0, *(shape or ())), np.uint8) if decoded is None else decoded
