"""Which ranks are gone, when a collective of the others fails: a roll call over the shared store."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from pfx.errors import RuntimeMismatchError, message
from pfx.recipe.agree import patiently

ROLL = "pfx/recipe/roll"
PATIENCE = 15.0  # seconds: a collective fails on the survivors within about so long of each other
LOST = 69  # the exit code: sysexits' EX_UNAVAILABLE
SIGNS = ("gloo", "nccl", "connection", "socket", "timed out", "broken pipe", "peer", "store")


class LostRanksError(RuntimeMismatchError):
    """Ranks that stopped answering while the others were waiting for them."""

    exit_code = LOST


def hosts_of(world: Any) -> list[str]:
    """The host name of every rank, asked for while all are there."""
    return world.exchange(socket.gethostname(), "the names of the hosts")


def is_of_others(error: BaseException) -> bool:
    """Whether an error looks like one of communication, not one of this rank's own.

    >>> is_of_others(RuntimeError("Connection closed by peer")), is_of_others(RuntimeError("index"))
    (True, False)
    """
    if getattr(error, "filename", None) is not None:  # of a file, whose name may hold any word
        return False
    name, text = type(error).__name__, str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and (
        name.startswith("Dist") or any(sign in text for sign in SIGNS)
    )


def lost(
    world: Any, hosts: list[str], error: BaseException, patience: float = PATIENCE
) -> LostRanksError:
    """Call the roll and return the error that names who does not answer.

    The store may be on the host that is gone: it is asked on a thread of its own, for as long as
    `patience` and no longer.
    """
    try:
        missing = patiently(lambda: _roll(world, patience), patience + 5)
    except (RuntimeError, OSError):
        missing = None
    return LostRanksError(_text(world, hosts, missing, error))


def _roll(world: Any, patience: float) -> list[int]:
    """The ranks that do not say that they are here in time."""
    keys = [f"{ROLL}/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], b"here")
    end = time.monotonic() + patience
    while True:
        missing = [rank for rank, key in enumerate(keys) if not world.store.check([key])]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.2)


def _text(world: Any, hosts: list[str], missing: list[int] | None, error: BaseException) -> str:
    where, said = f"rank {world.rank} of {world.size} ({hosts[world.rank]}):", str(error)
    first = said.splitlines()[0] if said else type(error).__name__
    again = "start the same command again: it goes on from the last checkpoint"
    if missing is None:
        here = [f"{rank} ({host})" for rank, host in enumerate(hosts) if host != hosts[world.rank]]
        master = os.environ.get("MASTER_ADDR", "its host")
        what = f"lost the store at {master}, and with it ranks on other hosts: {', '.join(here)}."
        return message(where, what, first, fix=again)
    if not missing:
        return message(where, "a collective failed although all ranks are here.", first, fix=again)
    names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in missing)
    return message(where, f"lost {names}.", first, fix=again)
