"""The screen: plain lines, and above a terminal's bottom edge a bar of how far the run is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pfx.recipe.log import Lines, Numbers, Sink


class _Bar:
    """Moves rich's bar to the step that was last heard of."""

    def __init__(self, move: Callable[[int], Any]) -> None:
        self.move = move

    def step(self, step: int, numbers: Numbers) -> None:
        self.move(step)

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        self.move(step)

    def close(self) -> None:
        pass


@contextmanager
def screen(total: int, *, every: int, progress: bool) -> Iterator[list[Sink]]:
    """Give the sinks that show a run; a bar only on a terminal, where rich is installed."""
    if not (progress and sys.stdout.isatty()):
        yield [Lines(_print, total, every)]
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield [Lines(_print, total, every)]
        return
    with Progress("training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as shown:
        task = shown.add_task("training", total=total)
        show = lambda text: shown.console.print(text, highlight=False, markup=False, soft_wrap=True)
        yield [Lines(show, total, every), _Bar(lambda step: shown.update(task, completed=step))]


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
