"""Frames of video files at given times, decoded by PyAV where it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install
from expstore.formats.lazy_rows import LazyRows, rows_or_lazy


def load_av(what: str) -> Any:
    """The package.

    Raises:
        MissingExtraError: begins with `what`; it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingExtraError(
            f"{what} is video, which needs PyAV; {how_to_install('video')}; "
            "or leave the video out with --drop"
        ) from error
    return av


def decode_frames(
    path: Path, times_s: NDArray[np.float64], tolerance_s: float, what: str
) -> NDArray[np.uint8] | LazyRows:
    """The frames nearest to the given times: (T, height, width, 3), red first.

    They are a lazy column where they are too many to hold at once.

    Args:
        times_s: (T,) ascending.
        tolerance_s: how far a frame may be from its time.
        what: begins the errors.

    Raises:
        MissingExtraError: PyAV is not installed.
        SourceError: the file is missing or damaged, or has no frame at one of the times.
    """
    av = load_av(what)
    if not path.is_file():
        raise SourceError(f"{what} is missing: there is no {path}")
    if not len(times_s):
        return np.empty((0, 0, 0, 3), np.uint8)
    found = _frames(av, path, times_s, tolerance_s, what)
    first = next(found)
    at = 0

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        nonlocal found, at
        if start != at:
            found, at = _frames(av, path, times_s[start:], tolerance_s, what), start
        frames = np.empty((stop - start, *first.shape), np.uint8)
        for frame in frames:
            pixels = first if at == 0 else next(found)
            if pixels.shape != first.shape:
                raise SourceError(f"{what} changes its size in {path}")
            frame[:] = pixels
            at += 1
        return frames

    return rows_or_lazy(len(times_s), first.nbytes, read)  # type: ignore[no-any-return]


def _frames(
    av: Any, path: Path, times_s: NDArray[np.float64], tolerance_s: float, what: str
) -> Iterator[NDArray[np.uint8]]:
    """The frame nearest to each time, one after the other."""
    at = 0
    try:
        # Only MP4: a playlist under that name could have other files read.
        with av.open(str(path), format="mp4") as container:
            stream = container.streams.video[0]
            _seek(container, stream, float(times_s[0]))
            for frame in container.decode(stream):
                if at == len(times_s):
                    return
                time = float(frame.pts * stream.time_base) if frame.pts is not None else math.nan
                if not abs(time - times_s[at]) <= tolerance_s:
                    if time > times_s[at]:
                        break
                    continue
                yield frame.to_ndarray(format="rgb24")
                at += 1
    except (av.error.FFmpegError, OSError, ValueError, IndexError, TypeError) as error:
        raise SourceError(f"{what} cannot be decoded from {path}: {error}") from error
    if at < len(times_s):
        raise SourceError(f"{what} has no frame at {times_s[at]:.3f} s in {path}")


def _seek(container: Any, stream: Any, time_s: float) -> None:
    """To the last frame before `time_s` that does not depend on earlier ones."""
    if time_s > 0:
        container.seek(int(time_s / stream.time_base), stream=stream, backward=True)
