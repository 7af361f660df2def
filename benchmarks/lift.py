"""Batches lifted to a GPU: the speed of the copies, and whether a training step hides them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import expstore
from benchmarks.experience import frames
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Goal, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import FRAMES, about

KERNEL_MS = 10
PREFETCH = 2
BARE, LIFTED = "bare copy from pinned memory", "expstore: copies of Replay.sample"
ALONE, WITH_SAMPLE = "a compute kernel alone", "expstore Replay.sample + the kernel"
MATRIX = 4096


def run_lift(folder: Path, run: Run) -> Result:
    """Frames of 64 x 64 x 3 bytes; left out where there is no GPU."""
    size = run.of(FRAMES)
    words = f"{about(size, '64x64x3 uint8, mapped')}, to a GPU, {PREFETCH} batches ahead"
    if not torch.cuda.is_available():
        print("  there is no GPU; left out", file=sys.stderr)
        return Result("lift", words, [], [])
    experience = frames(size.num_steps, size.episode_steps)
    store = experience.write(folder / "frames.exp")
    unit = expstore.Sequence(length=size.length)
    replay = expstore.Replay(store, size.batch_size, unit=unit, device="cuda", prefetch=PREFETCH)
    check_same_bytes(replay, experience.columns["observation"])
    num_bytes = size.batch_size * size.length * experience.columns["observation"][0].nbytes
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    bandwidth = {
        BARE: [copied_gb_s(lambda: target.copy_(pinned, non_blocking=True)) for _ in range(5)],
        LIFTED: [copied_gb_s(replay.sample, calls=20) for _ in range(5)],
    }
    kernel = compute_kernel()
    contestants: dict[str, Callable[[], Any]] = {
        ALONE: kernel,
        WITH_SAMPLE: lambda: (replay.sample(), kernel()),
    }
    seconds = timed_in_turns(
        contestants, rounds=size.rounds, calls=20, before=torch.cuda.synchronize
    )
    replay.close()
    speeds = [Figure.of(n, values, "GB/s") for n, values in bandwidth.items()]
    times = [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]
    goals: list[Goal] = [
        *ratio("lifted / bare pinned copy, GB/s", speeds, LIFTED, BARE, 0.8, at_most=False),
        *ratio("with sampling / kernel alone", times, WITH_SAMPLE, ALONE, 1.05),
    ]
    return Result("lift", words, [*speeds, *times], goals)


def check_same_bytes(replay: expstore.Replay, frames: Any) -> None:
    """What stands on the GPU is what was recorded."""
    batch = replay.sample()
    index = batch.info.index.cpu().numpy()
    found = batch["observation"].cpu().numpy()
    assert found.tobytes() == frames[index].tobytes(), "the GPU holds other bytes"


def copied_gb_s(call: Callable[[], Any], calls: int = 5) -> float:
    """Bandwidth of the copies to the GPU that the calls make, by CUDA's own clock."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    copies = [event for event in events if "Memcpy HtoD" in event.name()]
    assert copies, "no copy to the GPU was seen"
    # Small ones, of masks and weights, would measure the latency.
    largest = sorted(copies, key=lambda event: event.nbytes(), reverse=True)[:calls]
    return sum(e.nbytes() for e in largest) / sum(e.duration_ns() for e in largest)


def compute_kernel() -> Callable[[], None]:
    """Matrix products for about `KERNEL_MS`, waited for, as a training step is."""
    matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    each_ms = (time.perf_counter() - start) / 20 * 1e3
    products = max(1, round(KERNEL_MS / each_ms))

    def kernel() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)
        torch.cuda.current_stream().synchronize()

    return kernel
