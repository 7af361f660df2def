"""The main job on real experience: record HalfCheetah-v5, inspect the store, train from windows.

Then the same with frames of an Atari game (`demo_atari.py`). Run by `scripts/demo`, which makes
the environment. The model sees ten steps (observation and action) and predicts the observation
after them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import expstore

ENV_ID = "HalfCheetah-v5"
STORE = "cheetah.exp"
LENGTH = 10  # steps that the model sees
FIELDS = ("observation", "action", "next_observation")
BATCH_SIZE = 256
REPORTED_EVERY = 50  # batches

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Size:
    """How much the demo does."""

    num_episodes: int
    num_batches: int


FULL = Size(num_episodes=60, num_batches=3000)
QUICK = Size(num_episodes=6, num_batches=300)


class NextObservation(nn.Module):
    """A small network over a window of normalised steps; predicts the last observation's change."""

    def __init__(self, example: expstore.Batch) -> None:
        super().__init__()
        observation = example["observation"].flatten(0, 1).float()
        change = example["next_observation"].flatten(0, 1).float() - observation
        self.mean, self.scale = nn.Buffer(observation.mean(0)), nn.Buffer(spread(observation))
        self.change_mean, self.change_scale = nn.Buffer(change.mean(0)), nn.Buffer(spread(change))
        num_observed, num_actions = observation.shape[1], example["action"].shape[-1]
        self.layers = nn.Sequential(
            nn.Linear(LENGTH * (num_observed + num_actions), 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, num_observed),
        )

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """(B, W, n) and (B, W, m) to the (B, n) observations after the windows."""
        seen = torch.cat([(observation - self.mean) / self.scale, action], dim=-1)
        change: Tensor = self.layers(seen.flatten(1))
        return observation[:, -1] + change * self.change_scale + self.change_mean

    def error(self, predicted: Tensor, batch: expstore.Batch) -> Tensor:
        """Mean squared error of (B, n) predictions, in units of a step's usual change."""
        missed: Tensor = (predicted - batch["next_observation"][:, -1].float()) / self.change_scale
        return missed.square().mean()


def spread(values: Tensor) -> Tensor:
    """(n,) standard deviations of (N, n) values, never 0."""
    return values.std(0).clamp_min(1e-6)


def main() -> None:
    """Record, inspect, train, and say what to try next."""
    arguments = parse(sys.argv[1:])
    size = QUICK if arguments.quick else FULL
    directory = Path(arguments.directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / STORE
    console.rule(f"1. Record {size.num_episodes} episodes of {ENV_ID}, random actions")
    # With --resume the command appends what is missing, and nothing where nothing is.
    run("ingest", f"gym:{ENV_ID}", path, "--episodes", size.num_episodes, "--seed", 0, "--resume")
    console.rule("2. Look at what was recorded")
    run("inspect", path)
    console.rule(f"3. Learn to predict the next observation from {LENGTH} steps")
    train(path, size.num_batches)
    demo_atari.main(directory, quick=arguments.quick)
    console.rule("What to try next")
    suggest(path)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("directory", nargs="?", default="demo", help="where the store goes")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    return parser.parse_args(arguments)


def run(*arguments: object) -> None:
    """Show a command of `expstore` and run it."""
    words = ["expstore", *map(str, arguments)]
    console.print(f"[bold]$ {escape(shlex.join(words))}")
    installed = Path(sys.executable).with_name("expstore")
    code = subprocess.run([os.fspath(installed), *words[1:]], check=False).returncode
    if code:
        raise SystemExit(code)


def train(path: Path, num_batches: int) -> None:
    """Train on nine tenths of the episodes; the others say how good the model is."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is so small that threads would only wait for each other
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = expstore.open(path)
    learned, held_out = split(store)
    console.print(
        f"{learned.num_episodes} episodes to learn from, {held_out.num_episodes} held out; "
        f"windows of {LENGTH} steps, {BATCH_SIZE} a batch, on {device}"
    )
    replay, exam = (
        expstore.Replay(
            view,
            batch_size,
            # A window that would run over the end of its episode slides back: ten real steps.
            unit=expstore.Sequence(length=LENGTH, episode_boundary="stop"),
            fields=FIELDS,
            device=device,
            prefetch=1,
        )
        for view, batch_size in ((learned, BATCH_SIZE), (held_out, 8 * BATCH_SIZE))
    )
    questions = exam.sample()
    model = NextObservation(replay.sample()).to(device)
    before, trivial = score(model, questions)
    fit(model, replay, questions, num_batches)
    after, _ = score(model, questions)
    console.print("Mean squared error on held-out episodes, in units of a step's usual change:")
    console.print(f"  next = current     {trivial:7.4f}")
    console.print(f"  before training    {before:7.4f}")
    console.print(f"  after training     {after:7.4f}   ({trivial / after:.1f} times smaller)")
    for loader in (replay, exam):
        loader.close()


def split(store: expstore.Store) -> tuple[expstore.Store, expstore.Store]:
    """Two views by whole episodes. Of few episodes, one view may get none: then another seed."""
    for seed in itertools.count():
        learned, held_out = store.split(0.9, seed=seed)
        if learned.num_episodes and held_out.num_episodes:
            return learned, held_out
    raise AssertionError


def fit(
    model: NextObservation, replay: expstore.Replay, questions: expstore.Batch, num_batches: int
) -> None:
    """Adam with a learning rate that falls to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_batches)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  held-out {task.fields[held_out]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_batches, loss=math.nan, held_out=math.nan)
        for done in range(1, num_batches + 1):
            batch = replay.sample()
            loss = model.error(model(batch["observation"].float(), batch["action"]), batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if done % REPORTED_EVERY == 0:
                held_out, _ = score(model, questions)
                progress.update(task, loss=loss.item(), held_out=held_out)
            progress.update(task, completed=done)


@torch.no_grad()
def score(model: NextObservation, batch: expstore.Batch) -> tuple[float, float]:
    """Error of the model, and that of `next = current`."""
    observation = batch["observation"].float()
    predicted = model(observation, batch["action"])
    return model.error(predicted, batch).item(), model.error(observation[:, -1], batch).item()


def suggest(path: Path) -> None:
    """Commands that go on from here."""
    where = shlex.quote(str(path))
    place = escape(str(path.resolve()))
    console.print(f"The store is [bold]{place}[/bold]: a directory of plain Zarr arrays.")
    activate = shlex.quote(f"{sys.prefix}/bin/activate")
    for command, purpose in (
        (f". {activate}", "so that the commands are found"),
        (f"expstore inspect {where} --episode 0", "one episode"),
        (f"expstore verify {where}", "recompute every checksum"),
        (f"expstore ingest gym:{ENV_ID} {where} --episodes 200 --resume", "record more"),
        (
            f"python -c \"import zarr; print(zarr.open_group('{path}', mode='r').tree())\"",
            "any Zarr reader",
        ),
    ):
        console.print(f"  {escape(command)}  [dim]# {purpose}")
    console.print("The guide is docs/guides/quickstart.md.")


if __name__ == "__main__":
    sys.modules["demo"] = sys.modules["__main__"]  # so that the second half uses this one
    import demo_atari

    main()
