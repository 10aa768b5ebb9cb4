"""The error types users see, and the one template they are written in.

Every error says where it happened (function, key path), what was asked (spec, mesh, sizes), why it
cannot be done (the arithmetic) and, last, a line to paste::

    ShardingError: jit(train_step): state.params["w_up"] cannot be split.
      P(None, "tp") puts dim 1 (size 90) on axis "tp" (size 4); 90 % 4 = 2.
      mesh: dp=2 tp=4
      fix: make dim 1 a multiple of 4 (88 or 92), or drop "tp" from this spec.
"""

from __future__ import annotations


class PfxError(Exception):
    """Base of every error that pfx raises on purpose."""


class ShardingError(PfxError, ValueError):
    """A spec, a mesh and a shape that do not fit together."""


class MeshError(PfxError, ValueError):
    """A mesh that cannot be built or does not match the processes that run it."""


class TreeError(PfxError, ValueError):
    """Two pytrees that should have the same structure and do not."""


class TraceError(PfxError, TypeError):
    """A Python construct that cannot be part of a pure, traceable function."""


class RuntimeMismatchError(PfxError, RuntimeError):
    """Ranks that would not run the same program, or a rank that never arrived."""


def message(where: str, what: str, *details: str, fix: str = "") -> str:
    """Lay out an error text in the one template that pfx uses.

    >>> print(message("jit(f): x", "cannot be split.", "6 % 4 = 2", fix="use 8"))
    jit(f): x cannot be split.
      6 % 4 = 2
      fix: use 8
    """
    lines = [f"{where} {what}".strip(), *(f"  {detail}" for detail in details if detail)]
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)
