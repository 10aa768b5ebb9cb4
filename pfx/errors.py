"""The error types users see, and the one template they are written in.

Every error says where it happened (function, key path), what was asked (spec, mesh, sizes), why it
cannot be done (the arithmetic) and, last, a line to paste::

    ShardingError: jit(train_step): state.params["w_up"] cannot be split.
      P(None, "tp") puts dim 1 (size 90) on axis "tp" (size 4); 90 % 4 = 2.
      mesh: dp=2 tp=4
      fix: make dim 1 a multiple of 4 (88 or 92), or drop "tp" from this spec.
"""

from __future__ import annotations

import os.path
import sys
import traceback

import torch


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


class CheckpointError(PfxError, ValueError):
    """A checkpoint that is not there, is damaged, or does not hold what is asked of it."""


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


# Whose frames are no user's: this package's, torch's, and code made on the fly.
_OWN = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep, "<")


def _line(filename: str, number: int | None) -> str:
    folder, file = os.path.split(filename)
    folder = os.path.basename(folder)
    # A notebook's cell is a file named after the process and a hash.
    place = "cell" if folder.startswith("ipykernel_") else f"{folder}/{file}"
    return f"{place}:{number}"


def user_line() -> str:
    """Return ``folder/file.py:line`` of the innermost running frame that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def raised_line(error: BaseException) -> str:
    """Return ``folder/file.py:line`` of the innermost frame of the user's that an error left."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    return next(
        (
            _line(frame.f_code.co_filename, number)
            for frame, number in frames
            if not frame.f_code.co_filename.startswith(_OWN)
        ),
        "",
    )
