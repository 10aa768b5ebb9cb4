"""Which of torch's functions write into an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

_IN_PLACE = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


def is_in_place(func: Callable[..., Any]) -> bool:
    """Tell by its name whether a function writes into its first operand.

    >>> is_in_place(torch.Tensor.add_), is_in_place(torch.Tensor.__add__)
    (True, False)
    """
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.startswith("_"))


@dataclass(frozen=True)
class Writer:
    """A function whose name does not show that it writes, nor always a version counter."""

    leading: str  # its leading arguments
    switch: str  # the one that makes it write
    default: bool | None
    operand: str  # what it writes; there may be more
    fix: str

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the operand that a call writes, or None."""
        given = dict(zip(self.leading.split(), args, strict=False)) | dict(kwargs)
        switch = given.get(self.switch, self.default)
        return None if switch is None or switch is False else given.get(self.operand)


_STATISTICS = "input running_mean running_var weight bias"
_NORM_FIX = (
    "module.eval() before the call; for batch statistics in training, build the layer with "
    "track_running_stats=False"
)


def _norm(leading: str, switch: str, *, default: bool) -> Writer:
    return Writer(f"{leading} {switch}", switch, default, "running_mean", _NORM_FIX)


def _lookup(leading: str) -> Writer:
    return Writer(leading, "max_norm", None, "weight", "build the layer without max_norm")


WRITERS: dict[Any, Writer] = {
    F.batch_norm: _norm(_STATISTICS, "training", default=False),
    F.instance_norm: _norm(_STATISTICS, "use_input_stats", default=True),
    torch.batch_norm: _norm(
        "input weight bias running_mean running_var", "training", default=False
    ),
    F.embedding: _lookup("input weight padding_idx max_norm"),
    F.embedding_bag: _lookup("input weight offsets max_norm"),
}


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of a torch function writes.

    >>> x = torch.zeros(1)
    >>> [x is y for y in written_by(torch.Tensor.add_, (x, 1), {})]
    [True]
    """
    found = [kwargs.get("out")]
    if is_in_place(func) and args:
        found.append(args[0])
    if func in WRITERS:
        found.append(WRITERS[func].written(args, kwargs))
    return [x for one in found for x in (one if isinstance(one, (list, tuple)) else (one,))
            if isinstance(x, torch.Tensor)]  # fmt: skip
