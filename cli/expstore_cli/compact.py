"""expstore compact: a new store without what was deleted."""

from __future__ import annotations

import click

import expstore
from expstore_cli.bar import EpisodeBar
from expstore_cli.copies import layout_options, print_copy


@click.command(
    epilog="""\b
Example:
  expstore compact cheetah.exp small.exp
  expstore compact atari.exp smaller.exp --layout coded""",
)
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@layout_options
def compact(
    source: str, target: str, layout: str | None, chunk_steps: int | None, as_json: bool
) -> None:
    """Write a new store without the deleted and evicted episodes of another one.

    Episodes and steps are numbered anew, and the new store has an id of its own; everything else
    is the same to the bit, which is checked. Priorities saved beside SOURCE come along. SOURCE
    stays as it is. TARGET is there in the end, whole, or not at all.
    """
    with EpisodeBar("copying") as bar:
        copy = expstore.compact(
            source, target, layout=layout, chunk_steps=chunk_steps, progress=bar.update
        )
    print_copy(copy, as_json)
