"""One device's share of a local call: a function of the operands' tensors, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pfx.compiler.in_place import as_marked
from pfx.compiler.ir import Compute, Value, values_in

Call = Callable[[Sequence[torch.Tensor], Any], Any]

aten = torch.ops.aten
# torch's own functions that take what an op takes: a call through `torch.ops` costs a microsecond more.
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add, aten.add.out: torch.add, aten.clone.default: torch.clone,
    aten.mm.default: torch.mm, aten.mul.Tensor: torch.mul, aten.mul.out: torch.mul,
    aten.permute.default: torch.permute, aten.reshape.default: torch.reshape,
    aten.stack.default: torch.stack, aten.sum.dim_IntList: torch.sum, aten.t.default: torch.t,
    aten.transpose.int: torch.transpose, aten.unbind.int: torch.unbind,
}  # fmt: skip


def function_of(target: Any) -> Callable[..., Any]:
    """The fastest function that does what a call's target does."""
    return _FUNCTIONS.get(target, target)


def local_call(instr: Compute, *, reuse: bool = True) -> Call:
    """A function of the operands' local tensors (in the order of `ins`) and the offset.

    With `reuse`, a call marked to overwrite operands does so.
    """
    positions = {value.number: i for i, value in enumerate(instr.ins)}
    target, keywords = as_marked(instr) if reuse else (instr.target, {})
    out = positions[keywords.pop("out").number] if "out" in keywords else -1
    instr = replace(instr, target=function_of(target), kwargs={**instr.kwargs, **keywords})
    nested = [a for a in instr.args if not isinstance(a, Value)]
    if any(values_in([*nested, *instr.kwargs.values()])):
        return _nested(instr, positions, out)
    return _flat(instr, positions, out)


def _flat(instr: Compute, positions: Mapping[int, int], out: int) -> Call:
    """Operands are arguments themselves: a position each, the constants at -1."""
    target, kwargs = instr.target, dict(instr.kwargs)
    template = [
        (positions[a.number], None) if isinstance(a, Value) else (-1, a) for a in instr.args
    ]
    if out >= 0:
        return lambda ins, _: target(
            *[ins[i] if i >= 0 else a for i, a in template], **kwargs, out=ins[out]
        )
    if instr.offset:
        return lambda ins, offset: target(
            *[ins[i] if i >= 0 else a for i, a in template], **kwargs, offset=offset
        )
    if all(i == k for k, (i, _) in enumerate(template)) and not kwargs:
        return lambda ins, _: target(*ins)
    return lambda ins, _: target(*[ins[i] if i >= 0 else a for i, a in template], **kwargs)


def _nested(instr: Compute, positions: Mapping[int, int], out: int) -> Call:
    """Operands are also inside lists (a concat) or keywords."""

    def call(ins: Sequence[torch.Tensor], offset: Any) -> Any:
        args = _fill(instr.args, ins, positions)
        kwargs = _fill(dict(instr.kwargs), ins, positions)
        if out >= 0:
            kwargs["out"] = ins[out]
        return instr.target(*args, **kwargs, **({"offset": offset} if instr.offset else {}))

    return call


def _fill(arg: Any, ins: Sequence[torch.Tensor], positions: Mapping[int, int]) -> Any:
    if isinstance(arg, Value):
        return ins[positions[arg.number]]
    if isinstance(arg, (list, tuple)):
        return type(arg)(_fill(item, ins, positions) for item in arg)
    if isinstance(arg, dict):
        return {key: _fill(item, ins, positions) for key, item in arg.items()}
    return arg
