"""Encoded images as arrays."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError

JPEG_MAGIC = b"\xff\xd8\xff"


def decode_jpegs(
    frames: Sequence[Any] | NDArray[Any], what: str, shape: tuple[int, ...] | None = None
) -> NDArray[np.uint8]:
    """JPEG files, each an array of bytes, as pixels: (N, height, width[, channels]).

    Args:
        frames: (N,) arrays of bytes, or (N, num_bytes).
        what: begins the errors.
        shape: of an image; by default that of the first.

    Raises:
        MissingExtraError: Pillow is not installed.
        SourceError: one of them is no JPEG file, is damaged, or of another size.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            f"{what} holds JPEG images, which need Pillow; install it with: "
            "pip install 'expstore[images]'"
        ) from error
    decoded: NDArray[np.uint8] | None = None
    for number, frame in enumerate(frames):
        try:
            # Only JPEG: a foreign file is not to reach other decoders. The size is in its head.
            with Image.open(io.BytesIO(np.asarray(frame).tobytes()), formats=["JPEG"]) as image:
                size = image.size[::-1]
                wanted = size if shape is None else shape[:2]
                pixels = np.asarray(image, np.uint8) if size == wanted else None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise SourceError(f"image {number} of {what} cannot be decoded: {error}") from error
        shape = shape if shape is not None or pixels is None else pixels.shape
        if pixels is None or pixels.shape != shape:
            found = size if pixels is None else pixels.shape
            raise SourceError(f"image {number} of {what} must have shape {shape}, got {found}")
        if decoded is None:
            decoded = np.empty((len(frames), *pixels.shape), np.uint8)
        decoded[number] = pixels
    return np.empty((0, *(shape or ())), np.uint8) if decoded is None else decoded
