"""The second half of the demo: frames of an Atari game, their size on disk, and a model of them.

The model squeezes a stack of two frames, sampled down to 42 x 40, into 32 numbers, as a world
model does, and rebuilds the second one.
"""

from __future__ import annotations

from pathlib import Path

import demo
import torch
from rich.progress import track
from torch import Tensor, nn

import expstore

ENV_ID = "ALE/Pong-v5"
STORE = "pong.exp"
LENGTH = 2  # frames of a stack
PIXELS = 42 * 40
BATCH_SIZE = 32


class Autoencoder(nn.Module):
    """Squeezes and rebuilds frames, as differences from the mean frame."""

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.mean = nn.Buffer(example.flatten(0, 1).mean(0))
        self.scale = (example - self.mean).std().item()
        self.encode = nn.Sequential(nn.Linear(LENGTH * PIXELS, 256), nn.SiLU(), nn.Linear(256, 32))
        self.decode = nn.Sequential(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, PIXELS))

    def forward(self, frames: Tensor) -> Tensor:
        """(B, W, PIXELS) frames to the (B, PIXELS) last ones, rebuilt."""
        seen = (frames - self.mean) / self.scale
        rebuilt: Tensor = self.decode(self.encode(seen.flatten(1)))
        return rebuilt * self.scale + self.mean

    def error(self, frames: Tensor) -> Tensor:
        """Mean squared error, in units of the usual difference from the mean frame."""
        missed: Tensor = (self(frames) - frames[:, -1]) / self.scale
        return missed.square().mean()


def small(frames: Tensor) -> Tensor:
    """(B, W, 210, 160, 3) bytes to (B, W, PIXELS) brightness from 0 to 1."""
    return frames[:, :, ::5, ::4].float().mean(-1).flatten(2) / 255


def main(directory: Path, *, quick: bool) -> None:
    """Record, compare sizes, train."""
    path = directory / STORE
    num_steps, num_batches = (600, 150) if quick else (4000, 600)
    demo.console.rule(f"4. Record {num_steps} frames of {ENV_ID}, random actions")
    demo.run("ingest", f"gym:{ENV_ID}", path, "--steps", num_steps, "--seed", 0, "--resume")
    compare(path)
    demo.console.rule("5. Learn to rebuild frames from 32 numbers")
    train(path, num_batches)


def compare(path: Path) -> None:
    """Say what the frames take on disk and what they would take raw."""
    frames = next(f for f in expstore.inspect(path).fields if f.name == "observation")
    field = expstore.open(path).fields["observation"]
    raw = field.step_bytes * expstore.open(path).num_steps
    demo.console.print(
        f"Frames are {field.layout}: {frames.allocated_bytes / 1e6:.1f} MB on disk for "
        f"{raw / 1e6:.1f} MB of pixels, {raw / frames.allocated_bytes:.0f} times less."
    )


def train(path: Path, num_batches: int) -> None:
    """The last tenth of the recording is held out; the model learns from what is before."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = expstore.open(path)
    unit = expstore.Sequence(length=LENGTH, episode_boundary="stop")
    replay = expstore.Replay(store, BATCH_SIZE, unit=unit, fields=["observation"], prefetch=1)
    windows = expstore.SequenceDataset(store, unit, fields=["observation"])
    num_learned = int(0.9 * store.num_steps)
    held_out = small(windows.batch(range(num_learned + 1, store.num_steps, 3))["observation"])
    model = Autoencoder(small(replay.sample()["observation"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = score(model, held_out)
    for _ in track(range(num_batches), "training", console=demo.console):
        batch = replay.sample()
        learned = batch.info.index[:, -1] < num_learned
        loss = model.error(small(batch["observation"])[learned])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = score(model, held_out)
    replay.close()
    demo.console.print(
        "Mean squared error of rebuilt held-out frames (the mean frame has about 1):"
    )
    demo.console.print(f"  frames, before     {before:7.4f}")
    demo.console.print(f"  frames, trained    {after:7.4f}   ({before / after:.1f} times smaller)")


@torch.no_grad()
def score(model: Autoencoder, frames: Tensor) -> float:
    """The error, without learning from it."""
    return model.error(frames).item()
