"""When all ranks stop: at the same step, although only one of them may have been asked to.

The one that is asked says "in two rounds" in the store that all share. It does so before it starts
its round r; nobody ends round r + 1 without numbers of round r, which need that start. So whoever
comes to round r + 2 finds the word there, and nobody has to wait for an answer in any round.
"""

from __future__ import annotations

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
    if stop.reason:
        word = f"{round + ROUNDS} {stop.reason} (rank {world.rank})"
        world.store.compare_set(KEY, "", word)  # the first word counts
    elif not world.store.check([KEY]):
        return ""
    last, _, reason = world.store.get(KEY).decode().partition(" ")
    return reason if round >= int(last) else ""
