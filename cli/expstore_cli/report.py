"""The closing report of an import."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.text import Text

import expstore
from expstore_cli import text


def print_report(report: expstore.IngestReport, store: str) -> None:
    """What was appended, and everything that did not arrive as it was."""
    console = text.output()
    console.print(Text(report.description, style="bold"))
    for name, value in _lines(report):
        # Wrapped by the terminal, so that a line stays one when it is copied or searched for.
        line = Text.assemble((f"{name:<20}", "dim"), text.as_flags(value))
        console.print(line, soft_wrap=True)
    console.print()
    console.print(Text(f"next: expstore inspect {shlex.quote(store)}"), soft_wrap=True)


def _lines(report: expstore.IngestReport) -> Iterator[tuple[str, str]]:
    yield "episodes", _episodes(report)
    yield "steps", f"{report.num_steps:,}{_rates(report)}"
    yield "rows dropped", _counted(report.dropped_steps, "none")
    if report.skipped_episodes:
        yield "episodes skipped", _counted(report.skipped_episodes, "none")
    if report.failures:
        yield "not imported", f"{text.count(len(report.failures), 'part')}, named below"
    if report.left_out:
        yield "left out", "; ".join(f"{name} ({why})" for name, why in report.left_out.items())
    yield "boundaries", report.boundary_rule
    if report.flags:
        ended = (f"{name} in {text.count(n, 'episode')}" for name, n in report.flags.items())
        yield "end flags", ", ".join(ended)
    yield "final observations", _final_observations(report)
    yield "dtypes", _dtypes(report)
    if report.shape_changes:
        changes = (f"{name} {change}" for name, change in report.shape_changes.items())
        yield "shapes", "; ".join(changes)
    if report.postprocess:
        yield "postprocess", f"{report.postprocess} on every episode"
    for remark, number in report.remarks.items():
        yield "note", f"{remark} ({text.count(number, 'episode')})" if number else remark
    if report.lost_episodes:
        lost = text.count(report.lost_episodes, "episode")
        yield "lost before", f"{lost} that an earlier writer appended, but never committed"
    totals = [text.count(report.store_episodes, "episode"), text.count(report.store_steps, "step")]
    yield "store", f"{report.store}: {', '.join(totals)}, commit {report.commit}"


def _episodes(report: expstore.IngestReport) -> str:
    line = f"{report.num_episodes:,}"
    if report.end_reasons:
        ends = (f"{number:,} {reason}" for reason, number in report.end_reasons.items())
        line += f" ({', '.join(ends)})"
    if report.episodes_before:
        line += f", after {report.episodes_before:,} that were there before"
    return line


def _rates(report: expstore.IngestReport) -> str:
    if not report.num_steps:
        return ""
    seconds = max(report.duration_s, 1e-3)
    steps_s, bytes_s = report.num_steps / seconds, report.num_bytes / seconds
    return f" in {text.duration(seconds)}: {steps_s:,.0f} steps/s, {bytes_s / 1e6:,.1f} MB/s"


def _final_observations(report: expstore.IngestReport) -> str:
    if report.final_observations == report.num_episodes:
        return "kept for every episode" if report.num_episodes else "-"
    known = f"{report.final_observations:,} of {report.num_episodes:,} episodes have one"
    return f"{known}; the source does not have the others"


def _dtypes(report: expstore.IngestReport) -> str:
    changes = [f"{name} {change}" for name, change in report.dtype_changes.items()]
    changes += [
        f"{name} cast to the store's dtype in {text.count(rows, 'row')}"
        for name, rows in report.casts.items()
    ]
    return "; ".join(changes) or "as in the source"


def _counted(counts: object, otherwise: str) -> str:
    assert isinstance(counts, dict), counts
    return "; ".join(f"{number:,} ({reason})" for reason, number in counts.items()) or otherwise
