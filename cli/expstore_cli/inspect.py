"""expstore inspect: what a store holds, or one episode of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable

import click
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import expstore
from expstore_cli import text
from expstore_cli.parameters import COUNT


@click.command(
    epilog="""\b
Example:
  expstore inspect cheetah.exp
  expstore inspect cheetah.exp --episode 3
  expstore inspect cheetah.exp --at 12""",
)
@click.argument("store", type=click.Path())
@click.option("--episode", type=COUNT, help="Show one episode by its number.")
@click.option("--at", type=COUNT, help="Show it as of commit N, see expstore history.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def inspect(store: str, episode: int | None, at: int | None, as_json: bool) -> None:
    """Show what a store holds, or one episode of it.

    Fields with shape, dtype, layout and bytes on disk; how long the episodes are, what they
    return and how they ended; the newest commit. A store that is being written can be
    inspected like any other: it is shown as of its newest commit.
    """
    found: expstore.StoreSummary | expstore.EpisodeSummary
    if episode is None:
        found = expstore.inspect(store, at=at)
    else:
        found = expstore.inspect(store, episode=episode, at=at)
    if as_json:
        text.echo_json(dataclasses.asdict(found))
        return
    console = text.output()
    parts = _episode(found) if isinstance(found, expstore.EpisodeSummary) else _store(found)
    for part in parts:
        console.print(part)


def _store(found: expstore.StoreSummary) -> Iterable[RenderableType]:
    age = text.duration(max(0.0, time.time() - found.commit_time))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.commit_time))
    yield Text(found.path, style="bold")
    counts = [text.count(found.num_episodes, "episode"), text.count(found.num_steps, "step")]
    yield Text(f"{', '.join(counts)}, {text.size(found.allocated_bytes)} on disk")
    yield Text(f"commit {found.commit} of {when}, {age} ago")
    if found.num_deleted:
        deleted = text.count(found.num_deleted, "deleted episode")
        yield Text(f"{deleted}, whose space expstore compact gives back")
    yield Text()
    if not found.fields:
        yield Text("no fields yet: the first episode decides them")
        return
    yield _fields(found)
    if found.num_episodes:
        yield Text()
        yield _distributions(found)
        yield Text()
        yield _ends(found)
    if found.priorities:
        yield Text()
        yield _priorities(found)


def _fields(found: expstore.StoreSummary) -> Table:
    table = _table("field", "shape", "dtype", "layout", "on disk>", "as arrays>", "smaller>")
    for field in found.fields:
        table.add_row(
            field.name,
            _shape(field),
            field.dtype,
            field.layout,
            text.size(field.allocated_bytes),
            text.size(field.num_bytes),
            _ratio(field),
        )
    others = found.allocated_bytes - sum(field.allocated_bytes for field in found.fields)
    others -= sum(entry.allocated_bytes for entry in found.priorities)
    table.add_row("[dim]index and metadata[/dim]", "", "", "", text.size(others), "", "")
    return table


def _distributions(found: expstore.StoreSummary) -> Table:
    table = _table("per episode", "min>", "median>", "mean>", "max>", "from min to max")
    rows = {"length": found.length, **found.returns}
    for name, spread in rows.items():
        if spread is None:
            continue
        bars = text.bars(spread.counts) if len(spread.counts) > 1 else "all the same"
        if spread.num_not_finite:
            bars += f"  ({spread.num_not_finite} NaN or infinite, left out)"
        values = (spread.min, spread.median, spread.mean, spread.max)
        table.add_row(name, *map(text.number, values), bars)
    return table


def _ends(found: expstore.StoreSummary) -> Table:
    table = _table("episodes end", "number>", "share>", "")
    most = max(found.end_reasons.values())
    for reason, number in found.end_reasons.items():
        share = f"{100 * number / found.num_episodes:.1f} %"
        table.add_row(reason, f"{number:,}", share, "█" * max(1, round(24 * number / most)))
    return table


def _priorities(found: expstore.StoreSummary) -> Table:
    table = _table("saved priorities", "steps>", "on disk>", "saved")
    for entry in found.priorities:
        steps, when = "", "damaged: see expstore verify"
        if entry.num_steps is not None:
            steps = f"{entry.num_steps:,}"
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        table.add_row(Text(entry.name), steps, text.size(entry.allocated_bytes), when)
    return table


def _episode(found: expstore.EpisodeSummary) -> Iterable[RenderableType]:
    yield Text(f"{found.path}, episode {found.number}", style="bold")
    stop = found.start + found.length
    ending = "known" if found.has_final_observation else "not known"
    yield Text(f"{text.count(found.length, 'step')}: {found.start} to {stop - 1} of the store")
    yield Text(f"ended: {found.end_reason}; observation after the last step: {ending}")
    if isinstance(found.returned, float):
        yield Text(f"return: {text.number(found.returned)}")
    elif found.returned is not None:
        yield Text(f"return: {found.returned}")
    yield Text(f"seed: {'not known' if found.seed is None else found.seed}")
    yield Text()
    table = _table("field", "shape", "dtype", "min>", "mean>", "max>", "")
    for field in found.fields:
        values = map(text.number, (field.min, field.mean, field.max))
        left_out = f"{field.num_not_finite:,} NaN or infinite" if field.num_not_finite else ""
        table.add_row(field.name, _shape(field), field.dtype, *values, left_out)
    yield table
    if found.metadata:
        yield Text()
        yield Text("metadata", style="bold")
        yield Text(json.dumps(found.metadata, indent=2, ensure_ascii=False))


def _table(*columns: str) -> Table:
    """A table with these columns; a `>` at the end aligns one to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, column in enumerate(columns):
        table.add_column(
            column.removesuffix(">"),
            justify="right" if column.endswith(">") else "left",
            overflow="fold",
            no_wrap=at > 0,
        )
    return table


def _ratio(field: expstore.FieldSummary) -> str:
    """How many times a compressed column is smaller than its arrays."""
    if field.layout != "coded" or not field.allocated_bytes:
        return ""
    ratio = field.num_bytes / field.allocated_bytes
    return f"{ratio:,.0f} x" if ratio >= 10 else f"{ratio:.1f} x"


def _shape(field: expstore.FieldSummary | expstore.FieldRange) -> str:
    own = "x".join(map(str, field.shape))
    if field.ragged:
        return f"any x {own}" if own else "any"
    return own or "scalar"
