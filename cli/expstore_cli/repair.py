"""expstore repair: keep every episode that verifies, take the others out."""

from __future__ import annotations

import dataclasses

import click

import expstore
from expstore_cli import text
from expstore_cli.bar import EpisodeBar

REPAIRED = 3  # the exit code when there was damage, and it was taken care of


@click.command(
    epilog="""\b
Example:
  expstore repair cheetah.exp""",
)
@click.argument("store", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def repair(context: click.Context, store: str, as_json: bool) -> None:
    """Keep every episode that verifies, take the others out.

    What follows from what is sound is mended. Episodes that fail nevertheless are deleted, in one
    commit, after what can be read of them was copied to __expstore/quarantine, where damaged
    files are moved, too. Nothing is destroyed. Every problem is printed, then what was mended,
    every episode that was lost, and the verdict.

    Exit code 0 if the store was sound, 3 if it was damaged and is sound now, 1 if it could not be
    repaired.
    """
    context.exit(run_repair(store, as_json))


def run_repair(store: str, as_json: bool) -> int:
    """Repair a store and print what was done; returns the exit code."""
    with EpisodeBar("verifying") as bar:
        found = expstore.repair(store, progress=bar.update)
    if as_json:
        text.echo_json({**dataclasses.asdict(found), "was_sound": found.was_sound})
    else:
        for problem in found.problems:
            click.echo(" ".join(problem.text.split()))
        for what in found.mended:
            click.echo(f"mended: {what}")
        for lost in found.lost:
            click.echo(
                f"lost: episode {lost.number}, {text.count(lost.length, 'step')} from {lost.start}"
            )
        click.echo(_verdict(found))
    return 0 if found.was_sound else REPAIRED


def _verdict(found: expstore.Repair) -> str:
    kept = f"{text.count(found.num_episodes, 'episode')} of commit {found.commit}"
    if found.was_sound:
        return f"sound: {kept}, nothing to repair"
    lost = f"{text.count(len(found.lost), 'episode')} lost"
    where = f", what was taken out is in {found.quarantine}" if found.quarantine else ""
    return f"repaired: {kept}, {lost}{where}"
