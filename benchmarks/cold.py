"""Cold batches of windows: nothing of the files in the page cache, every round anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.disk import DirectRead, forget, read_bytes
from benchmarks.experience import Experience, atari, flags
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore, WindowReader, check_same_bytes
from benchmarks.results import Figure, Goal, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import H5PY, SLICES, TORCHRL, Size

REAL_STEPS = 12_000  # of Atari; repeated to the size that is asked for
SIZES = {
    "full": Size(48_000, 1000, 64, 50, rounds=7, calls=1),
    "quick": Size(12_000, 1000, 64, 50, rounds=4, calls=1),
    "tiny": Size(400, 100, 4, 20, rounds=2, calls=1),
}
MAPPED, CODED = "expstore Replay.sample, mapped", "expstore Replay.sample, coded"
DEVICE = "the device: as many bytes read in one sequence, O_DIRECT"


def run_cold(folder: Path, run: Run) -> Result:
    """Real Atari frames, mapped and coded."""
    size = run.of(SIZES)
    experience = repeated(atari(min(REAL_STEPS, size.num_steps), size.episode_steps), size)
    mapped = experience.write(folder / "mapped.exp", layout="mapped")
    coded = experience.write(folder / "coded.exp", layout="auto")
    contestants: dict[str, WindowReader] = {
        MAPPED: Expstore(mapped, *size.at, num_threads=2),
        CODED: Expstore(coded, *size.at, num_threads=2),
        **peers(run, experience, folder, size),
    }
    check_same_bytes(contestants, experience, *size.at)
    asked = size.batch_size * size.length * experience.columns["observation"][0].nbytes
    experience.columns["observation"].tofile(folder / "device")
    device = DirectRead(folder / "device", asked)
    fetched: dict[str, list[int]] = {}
    calls = {n: partial(counted, n, c.sample, fetched) for n, c in contestants.items()}
    torch.set_num_threads(2)
    seconds = timed_in_turns(
        {**calls, DEVICE: device}, rounds=size.rounds, before=partial(forget, folder)
    )
    device.close()
    times = [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]
    # Windows that overlap, and those that repeat a last step, ask for fewer bytes than they get.
    shares = [
        Figure.of(f"{n}: bytes read / bytes of the batch", [b / asked for b in counts[1:]], "x")
        for n, counts in fetched.items()
    ]
    speed = device.num_bytes / asked * 1.0
    return Result("cold-atari", about(size), [*times, *shares], goals(times, shares, speed))


def repeated(experience: Experience, size: Size) -> Experience:
    """The same episodes again and again, up to `num_steps`."""
    times = size.num_steps // experience.num_steps
    columns = {n: np.concatenate([c] * times) for n, c in experience.columns.items()}
    num_steps = len(columns["reward"])
    return Experience({**columns, **flags(num_steps, size.episode_steps)}, size.episode_steps)


def peers(run: Run, experience: Experience, folder: Path, size: Size) -> dict[str, WindowReader]:
    """TorchRL, a plain map and HDF5, each over files of its own."""
    from benchmarks.peers import arrays

    found: dict[str, WindowReader] = {}
    if run.wants("torchrl"):
        from benchmarks.peers.torchrl import Sequences

        found[TORCHRL] = Sequences(experience, folder / "torchrl", *size.at)
    if run.wants("numpy"):
        plain = arrays.mapped_copies(experience, folder / "plain")
        found[SLICES] = arrays.Plain(experience, plain, *size.at)
    if run.wants("h5py"):
        datasets = arrays.hdf5_copies(experience, folder / "copies.h5")
        found[H5PY] = arrays.Plain(experience, datasets, *size.at, arrays.EVERY_ROW)
    return found


def counted(name: str, call: Callable[[], Any], fetched: dict[str, list[int]]) -> Any:
    """The call, with the bytes noted that it fetched from storage."""
    before = read_bytes()
    batch = call()
    fetched.setdefault(name, []).append(read_bytes() - before)
    return batch


def goals(times: list[Figure], shares: list[Figure], device_share: float) -> list[Goal]:
    median: Mapping[str, float] = {figure.contestant: figure.median for figure in times}
    speed = median[DEVICE] / device_share / median[MAPPED]
    return [
        Goal("mapped / sequential direct read, bytes per second", speed, 0.8, at_most=False),
        Goal("mapped: bytes read / bytes of the batch", shares[0].median, 1.1),
        *ratio("mapped / TorchRL Sequence", times, MAPPED, TORCHRL, 1 / 5),
        *ratio("mapped / plain map", times, MAPPED, SLICES, 1 / 5),
        *ratio("mapped / coded: windows per second", times, MAPPED, CODED, 5, at_most=False),
    ]


def about(size: Size) -> str:
    return (
        f"cold, two threads, {size.batch_size} windows x {size.length} steps, real Atari frames "
        f"64x64x3 uint8; {size.num_steps:,} steps in episodes of {size.episode_steps:,}"
    )
