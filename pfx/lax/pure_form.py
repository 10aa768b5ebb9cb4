"""The pure counterpart of an op that writes into its operands.

torch names it by a rule: ``add_.Tensor`` and ``add.out`` both belong to ``add.Tensor``, the overload of
the same name with the same arguments that writes nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

# Not marked as writing in their schemas, and yet they update the running statistics they are given.
_HIDDEN: dict[Any, Any] = {
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
}
_HIDDEN_WRITES = ("running_mean", "running_var")


@dataclass(frozen=True)
class PureForm:
    """A pure op: its results are the `num_fresh` returns of the original, then what is `written`."""

    op: Any
    written: tuple[str, ...]
    num_fresh: int


def is_op(target: Any) -> bool:
    """Tell an op of torch's from a primitive of ours or a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call; those not given are absent."""
    names = [a.name for a in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def writes(target: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a call changes one of its operands."""
    if not is_op(target):
        return False
    if target in _HIDDEN:
        given = arguments(target, args, kwargs)
        return bool(given["training"]) and given["running_mean"] is not None
    return target._schema.is_mutable


@functools.lru_cache(maxsize=1024)
def pure_form(op: Any) -> PureForm | None:
    """Find the pure op that computes what `op` writes; None if torch has none.

    >>> pure_form(torch.ops.aten.add.out).op
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    schema = op._schema
    if op in _HIDDEN:
        return PureForm(_HIDDEN[op], _HIDDEN_WRITES, len(schema.returns))
    written = tuple(a.name for a in schema.arguments if _is_written(a))
    fresh = sum(r.alias_info is None for r in schema.returns)
    wanted = [_form(a) for a in schema.arguments if not a.is_out]
    for packet in _packets(op):
        overloads = [getattr(packet, name) for name in packet.overloads()]
        for other in sorted(overloads, key=lambda o: o._overloadname != op._overloadname):
            found = other._schema
            if not found.is_mutable and [_form(a) for a in found.arguments] == wanted:
                return PureForm(other, written, fresh)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _form(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def _packets(op: Any) -> list[Any]:
    namespace, name = op._schema.name.split("::")
    library = getattr(torch.ops, namespace)
    plain = name.removesuffix("_")
    names = (plain, f"{plain}_functional", f"_{plain}_functional")
    return [getattr(library, n) for n in names if hasattr(library, n)]
