"""Signals that end a run: SIGTERM, and SIGINT once, ask it to save and stop at the next step.

torchrun hands a SIGTERM on to its processes, and kills what is still there after 30 seconds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 75  # the exit code of a run that was asked to stop: sysexits' EX_TEMPFAIL, "run me again"
WATCHED = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether somebody asked this process to stop; the one thing that a signal handler sets."""

    def __init__(self) -> None:
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Remember the first reason."""
        self.reason = self.reason or reason


@contextmanager
def watching() -> Iterator[Stop]:
    """Collect signals instead of dying of them; a second SIGINT raises KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, nothing is collected.

    >>> with watching() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    >>> stop.reason
    'SIGTERM'
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and stop.reason:
            raise KeyboardInterrupt
        stop.ask(signal.Signals(number).name)

    before: dict[signal.Signals, Any] = {one: signal.signal(one, handle) for one in WATCHED}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
