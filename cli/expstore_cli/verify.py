"""expstore verify: recompute every checksum."""

from __future__ import annotations

import dataclasses

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import expstore
from expstore_cli import text


@click.command(
    epilog="""\b
Example:
  expstore verify cheetah.exp""",
)
@click.argument("store", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(context: click.Context, store: str, as_json: bool) -> None:
    """Recompute every checksum of a store.

    Checks files, index, end flags, metadata and every field of every episode of the newest
    commit, and changes nothing. Problems are printed one per line. Exit code 0 if the store is
    sound, 1 if it is not.
    """
    console = text.messages()
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("verifying", total=None)
        found = expstore.verify(
            store, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        text.echo_json({**dataclasses.asdict(found), "is_sound": found.is_sound})
    else:
        for problem in found.problems:
            click.echo(" ".join(problem.text.split()))
        _sum_up(found.commit, found.num_episodes, found.num_bytes, len(found.problems))
    context.exit(0 if found.is_sound else 1)


def _sum_up(commit: int, num_episodes: int, num_bytes: int, num_problems: int) -> None:
    checked = f"{text.count(num_episodes, 'episode')} of commit {commit}"
    if num_problems:
        click.echo(f"{text.count(num_problems, 'problem')} in {checked}", err=True)
    else:
        click.echo(f"sound: {checked}, {text.size(num_bytes)} read", err=True)
