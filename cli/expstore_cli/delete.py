"""expstore delete: episodes that nobody shall see any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import click

import expstore
from expstore_cli import text
from expstore_cli.parameters import COUNT

MOST_LISTED = 50  # episodes of a dry run


@click.command(
    epilog="""\b
Example:
  expstore delete cheetah.exp 3 17
  expstore delete cheetah.exp --where 'return < 10 and policy == "random"'""",
)
@click.argument("store", type=click.Path())
@click.argument("episodes", type=COUNT, nargs=-1, metavar="[EPISODE]...")
@click.option(
    "--where",
    metavar="CONDITION",
    help="Delete the episodes for which this holds: names of columns (length, return, end_reason, "
    "seed, start, number) or keys of the metadata, one of < <= > >= == != and a number, a text in "
    "quotes, true, false or null; several joined by and.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing, show what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def delete(
    store: str,
    episodes: tuple[int, ...],
    where: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete episodes by number, or those that a condition holds for.

    They are gone for everyone who opens the store from then on, and their numbers are not used
    again; expstore compact gives their space back. Until then the older commits still have them,
    see expstore history.
    """
    if bool(episodes) == (where is not None):
        raise click.UsageError("give numbers of episodes, or --where")
    chosen: str | Iterable[int] = where if where is not None else episodes
    found = expstore.delete(store, chosen, dry_run=True)
    if not dry_run and found.episodes:
        if not yes:
            click.confirm(f"delete {_described(found)}?", abort=True, err=True)
        # By number: what was shown is deleted, also if the store has grown since.
        found = expstore.delete(store, found.episodes)
    if as_json:
        text.echo_json({**dataclasses.asdict(found), "dry_run": dry_run})
        return
    if dry_run:
        _list(store, found)
    kept = text.count(found.kept_episodes, "episode")
    what = "would delete" if dry_run else "deleted"
    click.echo(f"{what} {_described(found)}, {kept} left")


def _list(store: str, found: expstore.Deletion) -> None:
    """What would be deleted, a line for each episode, of many the first ones only."""
    opened = expstore.open(store, at=found.commit)
    for row in opened.filter(found.episodes[:MOST_LISTED]).episodes:
        parts = [f"episode {row['number']}", text.count(row["length"], "step"), row["end_reason"]]
        if isinstance(row.get("return"), float):
            parts.append(f"return {text.number(row['return'])}")
        click.echo(", ".join(parts))
    if len(found.episodes) > MOST_LISTED:
        click.echo(f"and {len(found.episodes) - MOST_LISTED:,} others, which --json lists")


def _described(found: expstore.Deletion) -> str:
    counts = [text.count(len(found.episodes), "episode"), text.count(found.num_steps, "step")]
    return " with ".join(counts)
