"""The progress bar of commands that go through episodes."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from expstore_cli import text


class EpisodeBar:
    """Shows how many episodes are done; nothing where stderr is not a terminal.

    Args:
        doing: what is being done, such as "verifying".
    """

    def __init__(self, doing: str) -> None:
        console = text.messages()
        columns = (
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("episodes"),
            TimeRemainingColumn(),
        )
        is_hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=is_hidden)
        self._task = self._bar.add_task(doing, total=None)

    def __enter__(self) -> EpisodeBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """So many of `total` episodes are done."""
        self._bar.update(self._task, completed=done, total=total)
