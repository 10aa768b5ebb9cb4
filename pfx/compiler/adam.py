"""Adam as one kernel: the chain of elementwise calls that updates one parameter, recognized and replaced.

A dozen passes over memory become one (torch's fused kernel reads a parameter, its gradient and its
moments once, and writes what changes once), and so do the two that sum up squares. The kernel corrects
its moments by powers of the step; here the corrections are values of the program, so it is told that
infinitely many steps have passed, and the corrections go into its rate and eps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pfx import _torch
from pfx.compiler.ir import Block, Compute, Instr, Value

aten = torch.ops.aten
_CHUNK = 1 << 16  # elements whose squares are summed up at once: they stay in a cache


@dataclass(frozen=True)
class AdamW:
    """One step of a parameter: called with it, its gradient, both moments, and three numbers.

    The numbers are those of ``p + rate · (m / (sqrt(v) · slope + offset) + decay · p)``.

    Attributes:
        over: which of parameter, first and second moment the results are written over.
    """

    __name__ = "adamw"

    beta1: float
    beta2: float
    decay: float
    over: tuple[bool, bool, bool] = (False, False, False)

    def __call__(
        self,
        p: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        slope: torch.Tensor,
        offset: torch.Tensor,
        rate: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        p, m, v = (x if o else x.clone() for x, o in zip((p, m, v), self.over, strict=True))
        scale, eps = slope.item(), offset.item()
        _torch.adamw_(
            p,
            m,
            v,
            grad,
            lr=-rate.item() / scale,
            betas=(self.beta1, self.beta2),
            weight_decay=self.decay * scale,
            eps=eps / scale,
        )
        return p, m, v


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of all elements, chunk by chunk."""
    chunks = x.reshape(-1).split(_CHUNK)
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).sum()


def fuse_adam(block: Block) -> None:
    """Replace the chains of Adam, and sums of squares, in a block by one call each, in place."""
    if block.mesh.device != "cpu":
        return  # reading three numbers would wait for the device
    graph = _Graph(block)
    changed: dict[int, Instr | None] = {}
    for instr in block.instrs:
        if isinstance(instr, Compute):
            changed |= _adam(instr, graph) or _squares(instr, graph)
    now = (changed.get(id(instr), instr) for instr in block.instrs)
    block.instrs = [instr for instr in now if instr is not None]


class _Graph:
    """Who makes and who reads each value of a block."""

    def __init__(self, block: Block) -> None:
        self.makers: dict[int, Instr] = {}
        self.reads = Counter(v.number for instr in block.instrs for v in instr.ins)
        self.outputs = {v.number for v in block.outputs}
        for instr in block.instrs:
            self.makers |= {out.number: instr for out in instr.outs if out is not None}

    def call(self, value: Any, target: Any, *, alone: bool = True) -> Compute | None:
        """The call of an op that makes a value, which (if alone) one other call reads."""
        if not isinstance(value, Value):
            return None
        maker = self.makers.get(value.number)
        once = self.reads[value.number] == 1 and value.number not in self.outputs
        found = isinstance(maker, Compute) and maker.target is target and (once or not alone)
        return maker if found else None  # type: ignore[return-value]


def _squares(total: Compute, graph: _Graph) -> Mapping[int, Instr | None]:
    """A sum of ``x * x`` that keeps no dim."""
    if total.target is not aten.sum.default or total.kwargs:
        return {}
    square = graph.call(total.args[0], aten.mul.Tensor)
    if square is None or len(square.ins) != 1 or square.args[0] is not square.args[1]:
        return {}
    (x,) = square.ins
    if not x.dtype.is_floating_point or x.layout != square.outs[0].layout:  # type: ignore[union-attr]
        return {}
    call = Compute(sum_of_squares, (x,), {}, (x,), total.outs, source=total.source)
    return {id(square): None, id(total): call}


def _adam(last: Compute, graph: _Graph) -> Mapping[int, Instr | None]:
    """The chain that ends in ``p + update``."""
    if last.target is not aten.add.Tensor or last.kwargs or len(last.ins) != 2:
        return {}
    p, update = last.args
    scaled = graph.call(update, aten.mul.Tensor)
    if scaled is None or not isinstance(p, Value):
        return {}
    decayed, rate = scaled.args
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
    if not _same(large, numbers, last.outs[0]) or not isinstance(damped.args[1], float):
        return {}
    squares = _reads(second.args[1], grad) and _reads(second.args[2], grad)
    beta2, share = damped.args[1], second.kwargs.get("value", 1)
    if not squares or abs(1 - share - beta2) > 1e-12 or shifted.kwargs:
        return {}
    if graph.reads[m.number] != 1 or graph.reads[v.number] != 1:
        return {}  # another call may read a moment before the parameter is there
    target = AdamW(1 - first.args[2], beta2, decay.kwargs.get("alpha", 1) if decay else 0.0)
    operands = (*large, *numbers)
    call = Compute(target, operands, {}, tuple(dict.fromkeys(operands)),
                   (last.outs[0], first.outs[0], v), source=last.source, many=True)  # fmt: skip
    gone = (scaled, decay, ratio, shifted, sloped, root, second, damped, first)
    return {**{id(instr): None for instr in gone if instr}, id(last): call}


def _reads(arg: Any, value: Any) -> bool:
    return isinstance(arg, Value) and isinstance(value, Value) and arg.number == value.number


def _same(large: tuple[Any, ...], numbers: tuple[Any, ...], out: Value | None) -> bool:
    """Tell whether four tensors are of one form in one place, and three are numbers everywhere."""
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
