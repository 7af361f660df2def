"""The `expstore` command: a group whose commands are loaded when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import click

# name -> module and what the list of commands says; a test compares it with the command's help
COMMANDS = {
    "compact": (
        "expstore_cli.compact",
        "Write a new store without the deleted and evicted episodes of another one.",
    ),
    "delete": (
        "expstore_cli.delete",
        "Delete episodes by number, or those that a condition holds for.",
    ),
    "export": ("expstore_cli.export", "Write the episodes of a store in another format."),
    "history": ("expstore_cli.history", "List the commits of a store."),
    "ingest": ("expstore_cli.ingest", "Append the episodes of a source to a store."),
    "inspect": ("expstore_cli.inspect", "Show what a store holds, or one episode of it."),
    "merge": ("expstore_cli.merge", "Write a new store with the episodes of several others."),
    "repair": ("expstore_cli.repair", "Keep every episode that verifies, take the others out."),
    "verify": ("expstore_cli.verify", "Recompute every checksum of a store."),
}
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


class Commands(click.Group):
    """Loads a command's module only when it is called, and ends errors in one line."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[name][0]), name)
        assert isinstance(command, click.Command), name
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(INTERRUPTED)
        except Exception as error:
            from expstore.errors import ExpstoreError

            if not isinstance(error, ExpstoreError):
                raise
            text = "; ".join([str(error), *getattr(error, "__notes__", ())])
            click.echo(f"error: {' '.join(text.split())}", err=True)
            context.exit(1)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Example:
  expstore ingest gym:HalfCheetah-v5 cheetah.exp --episodes 20
  expstore inspect cheetah.exp""",
)
@click.version_option(package_name="expstore", message="%(prog)s %(version)s")
def main() -> None:
    """Record reinforcement-learning experience on disk, and look at it."""
