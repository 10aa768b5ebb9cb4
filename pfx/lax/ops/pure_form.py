"""The pure counterpart of an op that writes into its operands.

torch names it by a rule: ``add_.Tensor`` and ``add.out`` both belong to ``add.Tensor``, the overload of
the same name that takes the same arguments and writes nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from pfx._torch import OpOverload

aten = torch.ops.aten

# Not marked as writing in its schema, and yet it updates the running statistics it is given.
_HIDDEN: dict[Any, Any] = {
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
}
_HIDDEN_WRITES = ("running_mean", "running_var")
_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # an ``out=`` brings its own
_RENAMED = {"__ilshift__": "__lshift__", "__irshift__": "__rshift__"}


@dataclass(frozen=True)
class PureForm:
    """A pure op: first the `num_fresh` results that were new anyway, then what would be `written`."""

    op: Any
    written: tuple[str, ...]
    num_fresh: int
    options: bool  # whether it must be told the dtype and device of what would be written


def is_op(target: Any) -> bool:
    """Tell an op of torch's from a primitive of ours or a Python function."""
    return isinstance(target, OpOverload)


def arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call; those not given are absent."""
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def writes(target: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a call changes one of its operands."""
    if not is_op(target):
        return False
    if target in _HIDDEN:
        given = arguments(target, args, kwargs)
        return bool(given["training"]) and given["running_mean"] is not None
    return target._schema.is_mutable


def written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call writes: tensors, or lists of them."""
    given = arguments(op, args, kwargs)
    if op in _HIDDEN:
        names = _HIDDEN_WRITES if writes(op, args, kwargs) else ()
    else:
        names = tuple(
            a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write
        )
    return [given[name] for name in names if given.get(name) is not None]


@functools.lru_cache(maxsize=1024)
def pure_form(op: Any) -> PureForm | None:
    """Find the pure op that computes what `op` writes; None if torch has none.

    >>> pure_form(torch.ops.aten.add.out).op
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    schema = op._schema
    if op in _HIDDEN:
        return PureForm(_HIDDEN[op], _HIDDEN_WRITES, len(schema.returns), options=False)
    written = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    fresh = sum(r.alias_info is None for r in schema.returns)
    wanted = [_form(a) for a in schema.arguments if not a.is_out]
    for other in _candidates(op):
        found = [_form(a) for a in other._schema.arguments]
        if found == wanted:
            return PureForm(other, written, fresh, options=False)
        if [form for form in found if form[0] not in _OPTIONS] == wanted:
            return PureForm(other, written, fresh, options=True)
    return None


def _form(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def _candidates(op: Any) -> list[Any]:
    """The overloads that write nothing and bear the name of `op`, its own overload name first."""
    namespace, name = op._schema.name.split("::")
    plain: str = _RENAMED.get(name) or name.removesuffix("_")
    library, found = getattr(torch.ops, namespace), []
    for packet_name in (plain, f"{plain}_functional", f"_{plain}_functional"):
        if hasattr(library, packet_name):
            packet = getattr(library, packet_name)
            found += [getattr(packet, overload) for overload in packet.overloads()]
    same_first = sorted(found, key=lambda other: other._overloadname != op._overloadname)
    return [other for other in same_first if not other._schema.is_mutable]
