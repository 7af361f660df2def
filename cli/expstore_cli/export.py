"""expstore export: episodes of a store in a format of somebody else's."""

from __future__ import annotations

import dataclasses

import click

import expstore
from expstore_cli import text
from expstore_cli.bar import EpisodeBar

FORMATS = ("d4rl", "lerobot", "minari", "npz", "parquet", "robomimic", "zarr")


@click.command(
    epilog="""\b
Example:
  expstore export cheetah.exp cheetah-minari --format minari
  expstore export cheetah.exp best.hdf5 --format d4rl --where "return > 3000" --lossy""",
)
@click.argument("store", type=click.Path())
@click.argument("target", type=click.Path())
@click.option(
    "--format", "form", type=click.Choice(FORMATS), required=True, help="Of what is written."
)
@click.option(
    "--where",
    metavar="CONDITION",
    help="Only the episodes for which this holds; see expstore delete.",
)
@click.option("--lossy", is_flag=True, help="Leave out what the format cannot express.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def export(
    store: str, target: str, form: str, where: str | None, lossy: bool, as_json: bool
) -> None:
    """Write the episodes of a store in another format.

    What the format cannot express is listed before anything is written, and needs --lossy. TARGET
    is a file for d4rl and robomimic, a directory for the others; it is there in the end, whole,
    or not at all.
    """
    with EpisodeBar("exporting") as bar:
        result = expstore.export_to(
            store, target, format=form, where=where, lossy=lossy, progress=bar.update
        )
    if as_json:
        text.echo_json(dataclasses.asdict(result))
        return
    for loss in result.losses:
        click.echo(f"left out: {loss}", err=True)
    counts = [text.count(result.num_episodes, "episode"), text.count(result.num_steps, "step")]
    click.echo(f"wrote {result.path}: {', '.join(counts)}")
