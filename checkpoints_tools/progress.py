"""Progress bars of the tools, drawn by rich on the standard error stream."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Speed(ProgressColumn):
    """Units of work in a second, e.g. weights or tokens."""

    def render(self, task: Task) -> Text:
        """Renders the speed of a task whose fields name a unit."""
        speed, unit = task.finished_speed or task.speed, task.fields.get("unit")
        if speed is None or unit is None:
            return Text("")
        return Text(f"{format_count(speed)} {unit}/s")


def progress_bar(shown: bool) -> Progress:
    """Makes a progress display; tasks may name the unit of their ``total``."""
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        _Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


def format_count(count: int | float) -> str:
    """Writes a count in three digits: 12.3 M."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def format_bytes(count: int | float) -> str:
    """Writes a number of bytes in three digits: 12.3 MB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
