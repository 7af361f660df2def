"""Encoded images as arrays."""

import io
from typing import Any

import numpy as np
import pytest

from expstore.errors import SourceError
from expstore.formats.images import decode_images, decode_jpegs

image_module = pytest.importorskip("PIL.Image")


def encoded(pixels: Any, form: str = "PNG", mode: str | None = None) -> bytes:
    image, file = image_module.fromarray(pixels), io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, form)
    return file.getvalue()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((6, 8, 3), np.uint8), ((6, 8, 4), np.uint8), ((6, 8), np.uint8), ((6, 8), np.uint16)],
)
def test_png_gives_the_same_pixels(shape: tuple[int, ...], dtype: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(dtype)

    back = decode_images([encoded(frame) for frame in pixels], "camera")

    assert (back.dtype, back.shape) == (pixels.dtype, pixels.shape)
    assert back.tobytes() == pixels.tobytes()


def test_a_palette_is_refused_since_its_numbers_are_no_colours() -> None:
    file = encoded(np.zeros((6, 8, 3), np.uint8), mode="P")

    with pytest.raises(SourceError, match=r"image 0 of camera .* its pixels are of mode P"):
        decode_images([file], "camera")


def test_images_of_different_sizes_are_refused() -> None:
    files = [encoded(np.zeros((6, width, 3), np.uint8)) for width in (8, 9)]

    with pytest.raises(SourceError, match=r"image 1 of camera must have shape \(6, 8, 3\)"):
        decode_images(files, "camera")


@pytest.mark.parametrize(("decode", "form"), [(decode_jpegs, "PNG"), (decode_images, "GIF")])
def test_other_formats_do_not_reach_their_decoders(decode: Any, form: str) -> None:
    file = encoded(np.zeros((6, 8, 3), np.uint8), form, "RGB" if form == "PNG" else "P")

    with pytest.raises(SourceError, match="image 0 of camera cannot be decoded"):
        decode([file], "camera")


def test_several_threads_decode_as_one_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 6, 8, 3)).astype(np.uint8)
    files = [encoded(frame) for frame in pixels]

    one, several = (decode_images(files, "camera", jobs=jobs) for jobs in (1, 4))

    assert np.asarray(one).tobytes() == np.asarray(several).tobytes() == pixels.tobytes()
    files[7] = files[29] = b"no image"
    with pytest.raises(SourceError, match="image 7 of camera"):
        decode_images(files, "camera", jobs=4)
