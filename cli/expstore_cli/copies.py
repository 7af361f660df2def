"""What the commands that write a new store have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import click

import expstore
from expstore_cli import text
from expstore_cli.parameters import COUNT

Command = TypeVar("Command", bound=Callable[..., None])


def layout_options(command: Command) -> Command:
    """How the new store is laid out, and the form of the report."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option(
            "--chunk-steps",
            type=COUNT,
            help="Steps per file, a power of two; by default by the size of a step.",
        ),
        click.option(
            "--layout",
            type=click.Choice(["auto", "mapped", "coded"]),
            help="Layout of all fields; by default that of the (first) source.",
        ),
    ):
        command = option(command)
    return command


def print_copy(copy: expstore.Copy, as_json: bool) -> None:
    """What was written."""
    if as_json:
        text.echo_json(dataclasses.asdict(copy))
        return
    counts = [text.count(copy.num_episodes, "episode"), text.count(copy.num_steps, "step")]
    left_out = f"; {text.count(copy.left_out, 'deleted episode')} left out" if copy.left_out else ""
    for name, reason in copy.priorities_left.items():
        click.echo(f"priorities {name} did not come along: {' '.join(reason.split())}", err=True)
    if copy.repeated:
        came = text.count(copy.repeated, "episode")
        click.echo(f"{came} came twice, from the same origin; both copies were kept", err=True)
    click.echo(f"wrote {copy.path}: {', '.join(counts)}{left_out}")
