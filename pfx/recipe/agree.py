"""When all ranks stop: at the same step, although only one of them may have been asked to.

The one that is asked says "in two rounds" in the store that all share. It does so before it starts
its round r; nobody ends round r + 1 without numbers of round r, which need that start. So whoever
comes to round r + 2 finds the word there, and nobody has to wait for an answer in any round.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from pfx.recipe.signals import Stop

ROUNDS = 2
KEY = "pfx/recipe/stop"


def stopping(world: Any, stop: Stop, round: int) -> str:
    """Return why all ranks stop before this round; "" when they do not.

    Args:
        world: the processes, `pfx.runtime.process_world.world_of`.
        stop: whether this process was asked to.
        round: counted alike on all ranks, up by one with each step that is run.

    >>> from pfx.runtime.process_world import Alone
    >>> stop = Stop()
    >>> stop.ask("SIGTERM")
    >>> stopping(Alone(), stop, 3)
    'SIGTERM'
    """
    if world.size == 1:
        return stop.reason
    return patiently(lambda: _word(world, stop.reason, round), world.patience)


def _word(world: Any, reason: str, round: int) -> str:
    """Give the word if there is a reason, and read it."""
    if reason:
        word = f"{round + ROUNDS} {reason} (rank {world.rank})"
        world.store.compare_set(KEY, "", word)  # the first word counts
    elif not world.store.check([KEY]):
        return ""
    last, _, why = world.store.get(KEY).decode().partition(" ")
    return why if round >= int(last) else ""


def patiently(call: Callable[[], Any], seconds: float) -> Any:
    """Ask a store that may be on a host that is gone: it would wait for an answer for ever.

    Raises:
        RuntimeError: there is none in time.

    >>> patiently(lambda: 3, 5.0)
    3
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise RuntimeError(f"the store has not answered for {seconds:g} s") from None
    if error is not None:
        raise error
    return value
