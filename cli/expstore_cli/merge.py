"""expstore merge: several stores in a new one."""

from __future__ import annotations

import click

import expstore
from expstore_cli.bar import EpisodeBar
from expstore_cli.copies import layout_options, print_copy


@click.command(
    epilog="""\b
Example:
  expstore merge actor-0.exp actor-1.exp actor-2.exp all.exp""",
)
@click.argument("sources", type=click.Path(), nargs=-1, required=True)
@click.argument("target", type=click.Path())
@layout_options
def merge(
    sources: tuple[str, ...],
    target: str,
    layout: str | None,
    chunk_steps: int | None,
    as_json: bool,
) -> None:
    """Write a new store with the episodes of several others.

    They come in the order of SOURCES, without deleted ones; the metadata of each gets
    merged_from, which says where it was. All stores must have the same fields. TARGET is there in
    the end, whole, or not at all.
    """
    with EpisodeBar("copying") as bar:
        copy = expstore.merge(
            sources, target, layout=layout, chunk_steps=chunk_steps, progress=bar.update
        )
    print_copy(copy, as_json)
