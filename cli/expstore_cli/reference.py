"""The text of `docs/cli.md`: every command's help. `python -m expstore_cli.reference` prints it."""

from __future__ import annotations

import click

from expstore_cli.main import main

WIDTH = 96
HEAD = """# The command

<!-- Made by `python -m expstore_cli.reference > docs/cli.md`; a test keeps it true. -->

What a command finds goes to stdout, progress and errors to stderr. Exit codes: 0 all is well, 1 an
error (one line on stderr) or something is not as it should be, 2 the command was called wrongly,
3 a damaged store was repaired (`repair`, `verify --repair`), 130 Ctrl-C.
"""


def reference() -> str:
    """Markdown: the help of the group and of each command."""
    with click.Context(main, info_name="expstore") as group:
        parts = [HEAD, _section(main, "expstore")]
        for name in main.list_commands(group):
            command = main.get_command(group, name)
            assert command is not None, name
            parts.append(_section(command, f"expstore {name}"))
    return "\n".join(parts)


def _section(command: click.Command, name: str) -> str:
    settings = {**main.context_settings, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, terminal_width=WIDTH, **settings)
    return f"## {name}\n\n```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
