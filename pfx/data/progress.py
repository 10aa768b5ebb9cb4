"""A progress bar for preprocessing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pfx.data.preprocess import Progress
from pfx.errors import message


@contextmanager
def progress_bar(what: str = "tokenizing", *, console: Any = None) -> Iterator[Progress]:
    """Show the bytes done, the speed and the time left while a ``with`` block runs.

    ``with progress_bar() as progress: preprocess(..., progress=progress)``

    Args:
        what: the label of the bar.
        console: a `rich.console.Console`; None: standard error.
    """
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError as error:
        text, fix = "needs the package rich.", "pip install 'pfx[data]'"
        raise ImportError(message("a progress bar", text, fix=fix)) from error
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console or Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
