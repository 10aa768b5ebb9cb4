"""The order of elementwise calls: one tensor's chain to its end, then the next tensor's.

An optimizer maps operation after operation over all leaves. Run in that order each operation reads
every leaf from memory again; leaf by leaf, what one call wrote is still in a cache for the next, and
the intermediate values of one leaf at a time are alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pfx._torch import OpOverload
from pfx.compiler.in_place import Kernel
from pfx.compiler.ir import Block, Compute, Instr, is_view
from pfx.compiler.kernels import SumOfSquares

aten = torch.ops.aten
_CHEAP = frozenset(
    {aten.sum.default, aten.sum.dim_IntList, aten._to_copy.default, aten.full.default}
)


def finish_each_chain(block: Block) -> None:
    """Reorder the elementwise calls between other instructions, in place; no value changes."""
    done: list[Instr] = []
    for run in _runs(block.instrs):
        done += _by_chain(run) if len(run) > 1 else run
    block.instrs = done


def _runs(instrs: Sequence[Instr]) -> Iterator[list[Instr]]:
    """Cut into runs of calls that may be reordered, and single instructions that stay."""
    run: list[Instr] = []
    for instr in instrs:
        if _is_elementwise(instr):
            run.append(instr)
            continue
        yield run
        yield [instr]
        run = []
    yield run


def _is_elementwise(instr: Instr) -> bool:
    """Products of matrices and the like keep their place, and with it the order of a backward pass."""
    if not isinstance(instr, Compute) or instr.offset:
        return False
    target = instr.target
    if isinstance(target, (Kernel, SumOfSquares)) or target in _CHEAP or is_view(target):
        return True
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _by_chain(run: Sequence[Instr]) -> list[Instr]:
    """Sort by what must wait for a number that tensors make, then by chain.

    A number made from tensors (a norm) is a level above them, and so is what reads it. On one level
    numbers made of numbers come first; tensors that one call connects are one chain, which keeps its
    order. So every operand still comes before its readers.
    """
    chains = _Chains()
    levels: dict[int, int] = {}
    keys: list[tuple[int, int]] = []  # level, and a tensor of the chain or -1
    for instr in run:
        values = [v for v in (*instr.ins, *instr.outs) if v is not None]
        tensors = [v.number for v in values if v.shape]
        level = max((levels.get(v.number, 0) for v in instr.ins), default=0)
        chains.join(tensors)
        keys.append((level, tensors[0] if tensors else -1))
        for out in instr.outs:
            if out is not None:
                levels[out.number] = level + (bool(tensors) and not out.shape)
    first: dict[int, int] = {}
    for i, (_, tensor) in enumerate(keys):
        first.setdefault(chains.of(tensor), i)

    def place(i: int) -> tuple[int, bool, int, int]:
        level, tensor = keys[i]
        return level, tensor >= 0, 0 if tensor < 0 else first[chains.of(tensor)], i

    return [run[i] for i in sorted(range(len(run)), key=place)]


class _Chains:
    """Sets of tensors that calls connect."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def of(self, tensor: int) -> int:
        """The name of a tensor's set."""
        while (above := self.parent.get(tensor, tensor)) != tensor:
            self.parent[tensor] = self.parent.get(above, above)
            tensor = above
        return tensor

    def join(self, tensors: Sequence[int]) -> None:
        """Make the sets of some tensors one."""
        for tensor in tensors[1:]:
            self.parent[self.of(tensor)] = self.of(tensors[0])
