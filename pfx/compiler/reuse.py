"""Write results over operands that die: a pass that marks the calls which can to run in place.

An optimizer is a chain of elementwise calls on large tensors; allocating each result costs more than
computing it. A call may overwrite an operand when that is its last reader, no view of the operand is
read later, and the memory is the program's own: made inside it, or donated by the caller.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pfx._torch import OpOverload
from pfx.compiler.in_place import Kernel, choices
from pfx.compiler.ir import (
    Block,
    Compute,
    LoopInstr,
    PipelineInstr,
    Reshard,
    Value,
    is_view,
    last_uses,
)
from pfx.compiler.pipeline.primitive import EACH
from pfx.compiler.products import PRODUCTS


def reuse_buffers(block: Block) -> None:
    """Mark the calls of a block, and of its loops' bodies, that overwrite a dying operand."""
    roots = _roots(block)
    owned = block.donated | _made_here(block)
    last_read = _last_reads(block, roots)
    dead = last_uses(block.instrs, block.outputs)

    def free(i: int, instr: Compute, value: Value) -> bool:
        """Tell whether a call is the last to read an operand whose memory is the program's."""
        root = roots[value.number]
        dies = value.number in dead[i] and last_read[root] == i
        others = [roots[v.number] for v in instr.ins if v.number != value.number]
        return dies and root == value.number and root in owned and root not in others

    for i, instr in enumerate(block.instrs):
        if isinstance(instr, LoopInstr):
            reuse_buffers(instr.body)
        elif isinstance(instr, Compute) and (found := choices(instr)):
            over: list[int] = []
            for out, places in zip(instr.outs, found, strict=True):
                fit = (
                    k for k in places
                    if k not in over and free(i, instr, instr.ins[k]) and _fits(instr.ins[k], out)
                )  # fmt: skip
                over.append(next(fit, -1))
            block.instrs[i] = replace(instr, over=tuple(over))


def _roots(block: Block) -> dict[int, int]:
    """For each value the one whose memory it shares: itself, unless it is a view."""
    roots = {value.number: value.number for value in block.inputs}
    for instr in block.instrs:
        for k, out in enumerate(instr.outs):
            if out is not None:
                source = _viewed(instr, k)
                roots[out.number] = out.number if source is None else roots[source.number]
    return roots


def _viewed(instr: Any, k: int) -> Value | None:
    """The operand whose memory result `k` may share."""
    if isinstance(instr, Compute):
        return instr.ins[0] if instr.ins and is_view(instr.target) else None
    if isinstance(instr, Reshard):
        return instr.ins[k]  # a slice or cast is a view, and a group of one moves nothing
    if isinstance(instr, LoopInstr) and k < instr.num_carry:
        return instr.ins[k]  # a carry may come back untouched
    return None


def _made_here(block: Block) -> set[int]:
    """Values whose memory a call allocated, and the sums that stages of a pipeline made of own rows."""
    found: set[int] = set()
    for instr in block.instrs:
        if isinstance(instr, PipelineInstr):
            pairs = zip(instr.made.outputs, instr.outs, strict=True)
            found |= {out.number for output, out in pairs if output.home == EACH}
        elif isinstance(instr, Compute) and _allocates(instr.target):
            found |= {out.number for out in instr.outs if out is not None}
    return found


def _allocates(target: Any) -> bool:
    """Tell whether every call of a target returns memory that nothing else has."""
    known = isinstance(target, (OpOverload, Kernel)) or target in PRODUCTS
    return known and not is_view(target)


def _last_reads(block: Block, roots: dict[int, int]) -> dict[int, int]:
    """The index of the last instruction that reads a value or a view of it; outputs count as last."""
    found = dict.fromkeys(roots.values(), -1)
    for i, instr in enumerate(block.instrs):
        for value in instr.ins:
            found[roots[value.number]] = i
    for value in block.outputs:
        found[roots[value.number]] = len(block.instrs)
    return found


def _fits(value: Value, out: Value | None) -> bool:
    """Tell whether a result has the operand's form and is held by the same devices."""
    assert out is not None
    same_form = value.shape == out.shape and value.dtype == out.dtype
    return (
        same_form
        and value.layout.dims == out.layout.dims
        and set(value.layout.partial) == set(out.layout.partial)
        and set(value.layout.varying) == set(out.layout.varying)
    )


def shared_outputs(block: Block) -> list[bool]:
    """Which outputs share memory with a kept input or an earlier output, and must be copied."""
    roots = _roots(block)
    taken = {value.number for value in block.inputs} - block.donated
    shared = []
    for value in block.outputs:
        root = roots[value.number]
        shared.append(root in taken)
        taken.add(root)
    return shared
