"""Calls that write results into the memory of their operands, and the mark that says which.

`Compute.over` names, for each result, the operand whose memory it takes. Three kinds of calls can:
elementwise ops, by their ``out=`` form; kernels, which are told; and additions to a sum, always.
Everything that asks about memory (reuse, the peak, what a runtime calls) asks here.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from pfx._torch import OpOverload
from pfx.compiler.ir import Compute, Value


@runtime_checkable
class Kernel(Protocol):
    """A function that takes ``over=``: for each result the argument to write it over, or -1.

    `operands` lists, for each result, the arguments it may be written over.
    """

    operands: tuple[tuple[int, ...], ...]

    def __call__(self, *args: Any, over: tuple[int, ...] = ...) -> Any:
        """Run it; without `over` every result has memory of its own."""
        ...


def choices(instr: Compute) -> list[list[int]]:
    """For each result the operands (places in `ins`) whose memory it could take; none: empty."""
    if isinstance(instr.target, Kernel):
        return [[_place(instr, k) for k in places] for places in instr.target.operands]
    return [] if out_variant(instr.target) is None else [list(range(len(instr.ins)))]


def _place(instr: Compute, k: int) -> int:
    """The place in `ins` of argument `k`, by number: a pass may have given a value another layout."""
    return [value.number for value in instr.ins].index(instr.args[k].number)


def taken(instr: Compute, out: Value) -> Value | None:
    """The operand whose memory a result takes."""
    place = instr.over[instr.outs.index(out)] if instr.over else -1
    return None if place < 0 else instr.ins[place]


def as_marked(instr: Compute) -> tuple[Any, dict[str, Any]]:
    """The function that does what a call's mark says, and the keywords it takes for that.

    A `Value` among the keywords stands for its tensor.
    """
    if all(place < 0 for place in instr.over):
        return instr.target, {}
    if isinstance(instr.target, Kernel):
        arguments = [arg.number if isinstance(arg, Value) else -1 for arg in instr.args]
        numbers = [None if place < 0 else instr.ins[place].number for place in instr.over]
        return instr.target, {
            "over": tuple(-1 if n is None else arguments.index(n) for n in numbers)
        }
    out = out_variant(instr.target)
    return (instr.target, {}) if out is None else (out, {"out": instr.ins[instr.over[0]]})


def out_variant(target: Any) -> Any | None:
    """The ``out=`` form of an elementwise op, if it has one."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    name = target._overloadname
    names = ("out", "Tensor_out") if name in ("default", "Tensor", "self") else (f"{name}_out",)
    for candidate in names:
        found = getattr(target.overloadpacket, candidate, None)
        if found is not None and _same_arguments(target, found):
            return found
    return None


def _same_arguments(target: OpOverload, found: OpOverload) -> bool:
    """Tell whether `found` takes the arguments of `target` and an ``out``."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    given = [(a.name, str(a.type)) for a in found._schema.arguments]
    return given[-1][0] == "out" and given[:-1] == wanted


def add_to(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Add a value to a sum, in the memory of the sum, which outlives the call."""
    return total.add_(value)


def add_product_to(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add the product of two matrices to a sum likewise; its shape may be another of the same size."""
    total.view(a.shape[0], b.shape[1]).addmm_(a, b)
    return total
