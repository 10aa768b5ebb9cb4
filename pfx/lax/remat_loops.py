"""Which loops are rematerialized that do not say so themselves: a plan's word, not a model's."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

# Set by a training step while its loss runs, never by users.
_LOOPS: contextvars.ContextVar[str | None] = contextvars.ContextVar("remat of loops", default=None)


@contextlib.contextmanager
def remat_loops(policy: str | None) -> Iterator[None]:
    """Run with `policy` for the scans that have none; not for those in their bodies.

    >>> with remat_loops("full"):
    ...     remat_of_loops()
    'full'
    """
    token = _LOOPS.set(policy)
    try:
        yield
    finally:
        _LOOPS.reset(token)


def remat_of_loops() -> str | None:
    """The policy of a scan that has none of its own.

    >>> remat_of_loops() is None
    True
    """
    return _LOOPS.get()
