"""expstore history: the commits of a store."""

from __future__ import annotations

import dataclasses
import time

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

import expstore
from expstore_cli import text
from expstore_cli.parameters import COUNT


@click.command(
    epilog="""\b
Example:
  expstore history cheetah.exp --last 20""",
)
@click.argument("store", type=click.Path())
@click.option("--last", type=COUNT, help="Show the newest N commits only.")
@click.option("--json", "as_json", is_flag=True, help="Print the commits as JSON.")
def history(store: str, last: int | None, as_json: bool) -> None:
    """List the commits of a store.

    Oldest first: number, time, the episodes and steps that the store had as of it, and how many
    episodes it deleted or evicted. An older commit can be read (expstore inspect --at) as long as
    none of its episodes was evicted.
    """
    found = expstore.history(store)
    found = found[max(0, len(found) - last) :] if last is not None else found
    if as_json:
        text.echo_json([dataclasses.asdict(commit) for commit in found])
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("commit", "time", "episodes", "steps", "deleted", "evicted"):
        table.add_column(column, justify="left" if column == "time" else "right", no_wrap=True)
    for commit in found:
        table.add_row(
            str(commit.number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.time)),
            f"{commit.num_episodes:,}",
            f"{commit.num_steps:,}",
            f"{commit.num_deleted:,}" if commit.num_deleted else "",
            f"{commit.num_evicted:,}" if commit.num_evicted else "",
        )
    text.output().print(table)
