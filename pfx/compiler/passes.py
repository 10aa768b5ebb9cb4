"""Passes over a finished program.

`bucket_collectives` joins collectives that can run at the same moment into one message, which is what
latency-bound backends need: a collective may run anywhere between the definition of its operand and
the first use of its result. Buckets are placed at the first deadline and take whatever is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pfx.compiler.ir import Block, Compute, Instr, LoopInstr, PipelineInstr, Reshard, Value
from pfx.mesh import Mesh


def bucket_collectives(block: Block, limit: int) -> None:
    """Join collectives of one kind, group and dtype into buckets of at most `limit` bytes, in place."""
    block.instrs = _bucketed(block.instrs, block.inputs, block.mesh, limit)


def _bucketed(
    instrs: Sequence[Instr], inputs: Sequence[Value], mesh: Mesh, limit: int
) -> list[Instr]:
    done = [_inside(instr, limit) for instr in instrs]
    ready = {v.number: -1 for v in inputs}  # the index after which a value exists
    deadline: dict[int, int] = {}  # the index of a value's first reader
    for i, instr in enumerate(done):
        for value in instr.ins:
            deadline.setdefault(value.number, i)
        for result in instr.outs:
            if result is not None:
                ready[result.number] = i
    loose = [i for i, instr in enumerate(done) if isinstance(instr, Reshard) and instr.communicates]
    first_use = {i: deadline.get(done[i].outs[0].number, len(done)) for i in loose}  # type: ignore[union-attr]
    placed: dict[int, list[Reshard]] = {}
    waiting = sorted(loose, key=lambda i: (first_use[i], i))
    moved: set[int] = set()
    for i in waiting:
        if i in moved:
            continue
        at = first_use[i]
        members = _ready_with(i, at, waiting, moved, done, ready, set(loose), mesh, limit)
        moved |= set(members)
        bucket = _join([done[k] for k in members])  # type: ignore[list-item]
        placed.setdefault(at, []).append(bucket)
        for k in members:
            ready[done[k].outs[0].number] = at - 1  # type: ignore[union-attr]
    out: list[Instr] = []
    for i in range(len(done) + 1):
        out.extend(placed.get(i, []))
        if i < len(done) and i not in moved:
            out.append(done[i])
    return out


def _inside(instr: Instr, limit: int) -> Instr:
    if isinstance(instr, LoopInstr):
        bucket_collectives(instr.body, limit)
    return instr


def _key(instr: Reshard) -> tuple[object, ...]:
    move = instr.move
    return move.kind, move.axes, move.perm, move.groups, move.reduce, instr.ins[0].dtype


def _ready_with(
    first: int,
    at: int,
    waiting: Sequence[int],
    moved: set[int],
    instrs: Sequence[Instr],
    ready: dict[int, int],
    loose: set[int],
    mesh: Mesh,
    limit: int,
) -> list[int]:
    """The collectives like `first` whose operands exist just before index `at`."""
    key = _key(instrs[first])  # type: ignore[arg-type]
    pending = {instrs[k].outs[0].number for k in loose - moved}  # type: ignore[union-attr]
    members: list[int] = []
    total = 0
    for i in waiting:
        instr = instrs[i]
        assert isinstance(instr, Reshard)
        operand = instr.ins[0]
        if i in moved or _key(instr) != key or operand.number in pending:
            continue
        size = operand.local_bytes(mesh)
        if ready[operand.number] < at and (not members or total + size <= limit):
            members.append(i)
            total += size
    assert first in members
    return members


def _join(members: Sequence[Reshard]) -> Reshard:
    if len(members) == 1:
        return members[0]
    members = sorted(members, key=lambda member: member.ins[0].number)
    return replace(
        members[0],
        ins=tuple(v for m in members for v in m.ins),
        outs=tuple(v for m in members for v in m.outs),
        moves=tuple(m.move for m in members),
        reasons=tuple((m.source, m.reason) for m in members),
    )


def number_in_order(block: Block) -> None:
    """Number the values of a block, and of its loops' bodies, in the order they are defined, in place.

    Two programs that do the same then print the same, however they came about.
    """
    new: dict[int, Value] = {}

    def define(value: Value | None) -> Value | None:
        if value is not None:
            new[value.number] = replace(value, number=len(new) + 1)
        return value and new[value.number]

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Value):
            return replace(arg, number=new[arg.number].number)
        if isinstance(arg, (list, tuple)):
            return type(arg)(renamed(item) for item in arg)
        return {k: renamed(v) for k, v in arg.items()} if isinstance(arg, dict) else arg

    block.inputs = [define(value) for value in block.inputs]  # type: ignore[misc]
    for i, instr in enumerate(block.instrs):
        ins = renamed(instr.ins)
        if isinstance(instr, (LoopInstr, PipelineInstr)):
            number_in_order(instr.body)
        elif isinstance(instr, Compute):
            instr = replace(instr, args=renamed(instr.args), kwargs=renamed(dict(instr.kwargs)))
        outs = tuple(define(value) for value in instr.outs)
        block.instrs[i] = replace(instr, ins=ins, outs=outs)  # type: ignore[arg-type]
    block.outputs = renamed(block.outputs)
