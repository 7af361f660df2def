"""expstore verify: recompute every checksum."""

from __future__ import annotations

import dataclasses

import click

import expstore
from expstore_cli import text
from expstore_cli.bar import EpisodeBar
from expstore_cli.repair import run_repair


@click.command(
    epilog="""\b
Example:
  expstore verify cheetah.exp
  expstore verify cheetah.exp --repair""",
)
@click.argument("store", type=click.Path())
@click.option("--repair", is_flag=True, help="Take out what fails, as expstore repair does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(context: click.Context, store: str, repair: bool, as_json: bool) -> None:
    """Recompute every checksum of a store.

    Checks files, index, end flags, metadata, history, saved priorities and every field of every
    episode of the newest commit, and changes nothing. Of deleted episodes only that they are
    deleted is checked. Problems are printed one per line, and then the verdict. Exit code 0 if the
    store is sound, 1 if it is not, or cannot be checked. With --repair, see expstore repair.
    """
    if repair:
        context.exit(run_repair(store, as_json))
    with EpisodeBar("verifying") as bar:
        found = expstore.verify(store, progress=bar.update)
    if as_json:
        text.echo_json({**dataclasses.asdict(found), "is_sound": found.is_sound})
    else:
        for problem in found.problems:
            click.echo(" ".join(problem.text.split()))
        click.echo(_verdict(found))
    context.exit(0 if found.is_sound else 1)


def _verdict(found: expstore.Verification) -> str:
    checked = f"{text.count(found.num_episodes, 'episode')} of commit {found.commit}"
    if found.is_sound:
        return f"sound: {checked}, {text.size(found.num_bytes)} read"
    problems = text.count(len(found.problems), "problem")
    return f"damaged: {problems} in {checked}; expstore repair keeps what is sound"
