"""expstore ingest: the episodes of a source, appended to a store."""

from __future__ import annotations

import dataclasses
import os
import sys
import time

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

import expstore
from expstore.formats import FORMATS
from expstore_cli import text
from expstore_cli.parameters import COUNT, RANGE, RENAMED
from expstore_cli.report import print_report


@click.command(
    epilog="""\b
Examples:
  expstore ingest recorded/ arm.exp --expect-episodes 20
  expstore ingest hopper_medium-v2.hdf5 hopper.exp --infos
  expstore ingest lift.hdf5 lift.exp --done-mode 0
  expstore ingest lift.hdf5 lift.exp --done-mode 0 --drop states --map observation/object=goal
  expstore ingest rollouts/ ppo.exp --postprocess gae:gamma=0.99,lambda=0.95
  expstore ingest gym:HalfCheetah-v5 cheetah.exp --episodes 20""",
)
@click.argument("source")
@click.argument("store", type=click.Path())
@click.option(
    "--format",
    type=click.Choice(sorted(FORMATS)),
    help="Format of the source; by default its content decides.",
)
@click.option(
    "--episodes",
    type=RANGE,
    help="The first N episodes of the source, or those from number A on and before B.",
)
@click.option(
    "--map",
    "renamed",
    type=RENAMED,
    multiple=True,
    help="Store a field, and what lies under it, by another name.",
)
@click.option(
    "--drop",
    "dropped",
    metavar="FIELD",
    multiple=True,
    help="Leave a field out, and what lies under it.",
)
@click.option(
    "--steps",
    type=COUNT,
    help="For gym: stop at exactly N steps; the last episode is cut there.",
)
@click.option(
    "--seed",
    type=COUNT,
    help="For gym: seed of the first episode, the others follow; 0 by default.",
)
@click.option(
    "--policy",
    metavar="POLICY",
    help="For gym: random (the default), or module:function from observation to action.",
)
@click.option(
    "--max-episode-steps",
    type=COUNT,
    help="For D4RL files without timeouts: longer episodes were cut after N steps.",
)
@click.option("--infos", is_flag=True, help="Import infos, too, where the format has such.")
@click.option("--keep-encoded", is_flag=True, help="Keep JPEG and PNG images as their bytes.")
@click.option("--jobs", type=COUNT, help="Threads that decode images; the result is the same.")
@click.option(
    "--done-mode",
    type=COUNT,
    help="For robomimic, what dones mean: 0 success, 1 the end, 2 either.",
)
@click.option(
    "--alignment",
    metavar="NAME",
    help="For Flashbax, what a row is: step, arrival or previous.",
)
@click.option("--trust", is_flag=True, help="Let pickles run whatever code they name.")
@click.option(
    "--postprocess",
    metavar="FUNCTION",
    help="Run on each episode before it is stored: module:function, or gae, returns, n_step or "
    "reward_scaling with parameters, as in gae:gamma=0.99,lambda=0.95.",
)
@click.option(
    "--expect-episodes",
    type=COUNT,
    help="Exit with 1 unless the store then has exactly N episodes of this source.",
)
@click.option("--resume", is_flag=True, help="Append what the store lacks of this source.")
@click.option("--cast", is_flag=True, help="Allow casts that lose nothing, and report them.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def ingest(
    context: click.Context,
    source: str,
    store: str,
    format: str | None,
    episodes: int | slice | None,
    renamed: tuple[tuple[str, str], ...],
    dropped: tuple[str, ...],
    steps: int | None,
    seed: int | None,
    policy: str | None,
    max_episode_steps: int | None,
    infos: bool,
    keep_encoded: bool,
    jobs: int | None,
    done_mode: int | None,
    alignment: str | None,
    trust: bool,
    postprocess: str | None,
    expect_episodes: int | None,
    resume: bool,
    cast: bool,
    as_json: bool,
) -> None:
    """Append the episodes of a source to a store.

    SOURCE is a file or folder of recorded episodes in one of the formats of --format, recognised
    by its content, or gym:ENV_ID, to roll episodes out in a gymnasium environment. STORE is
    created if there is none.

    --map and --drop take the names that fields would have in the store without them, as expstore
    inspect shows them. Every row that does not reach the store is in the closing report, with
    the reason. Ctrl-C keeps every whole episode; --resume continues after them. Files that cannot
    be read are named, all others are kept, and the exit code is 1.
    """
    if os.getcwd() not in sys.path:  # where a policy or an environment of one's own lies
        sys.path.insert(0, os.getcwd())
    interrupted = False
    with _Bar() as bar:
        try:
            report = expstore.ingest_from(
                source,
                store,
                format=format,
                resume=resume,
                episodes=episodes,
                map=dict(renamed),
                drop=dropped,
                steps=steps,
                seed=seed,
                policy=policy,
                max_episode_steps=max_episode_steps,
                infos=infos,
                keep_encoded=keep_encoded,
                jobs=jobs,
                done_mode=done_mode,
                alignment=alignment,
                trust=trust,
                postprocess=postprocess,
                cast=cast,
                progress=bar.update,
            )
        except expstore.ExpstoreError as error:
            notes = [text.as_flags(note) for note in getattr(error, "__notes__", ())]
            raise type(error)("; ".join([text.as_flags(str(error)), *notes])) from error
        except KeyboardInterrupt as stop:
            if not hasattr(stop, "report"):  # it came before there was anything to keep
                raise
            report, interrupted = stop.report, True
    if as_json:
        text.echo_json({**dataclasses.asdict(report), "source_episodes": report.source_episodes})
    else:
        print_report(report, store)
    context.exit(_verdict(report, interrupted, expect_episodes))


def _verdict(report: expstore.IngestReport, interrupted: bool, expected: int | None) -> int:
    """The exit code, and on stderr what is not as it should be."""
    for failure in report.failures:
        click.echo(
            f"error: {failure.key}: {' '.join(text.as_flags(failure.reason).split())}", err=True
        )
    if interrupted:
        kept = text.count(report.num_episodes, "whole episode")
        click.echo(f"interrupted: {kept} kept; continue with --resume", err=True)
        return 130
    if expected is not None and report.source_episodes != expected:
        found = text.count(report.source_episodes, "episode")
        click.echo(
            f"error: expected {expected:,}, but {report.store} has {found} of {report.source}; "
            "the data stays there",
            err=True,
        )
        return 1
    return 1 if report.failures else 0


class _Bar:
    """The progress bar; nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        console = text.messages()
        self._bar = Progress(
            TextColumn("ingesting"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("ingesting", total=None, rates="")
        self._started = time.monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: expstore.IngestProgress) -> None:
        """Show how far it is; what is known in advance decides what the bar measures."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        rates = (
            f"{text.count(progress.num_episodes, 'episode')}, "
            f"{text.count(progress.num_steps, 'step')}, "
            f"{progress.num_steps / seconds:,.0f} steps/s, "
            f"{progress.num_bytes / seconds / 1e6:,.1f} MB/s"
        )
        completed, total = progress.num_episodes, progress.remaining_episodes
        if progress.remaining_steps is not None:
            completed, total = progress.num_steps, progress.remaining_steps
        self._bar.update(self._task, completed=completed, total=total, rates=rates)
