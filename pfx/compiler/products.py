"""Large products of matrices by the kernel that is fastest at them, with the bias that is added to each.

On a CPU that is oneDNN's: 3 to 30 % faster than the BLAS that torch calls, from the size on at which the
15 microseconds it takes to set up no longer count. It adds a bias while a sum is in a register, which
gives the same bits as adding it later. What reads a transposed first operand (the product that makes a
weight's gradient) stays with BLAS, which is as fast there and can add to a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pfx import _torch
from pfx.compiler.ir import Block, Compute, Instr, LoopInstr, PipelineInstr, Value
from pfx.compiler.makers import Makers
from pfx.spec import Layout

aten = torch.ops.aten
LARGE = 1 << 24  # multiplications: about 0.3 ms on a core
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices, (m, k) and (k, n)."""
    return _torch.onednn_product(a, b, None)


def linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product of two matrices, (m, k) and (k, n), with a bias, (n,), added to every row."""
    return _torch.onednn_product(a, b, bias)


PRODUCTS = (product, linear)


def speed_up_products(program: Block) -> None:
    """Replace the large products of a program, its loops and its stages, in place."""
    if program.mesh.device != "cpu" or not _torch.has_onednn():
        return
    for block in _blocks(program):
        _Products(block).speed_up()


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for instr in block.instrs:
        if isinstance(instr, LoopInstr):
            yield from _blocks(instr.body)
        elif isinstance(instr, PipelineInstr):
            for stage in instr.stages:
                for phase in stage.phases.values():
                    yield from _blocks(phase.block)


class _Products:
    """The products of a block."""

    def __init__(self, block: Block) -> None:
        self.block, self.mesh = block, block.mesh
        self.graph = Makers(block)

    def speed_up(self) -> None:
        """Replace those that are large, and the sums of one and a bias."""
        changed: dict[int, list[Instr]] = {}
        for instr in self.block.instrs:
            if found := self.biased(instr):
                large, shaped, bias = found
                changed |= {id(large): [], id(shaped): []}
                changed[id(instr)] = self.with_bias(large, shaped, bias, instr)
            elif self.is_large(instr) and id(instr) not in changed:
                changed[id(instr)] = [replace(instr, target=product)]  # type: ignore[type-var]
        self.block.instrs = [
            now for instr in self.block.instrs for now in changed.get(id(instr), [instr])
        ]

    def is_large(self, instr: Any) -> bool:
        """Tell a large product of float32 matrices whose first operand is as it lies in memory."""
        if not isinstance(instr, Compute) or instr.target is not aten.mm.default:
            return False
        a, b = instr.args
        turned = getattr(self.graph.makers.get(a.number), "target", None) in _TURNS
        if turned or not a.dtype == b.dtype == torch.float32:
            return False
        (m, k), n = a.local_shape(self.mesh), b.local_shape(self.mesh)[1]
        return m * k * n >= LARGE

    def biased(self, last: Instr) -> tuple[Compute, Compute, Value] | None:
        """The product, the reshape of it and the bias, of a sum of the two, in either order."""
        if not isinstance(last, Compute) or last.target is not aten.add.Tensor or last.kwargs:
            return None
        if not all(isinstance(arg, Value) for arg in last.args):
            return None
        for y, bias in (last.args, last.args[::-1]):
            shaped = self.graph.call(y, aten.reshape.default)
            large = shaped and self.graph.call(shaped.ins[0], aten.mm.default)
            if shaped and large and self.is_large(large) and self.is_a_row(bias, y, shaped.ins[0]):
                return large, shaped, bias
        return None

    def is_a_row(self, bias: Value, y: Value, flat: Value) -> bool:
        """Tell whether a bias is added to the trailing dims of `y` that are the columns of a product."""
        if bias.dtype != torch.float32:
            return False
        if any(v.layout.partial or v.layout.varying for v in (flat, bias)):
            return False
        shape, row = y.local_shape(self.mesh), bias.local_shape(self.mesh)
        columns = flat.local_shape(self.mesh)[1]
        return math.prod(row) == columns and shape[len(shape) - len(row) :] == row

    def with_bias(self, large: Compute, shaped: Compute, bias: Value, total: Instr) -> list[Instr]:
        """The product with its bias, in the shape of the sum that it replaces."""
        (flat,), source = large.outs, total.source
        assert flat is not None
        calls: list[Instr] = []
        if len(bias.shape) > 1:
            columns = flat.local_shape(self.mesh)[1]
            layout = Layout((flat.layout.dims[1],))
            row: Value = replace(shaped.outs[0], shape=flat.shape[1:], layout=layout)  # type: ignore[type-var]
            flatten = Compute(aten.reshape.default, (bias, [columns]), {}, (bias,), (row,),
                              source=source)  # fmt: skip
            calls, bias = [flatten], row
        args = (*large.args, bias)
        call = Compute(linear, args, {}, tuple(dict.fromkeys(args)), (flat,), source=source)
        return [*calls, call, replace(shaped, outs=total.outs)]
