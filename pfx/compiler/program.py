"""The compiled program as a value: it can be read, counted, measured and compared.

Nothing here runs; see `pfx.runtime`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pfx._torch import OpOverload
from pfx.compiler.bill import Collective, bill_of
from pfx.compiler.ir import Block, Instr, LoopInstr, Reshard
from pfx.compiler.memory import Memory, memory_of
from pfx.compiler.reshard import Move
from pfx.spec import dtype_name


class Program(Block):
    """A per-device program for every device of a mesh, with what can be read off it."""

    def text(self) -> str:
        """The whole program, one line per instruction."""
        return "\n".join(_lines(self, ""))

    def collectives(self) -> list[Collective]:
        """Every collective a step runs, in order; those inside loops with their count."""
        return list(_collectives(self, 1, itertools.count(1)))

    def bill(self) -> str:
        """The communication of a step as a table: who, along which axis, why, how many bytes."""
        return bill_of(self.collectives())

    def memory(self) -> Memory:
        """Peak bytes per device, by liveness, with what holds them at the peak."""
        return memory_of(self)

    @property
    def graph(self) -> list[Instr]:
        """The instructions in order."""
        return self.instrs

    def __str__(self) -> str:
        return self.text()


def _collectives(program: Block, times: int, buckets: Iterator[int]) -> Iterator[Collective]:
    for instr in program.instrs:
        if isinstance(instr, LoopInstr):
            yield from _collectives(instr.body, times * instr.length, buckets)
        elif isinstance(instr, Reshard) and instr.communicates:
            bucket = next(buckets)
            whys = instr.reasons or ((instr.source, instr.reason),)
            for before, after, (source, reason) in zip(instr.ins, instr.outs, whys, strict=True):
                larger = after if instr.move.kind == "all_gather" else before
                yield Collective(
                    instr.move.kind,
                    instr.move.axes,
                    dtype_name(before.dtype),
                    larger.local_bytes(program.mesh),
                    times,
                    larger.local_shape(program.mesh),
                    source,
                    reason,
                    bucket,
                )


def target_name(target: Any) -> str:
    """The printed name of what a call runs."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target)).strip("_")


def _lines(program: Block, indent: str) -> Iterator[str]:
    names = program.names or [""] * len(program.inputs)
    for value, name in zip(program.inputs, names, strict=True):
        yield f"{indent}{value}: {value.type} = input {name}".rstrip()
    for instr in program.instrs:
        yield from _instr_lines(instr, indent)
    yield f"{indent}return {', '.join(map(str, program.outputs))}"


def _instr_lines(instr: Instr, indent: str) -> Iterator[str]:
    note = f"  # {instr.source}" if instr.source else ""
    if isinstance(instr, LoopInstr):
        outs = ", ".join(f"{v}: {v.type}" for v in instr.outs)
        way = "reversed " if instr.reverse else ""
        ins = ", ".join(map(str, instr.ins))
        yield f"{indent}{outs} = {way}loop {instr.length} times ({ins}):{note}"
        yield from _lines(instr.body, indent + "    ")
        return
    outs = ", ".join(f"{v}: {v.type}" if v is not None else "_" for v in instr.outs)
    if isinstance(instr, Reshard):
        dim = f", dim {instr.move.dim}" if instr.move.dim >= 0 and len(instr.ins) == 1 else ""
        to = f" to {instr.move.to_dim}" if instr.move.to_dim >= 0 and len(instr.ins) == 1 else ""
        why = f"  # {instr.reason}" if instr.reason else ""
        ins = ", ".join(map(str, instr.ins))
        op = f"{instr.move.kind}({ins}; {','.join(instr.move.axes)}{_among(instr.move)}{dim}{to})"
        yield f"{indent}{outs} = {op}{why or note}{note[3:] and ' ' + note[3:] if why else ''}"
        return
    args = ", ".join(
        [_show(a) for a in instr.args] + [f"{k}={_show(v)}" for k, v in instr.kwargs.items()]
    )
    at = (
        f" at {','.join('.'.join(axes) or '0' for axes, _ in instr.offset)}" if instr.offset else ""
    )
    yield f"{indent}{outs} = {target_name(instr.target)}({args}){at}{note}"


def _among(move: Move) -> str:
    """Who sends to whom, where it is not everyone to everyone."""
    pairs = "".join(f" {source}>{to}" for source, to in move.perm)
    return pairs + "".join(f" [{' '.join(map(str, group))}]" for group in move.groups)


def _show(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_show, arg))}]"
    return str(arg)


def verify(program: Block) -> None:
    """Assert that values are defined before they are read, once, and moves make what they say."""
    known = {value.number for value in program.inputs}
    for instr in program.instrs:
        assert all(v.number in known for v in instr.ins), f"undefined operand: {instr}"
        for out in instr.outs:
            assert out is None or out.number not in known, f"defined twice: {out}"
            known |= {out.number} if out is not None else set()
        if isinstance(instr, Reshard):
            moves = instr.moves or (instr.move,) * len(instr.ins)
            for move, before, after in zip(moves, instr.ins, instr.outs, strict=True):
                shape = move.local_shape(before.local_shape(program.mesh), program.mesh)
                assert before.dtype == after.dtype, f"changes the dtype: {instr}"
                assert shape == after.local_shape(program.mesh), f"makes another shape: {instr}"
        if isinstance(instr, LoopInstr):
            assert len(instr.ins) == len(instr.body.inputs)
            assert len(instr.outs) == len(instr.body.outputs)
            verify(instr.body)
    assert all(v.number in known for v in program.outputs), "an output is never computed"
