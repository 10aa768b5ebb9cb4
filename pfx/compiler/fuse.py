"""Updates of a parameter as one kernel: chains of elementwise calls, recognized and replaced.

A dozen passes over memory become one (torch's fused kernels read a parameter, its gradient and its
moments once, and write what changes once), and so do the two that sum up squares. What is recognized
is the arithmetic, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pfx.compiler.ir import Block, Compute, Instr, Value
from pfx.compiler.kernels import AdamW, AddScaled, Momentum, SumOfSquares
from pfx.compiler.makers import Makers

aten = torch.ops.aten
Changes = Mapping[int, Instr | None]


def fuse_updates(block: Block) -> None:
    """Replace the chains that update parameters, and sums of squares, by one call each, in place."""
    if block.mesh.device != "cpu":
        return  # reading a rate would wait for the device
    graph = Makers(block)
    changed: dict[int, Instr | None] = {}
    for instr in block.instrs:
        if isinstance(instr, Compute):
            changed |= _update(instr, graph) or _squares(instr, graph)
    now = (changed.get(id(instr), instr) for instr in block.instrs)
    block.instrs = [instr for instr in now if instr is not None]


def _squares(total: Compute, graph: Makers) -> Changes:
    """A sum of ``x * x`` over all dims but leading ones."""
    kernel = _sum_of(total)
    square = kernel and graph.call(total.args[0], aten.mul.Tensor)
    if not square or len(square.ins) != 1 or square.args[0] is not square.args[1]:
        return {}
    (x,) = square.ins
    if not x.dtype.is_floating_point or x.layout != square.outs[0].layout:  # type: ignore[union-attr]
        return {}
    return {id(square): None, id(total): _call(kernel, (x,), total.outs, total)}


def _sum_of(total: Compute) -> SumOfSquares | None:
    if total.kwargs:
        return None
    if total.target is aten.sum.default:
        return SumOfSquares()
    if total.target is not aten.sum.dim_IntList or not total.ins or len(total.args) < 2:
        return None
    ndim = len(total.ins[0].shape)
    dims = sorted(dim % ndim for dim in total.args[1] or ()) if ndim else []
    if not dims or dims != list(range(dims[0], ndim)):
        return None
    return SumOfSquares(dims[0], bool(total.args[2]) if len(total.args) > 2 else False)


def _update(last: Compute, graph: Makers) -> Changes:
    """The chain that ends in ``p + rate · direction``."""
    if last.target is not aten.add.Tensor or last.kwargs or len(last.ins) != 2:
        return {}
    p, update = last.args
    scaled = graph.call(update, aten.mul.Tensor)
    if scaled is None or not isinstance(p, Value):
        return {}
    direction, rate = scaled.args
    if not (isinstance(direction, Value) and isinstance(rate, Value)):
        return {}
    found = _adam(p, direction, rate, last, graph) or _momentum(p, direction, rate, last, graph)
    if not found and _alike((p, direction), (rate,), last.outs[0]):
        operands = (p, direction, rate)
        found = {id(last): _call(AddScaled(), operands, last.outs, last)}
    return {**found, id(scaled): None} if found else {}


def _call(target: Any, operands: tuple[Any, ...], outs: Any, last: Compute) -> Compute:
    ins = tuple(dict.fromkeys(operands))
    return Compute(target, operands, {}, ins, outs, source=last.source, many=len(outs) > 1)


def _adam(p: Value, decayed: Value, rate: Value, last: Compute, graph: Makers) -> Changes:
    decay = graph.call(decayed, aten.add.Tensor)
    ratio = graph.call(decay.args[0] if decay else decayed, aten.div.Tensor)
    if ratio is None or (decay and not _reads(decay.args[1], p)):
        return {}
    m, below = ratio.args
    shifted = graph.call(below, aten.add.Tensor)
    sloped = shifted and graph.call(shifted.args[0], aten.mul.Tensor)
    root = sloped and graph.call(sloped.args[0], aten.sqrt.default)
    second = root and graph.call(root.args[0], aten.addcmul.default, alone=False)
    damped = second and graph.call(second.args[0], aten.mul.Tensor)
    first = graph.call(m, aten.lerp.Scalar, alone=False)
    if not (shifted and sloped and root and second and damped and first):
        return {}
    v, grad = second.outs[0], first.args[1]
    assert v is not None
    numbers = sloped.args[1], shifted.args[1], rate
    large = (p, grad, first.args[0], damped.args[0])
    if not _alike(large, numbers, last.outs[0]) or not isinstance(damped.args[1], float):
        return {}
    squares = _reads(second.args[1], grad) and _reads(second.args[2], grad)
    beta2, share = damped.args[1], second.kwargs.get("value", 1)
    if not squares or abs(1 - share - beta2) > 1e-12 or shifted.kwargs:
        return {}
    if graph.reads[m.number] != 1 or graph.reads[v.number] != 1:
        return {}  # another call may read a moment before the parameter is there
    target = AdamW(1 - first.args[2], beta2, decay.kwargs.get("alpha", 1) if decay else 0.0)
    call = _call(target, (*large, *numbers), (last.outs[0], first.outs[0], v), last)
    gone = (decay, ratio, shifted, sloped, root, second, damped, first)
    return {**{id(instr): None for instr in gone if instr}, id(last): call}


def _momentum(p: Value, direction: Value, rate: Value, last: Compute, graph: Makers) -> Changes:
    """``v = g + momentum · v``, or ``g + momentum · v`` of that v; g perhaps with a decay in it."""
    ahead = graph.call(direction, aten.add.Tensor)
    inner = ahead and graph.call(ahead.args[1], aten.add.Tensor, alone=False)
    if ahead is None or inner is None or not _reads(inner.args[0], ahead.args[0]):
        ahead = None
    first = inner if ahead else graph.call(direction, aten.add.Tensor, alone=False)
    if first is None or (ahead and ahead.kwargs != first.kwargs):
        return {}
    grad, before = first.args
    after, momentum = first.outs[0], first.kwargs.get("alpha", 1)
    assert after is not None
    if graph.reads[after.number] != 1 or not momentum:
        return {}  # another call may read it before the parameter is there
    decayed = graph.call(grad, aten.add.Tensor, reads=2 if ahead else 1)
    if decayed is not None and not _reads(decayed.args[1], p):
        decayed = None
    grad = decayed.args[0] if decayed else grad
    large = (p, grad, before)
    if not _alike(large, (rate,), last.outs[0]) or _reads(before, p):
        return {}
    decay = decayed.kwargs.get("alpha", 1) if decayed else 0.0
    target = Momentum(float(momentum), float(decay), ahead is not None)
    call = _call(target, (*large, rate), (last.outs[0], after), last)
    gone = (ahead, first, decayed)
    return {**{id(instr): None for instr in gone if instr}, id(last): call}


def _reads(arg: Any, value: Any) -> bool:
    return isinstance(arg, Value) and isinstance(value, Value) and arg.number == value.number


def _alike(large: tuple[Any, ...], numbers: tuple[Any, ...], out: Value | None) -> bool:
    """Tell whether tensors are of one form in one place, and others are numbers everywhere."""
    assert out is not None
    form = out.shape, out.dtype, out.layout.dims
    alike = all(
        isinstance(v, Value)
        and (v.shape, v.dtype, v.layout.dims) == form
        and not v.layout.partial
        and not v.layout.varying
        for v in (*large, out)
    )
    single = all(isinstance(v, Value) and v.shape == () and not v.layout.axes for v in numbers)
    return alike and single and out.dtype in (torch.float32, torch.float64)
