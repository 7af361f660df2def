"""Frames are decoded alike by a kept context and by numcodecs, and what is none is refused."""

import threading

import numpy as np
import pytest

from expstore.storage import zstd


@pytest.fixture(params=["context", "numcodecs"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numcodecs":
        monkeypatch.setattr(zstd, "_library", None)
    elif zstd._library is None:
        pytest.skip("numcodecs hides its zstd here")


def frame(rows: np.ndarray) -> np.ndarray:
    return np.frombuffer(zstd.compress(rows, 1), np.uint8)


@pytest.mark.parametrize("num_bytes", [1, 100, 131072, 131073, 3_000_000])
def test_a_frame_comes_back(num_bytes: int):
    rows = np.random.default_rng(0).integers(0, 4, num_bytes, np.uint8)
    out = np.zeros(num_bytes + 2, np.uint8)
    zstd.decompress(frame(rows), out[1:-1])
    assert np.array_equal(out[1:-1], rows)
    assert out[0] == out[-1] == 0


def test_what_is_no_frame_of_that_size_is_refused_and_the_next_one_decodes():
    rows = np.arange(1000, dtype=np.uint8)
    good = frame(rows)
    out = np.empty(1000, np.uint8)
    bad = [good[:-1], good[3:], good[:0], np.zeros(40, np.uint8), np.tile(good, 2)]
    flipped = good.copy()
    flipped[4] ^= 0x55
    for data in [*bad, flipped]:
        with pytest.raises(ValueError):
            zstd.decompress(data, out)
        zstd.decompress(good, out)
        assert np.array_equal(out, rows)
    for size in (999, 1001):
        with pytest.raises(ValueError):
            zstd.decompress(good, np.empty(size, np.uint8))


def test_each_thread_has_a_context_of_its_own():
    rows = [np.random.default_rng(k).integers(0, 4, 200_000, np.uint8) for k in range(4)]
    frames = [frame(r) for r in rows]
    wrong: list[int] = []

    def decode(k: int) -> None:
        out = np.empty(200_000, np.uint8)
        for _ in range(50):
            zstd.decompress(frames[k], out)
            if not np.array_equal(out, rows[k]):
                wrong.append(k)

    threads = [threading.Thread(target=decode, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 300, 70_000, 131_073, 3_000_000])
@pytest.mark.parametrize("most", [1, 4, 256])  # values: repeated, compressed and raw blocks
def test_a_frame_says_where_it_ends(num_bytes: int, most: int):
    data = frame(np.random.default_rng(1).integers(0, most, num_bytes, np.uint16).astype(np.uint8))
    more = np.concatenate([data, np.full(50, 7, np.uint8)])

    assert zstd.frame_bytes(more) == zstd.frame_bytes(data) == len(data)
    for cut in range(max(0, len(data) - 20), len(data)):
        assert zstd.frame_bytes(data[:cut]) is None
    assert zstd.frame_bytes(more[1:]) is None
