"""Frames of video files at given times, decoded by PyAV where it is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install


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
) -> NDArray[np.uint8]:
    """The frames nearest to the given times: (T, height, width, 3), red first.

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
    frames: NDArray[np.uint8] | None = None
    at = 0
    try:
        # Only MP4: a playlist under that name could have other files read.
        with av.open(str(path), format="mp4") as container:
            stream = container.streams.video[0]
            _seek(container, stream, float(times_s[0]) if len(times_s) else 0.0)
            for frame in container.decode(stream):
                if at == len(times_s):
                    break
                time = float(frame.pts * stream.time_base) if frame.pts is not None else math.nan
                if not abs(time - times_s[at]) <= tolerance_s:
                    if time > times_s[at]:
                        break
                    continue
                pixels = frame.to_ndarray(format="rgb24")
                if frames is None:
                    frames = np.empty((len(times_s), *pixels.shape), np.uint8)
                frames[at] = pixels
                at += 1
    except (av.error.FFmpegError, OSError, ValueError, IndexError, TypeError) as error:
        raise SourceError(f"{what} cannot be decoded from {path}: {error}") from error
    if at < len(times_s):
        raise SourceError(f"{what} has no frame at {times_s[at]:.3f} s in {path}")
    return np.empty((0, 0, 0, 3), np.uint8) if frames is None else frames


def _seek(container: Any, stream: Any, time_s: float) -> None:
    """To the last frame before `time_s` that does not depend on earlier ones."""
    if time_s > 0:
        container.seek(int(time_s / stream.time_base), stream=stream, backward=True)
