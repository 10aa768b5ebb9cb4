"""The compiled program as a value: it can be read, counted, measured and compared.

Nothing here runs; see `pfx.runtime`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pfx._torch import OpOverload
from pfx.compiler.bill import Collective, bill_of
from pfx.compiler.ir import (
    Block,
    Compute,
    Instr,
    LoopInstr,
    PipelineInstr,
    Reshard,
    Stage,
    values_in,
)
from pfx.compiler.memory import Memory, memory_of
from pfx.compiler.reshard import Move
from pfx.compiler.work import Rates, predicted
from pfx.errors import ShardingError, message
from pfx.schedules import Timeline
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

    def pipelines(self) -> list[PipelineInstr]:
        """The pipelines, with their schedules and stages, in order; a training step has one."""
        return [instr for instr in self.instrs if isinstance(instr, PipelineInstr)]

    def timeline(
        self,
        *,
        pipeline: int = 0,
        flops: float = 5e10,
        bytes: float = 1e10,
        call: float = 5e-6,
        t_comm: float = 0.0,
    ) -> Timeline:
        """Predict when each device of a pipeline works on what, in seconds.

        An action takes the time of what its stage computes in it, see `pfx.compiler.work`; so a
        stage with more layers, or with the head, takes longer. The rates are about a CPU core's.

        Args:
            pipeline: which one of `pipelines`.
            flops: floating-point operations of one device in a second.
            bytes: bytes that it reads or writes in a second.
            call: seconds that a call takes beside its work.
            t_comm: seconds that an activation or a gradient takes to another device.

        Raises:
            ShardingError: the program has no such pipeline.
        """
        return predicted(self.pipeline(pipeline), Rates(flops, bytes, call), t_comm)

    def pipeline(self, number: int = 0) -> PipelineInstr:
        """Return one of `pipelines`; raise `ShardingError` if it has none of this number."""
        found = self.pipelines()
        if number < len(found):
            return found[number]
        raise ShardingError(
            message(
                "program:",
                f"has no pipeline {number}." if found else "has no pipeline.",
                f"mesh: {self.mesh}",
                fix='Plan(pp=2, microbatches=4), or P("pp") on the layers of a scan inside a scan '
                "over microbatches",
            )
        )

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
        elif isinstance(instr, PipelineInstr):
            for number, stage in enumerate(instr.stages):
                found = _of_stage(instr, number, stage, times, buckets)
                yield from (replace(one, device=stage.device) for one in found)
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


def _of_stage(
    instr: PipelineInstr, number: int, stage: Stage, times: int, buckets: Iterator[int]
) -> Iterator[Collective]:
    """What one stage sends in a step, for all its microbatches."""
    assert instr.schedule is not None
    place, mesh = instr.schedule.place, instr.body.mesh
    counts = Counter(a.kind for _, a in instr.schedule.actions() if a.stage == number)
    for kind, phase in stage.phases.items():
        yield from _collectives(phase.block, times * counts[kind], buckets)
        to = number + 1 if kind == "F" else number - 1
        if not phase.sends or place[to] == stage.device:
            continue
        what = "activations for the next stage" if kind == "F" else "gradients for the stage before"
        bucket = next(buckets)
        for value in phase.sends:
            size, shape = value.local_bytes(mesh), value.local_shape(mesh)
            dtype, count = dtype_name(value.dtype), times * counts[kind]
            axes = (instr.made.axis,)
            yield Collective("send", axes, dtype, size, count, shape, instr.source, what, bucket)


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
    if isinstance(instr, PipelineInstr):
        yield from _pipeline_lines(instr, indent, note)
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


def _pipeline_lines(instr: PipelineInstr, indent: str, note: str) -> Iterator[str]:
    made, schedule = instr.made, instr.schedule
    outs = ", ".join(f"{v}: {v.type}" for v in instr.outs)
    ins = ", ".join(map(str, instr.ins))
    named = f"schedule {schedule.name}, " if schedule else ""
    over = f"pipeline over {made.axis}, {named}{made.length} microbatches"
    yield f"{indent}{outs} = {over} ({ins}):{note}"
    seen: dict[int, int] = {}
    for number, stage in enumerate(instr.stages):
        layers = f"layers {stage.start}:{stage.stop}"
        same = seen.setdefault(id(stage.phases), number)
        how = "" if same == number else f", as stage {same}"
        yield f"{indent}    stage {number} on {made.axis}={stage.device}, {layers}{how}"
        for kind, phase in stage.phases.items() if same == number else ():
            got = stage.receives.get("B" if kind == "I" else kind, ())
            received = f" receives {', '.join(map(str, got))}" if got and kind != "W" else ""
            sent = f" sends {', '.join(map(str, phase.sends))}" if phase.sends else ""
            adds = "".join(f" {v} to {instr.outs[i]}" for i, v in (*phase.adds, *phase.makes))
            yield f"{indent}      {kind}{received}{sent}{' adds' + adds if adds else ''}:"
            yield from _lines(phase.block, f"{indent}        ")


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
        if isinstance(instr, Compute):
            told = {v.number for v in values_in([instr.args, dict(instr.kwargs)])}
            assert told == {v.number for v in instr.ins}, f"reads what it does not list: {instr}"
        for out in instr.outs:
            assert out is None or out.number not in known, f"defined twice: {out}"
            known |= {out.number} if out is not None else set()
        if isinstance(instr, Reshard):
            moves = instr.moves or (instr.move,) * len(instr.ins)
            for move, before, after in zip(moves, instr.ins, instr.outs, strict=True):
                shape = move.local_shape(before.local_shape(program.mesh), program.mesh)
                assert before.dtype == after.dtype, f"changes the dtype: {instr}"
                assert shape == after.local_shape(program.mesh), f"makes another shape: {instr}"
        if isinstance(instr, PipelineInstr):
            verify_stages(instr)
        if isinstance(instr, LoopInstr):
            assert len(instr.ins) == len(instr.body.inputs)
            assert len(instr.outs) == len(instr.body.outputs)
            verify(instr.body)
    assert all(v.number in known for v in program.outputs), "an output is never computed"


def verify_stages(instr: PipelineInstr) -> None:
    """Assert that a stage's phases read what is there, and that neighbours agree on what travels."""
    verify(instr.body)
    given = {value.number for value in instr.body.inputs}
    for number, stage in enumerate(instr.stages):
        for phase in stage.phases.values():
            verify(phase.block)
        came = {kind: {v.number for v in values} for kind, values in stage.receives.items()}
        for kinds in ("F", "B"), ("F", "I", "W"):
            known = set(given)
            for kind in (k for k in kinds if k in stage.phases):
                known |= came.get("B" if kind == "I" else kind, set())
                block = stage.phases[kind].block
                sums = {v.number for _, v in stage.phases[kind].adds}
                assert all(v.number in known | sums for v in block.inputs), f"stage {number} {kind}"
                known |= {v.number for v in block.outputs}
        for kind, phase in stage.phases.items():
            if phase.sends:
                to = instr.stages[number + 1 if kind == "F" else number - 1]
                wanted = [
                    (v.shape, v.dtype, v.layout) for v in to.receives["F" if kind == "F" else "B"]
                ]
                assert [(v.shape, v.dtype, v.layout) for v in phase.sends] == wanted
