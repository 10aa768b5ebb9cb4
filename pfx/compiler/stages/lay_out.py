"""Lay a pipeline out: which layers each stage has, and what it runs in each phase.

Every stage is cut from the one program for a microbatch: its loops run over its own layers, their
carry comes from the neighbour unless it begins there, and what the stage's outputs do not need is
dropped. So all stages agree on what travels between them, and compiling does not grow with their
number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pfx.compiler.ir import (
    Block,
    Compute,
    Instr,
    LoopInstr,
    Phase,
    PipelineInstr,
    Stage,
    Value,
    streams_of,
)
from pfx.compiler.passes import bucket_collectives
from pfx.compiler.pipeline.primitive import EACH, FIRST, LAST, SHARE
from pfx.compiler.reuse import reuse_buffers
from pfx.compiler.stages.accumulate import add_in_loops
from pfx.compiler.stages.cut import Piece, cut, split_loop
from pfx.mesh import Deal, Mesh
from pfx.schedules.action import Schedule
from pfx.schedules.in_turn import in_turn

aten = torch.ops.aten


@dataclass(frozen=True)
class Layers:
    """The layers of one stage: where it is, rows ``start:stop``, and whether it is at an end."""

    device: int
    start: int
    stop: int
    rows: tuple[int, int]
    first: bool
    last: bool

    def __len__(self) -> int:
        return self.stop - self.start


def lay_out(instr: PipelineInstr, schedule: Schedule, bucket_bytes: int) -> PipelineInstr:
    """Give a pipeline its schedule and its stages."""
    shared: dict[Any, Stage] = {}
    stages = []
    schedule = in_turn(schedule)
    for layers in layers_of(instr.made.axis, instr.made.layers, instr.body.mesh, schedule):
        # Only keys and other stacks that are no parameters tell two inner stages apart.
        builder = _Builder(instr, layers)
        kinds = frozenset(a.kind for _, a in schedule.actions() if a.stage == len(stages))
        start = layers.start if builder.selects else 0
        key = (layers.first, layers.last, len(layers), start, kinds)
        if key not in shared:
            shared[key] = builder.build(kinds, bucket_bytes)
        where = {k: getattr(layers, k) for k in ("device", "start", "stop", "rows")}
        stages.append(replace(shared[key], **where))
    return replace(instr, schedule=schedule, stages=tuple(stages))


def layers_of(axis: str, layers: int, mesh: Mesh, schedule: Schedule) -> Iterator[Layers]:
    """The layers of each stage; a device's own part of a stack has those of its stages in order."""
    deal = dict(mesh.deals).get(axis) or Deal(schedule.place)
    held = [0] * mesh.shape[axis]
    for stage, (device, (start, stop)) in enumerate(
        zip(schedule.place, deal.blocks(layers), strict=True)
    ):
        rows = held[device], held[device] + stop - start
        held[device] = rows[1]
        yield Layers(device, start, stop, rows, stage == 0, stage == schedule.stages - 1)


@dataclass
class _Builder:
    """Cuts one stage out of the program for a microbatch."""

    instr: PipelineInstr
    layers: Layers
    instrs: list[Instr] = field(default_factory=list)
    loops: list[LoopInstr] = field(default_factory=list)
    receives: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    selects: bool = False

    def __post_init__(self) -> None:
        body = self.instr.body
        self.count = max(v.number for v in _defined(body))
        self.stacks = {v.number for v in body.inputs if v.stack}
        self.now: dict[int, Value] = {}  # values that are others on this stage
        self.inputs = [self.own(v) for v in body.inputs]
        for instr in body.instrs:
            self.instrs.append(self.visit(instr))
        self.outputs = [self.now.get(v.number, v) for v in body.outputs]

    def fresh(self, like: Value, **changes: Any) -> Value:
        self.count += 1
        return replace(like, number=self.count, **changes)

    def own(self, value: Value) -> Value:
        """A value with this stage's rows, if it is a stack of layers."""
        if value.number not in self.stacks:
            return value
        assert not value.layout.dims[0], f"the layers of {value} are split inside a stage"
        self.now[value.number] = replace(value, shape=(len(self.layers), *value.shape[1:]))
        return self.now[value.number]

    def visit(self, instr: Instr) -> Instr:
        """An instruction as this stage runs it."""
        if isinstance(instr, LoopInstr) and instr.axis:
            return self.loop(instr)
        outs, pick = instr.outs, lambda value: self.now.get(value.number, value)
        if any(v.number in self.stacks for v in instr.ins):
            self.stacks |= {v.number for v in instr.outs if v is not None and v.stack}
            rank = max(len(v.shape) for v in instr.outs if v is not None)
            outs = tuple(v and self.own(v) for v in instr.outs)
            pick = lambda value: self.rows(value, rank)
        picked = {value.number: pick(value) for value in instr.ins}
        ins = tuple(picked[value.number] for value in instr.ins)
        if not isinstance(instr, Compute):
            return replace(instr, ins=ins, outs=outs)  # type: ignore[arg-type]
        shape = self.shape if outs is not instr.outs else lambda arg: arg
        args, kwargs = _renamed(instr.args, picked), _renamed(dict(instr.kwargs), picked)
        args = tuple(shape(arg) for arg in args)
        return replace(instr, args=args, kwargs=kwargs, ins=ins, outs=outs)

    def shape(self, arg: Any) -> Any:
        """A shape that an op is told, with this stage's rows."""
        sizes = isinstance(arg, (list, tuple)) and len(arg) and isinstance(arg[0], int)
        if sizes and arg[0] == self.instr.made.layers:
            return [len(self.layers), *arg[1:]]
        return arg

    def rows(self, value: Value, rank: int) -> Value:
        """This stage's rows of a value that goes along with a stack of some rank."""
        whole = len(value.shape) == rank and value.shape[0] == self.instr.made.layers
        if value.number in self.stacks or not whole or self.instr.made.layers == 1:
            return self.now.get(value.number, value)
        return self.select(value)

    def select(self, value: Value) -> Value:
        """This stage's rows of a value that every stage has whole."""
        assert not value.layout.dims[0], f"the layers of {value} are split inside a stage"
        self.selects = True
        now = self.now.get(value.number, value)
        out = self.fresh(now, shape=(len(self.layers), *now.shape[1:]))
        args = (now, 0, self.layers.start, self.layers.stop)
        self.instrs.append(Compute(aten.slice.Tensor, args, {}, (now,), (out,)))
        return out

    def loop(self, instr: LoopInstr) -> LoopInstr:
        """A loop over this stage's layers, whose carry comes from a neighbour unless it begins here."""
        c, x = instr.num_carry, instr.num_xs
        self.stacks |= {v.number for v in instr.outs[c:]}
        kind = "B" if self.loops else "F"
        begins = self.layers.last if kind == "B" else self.layers.first
        if begins:
            carry = tuple(self.now.get(v.number, v) for v in instr.ins[:c])
        else:
            carry = tuple(self.fresh(v) for v in instr.body.inputs[:c])
            self.receives[kind] = carry
        xs = [
            self.now.get(v.number, v) if v.number in self.stacks else self.select(v)
            for v in instr.ins[c : c + x]
        ]
        consts = (self.now.get(v.number, v) for v in instr.ins[c + x :])
        outs = (*instr.outs[:c], *(self.own(v) for v in instr.outs[c:]))
        made = replace(
            instr, body=_copied(instr.body), length=len(self.layers), ins=(*carry, *xs, *consts),
            outs=outs,
        )  # fmt: skip
        self.loops.append(made)
        return made

    def build(self, kinds: Collection[str], bucket_bytes: int) -> Stage:
        """Cut the stage into the phases that its schedule runs."""
        forward, makes = self.made(forward=True), self.made(forward=False)
        sends: dict[str, Sequence[Value]] = {
            kind: loop.outs[: loop.num_carry] for kind, loop in zip("FB", self.loops, strict=False)
        }
        f_outs = [*(() if self.layers.last else sends["F"]), *(v for _, v in forward)]
        cuts = {"F": [f_outs]}
        rest = [v for _, v in makes]
        instrs = {"F": self.instrs, "FB": self.instrs}
        if len(self.loops) == 2:
            cuts = {"FB": [f_outs, [*(() if self.layers.first else sends["B"]), *rest]]}
            if kinds & {"I", "W"}:
                cuts["FIW"], instrs["FIW"] = [f_outs, [*sends["B"]], rest], self.split()
        pieces: dict[str, Piece] = {}
        rows: set[int] = set()
        for names, outputs in cuts.items():
            found = dict(zip(names, cut(instrs[names], self.inputs, outputs), strict=True))
            left = {v.number: v for v in (*found["F"].left, *getattr(pieces.get("F"), "left", ()))}
            pieces |= found
            pieces["F"] = replace(found["F"], left=tuple(left[n] for n in sorted(left)))
            rows |= streams_of(instrs[names], [*f_outs, *rest])
        made = {"F": forward, "B": makes, "I": [], "W": makes}
        ends = {"F": self.layers.last, "B": self.layers.first, "I": self.layers.first, "W": True}
        sends["I"] = sends.get("B", ())
        phases = {
            kind: self.phase(
                piece, () if ends[kind] else sends[kind], made[kind], rows, bucket_bytes
            )
            for kind, piece in pieces.items()
            if kind in kinds
        }
        where = self.layers
        return Stage(where.device, where.start, where.stop, where.rows, phases, self.receives)

    def split(self) -> list[Instr]:
        """The instructions with the backward loop split in two."""
        chain, weights = split_loop(self.loops[1], self.count + 1)
        self.count += len(chain.outs)
        halves = [[chain, weights] if i is self.loops[1] else [i] for i in self.instrs]
        return [instr for some in halves for instr in some]

    def made(self, *, forward: bool) -> list[tuple[int, Value]]:
        """The outputs of the pipeline that this stage makes, in one of its passes."""
        some, first, last = bool(len(self.layers)), self.layers.first, self.layers.last
        here = {EACH: some, SHARE: some, FIRST: first, LAST: last}
        alone = len(self.loops) == 1
        return [
            (i, value)
            for i, (output, value) in enumerate(
                zip(self.instr.made.outputs, self.outputs, strict=True)
            )
            if here[output.home] and (alone or output.forward == forward)
        ]

    def phase(
        self,
        piece: Piece,
        sends: Sequence[Value],
        makes: Sequence[tuple[int, Value]],
        rows: Any,
        bucket_bytes: int,
    ) -> Phase:
        """A piece as a block of its own."""
        dtypes = {i: o.dtype for i, o in enumerate(self.instr.made.outputs) if o.summed}
        instrs, makes, adds = add_in_loops(piece.instrs, makes, dtypes, self.fresh)
        outputs = {v.number: v for v in (*sends, *(v for _, v in makes), *piece.left)}
        inputs = [*piece.ins, *(v for _, v in adds)]
        block = Block(self.instr.body.mesh, inputs, list(outputs.values()), _own(instrs))
        crossing = {v.number for v in (*piece.ins, *piece.left)}
        block.rows = frozenset(crossing & set(rows))
        bucket_collectives(block, bucket_bytes)
        reuse_buffers(block)
        return Phase(block, tuple(sends), tuple(makes), tuple(adds))


def _renamed(arg: Any, now: dict[int, Value]) -> Any:
    if isinstance(arg, Value):
        return now.get(arg.number, arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_renamed(item, now) for item in arg)
    if isinstance(arg, dict):
        return {key: _renamed(item, now) for key, item in arg.items()}
    return arg


def _own(instrs: Sequence[Instr]) -> list[Instr]:
    """The instructions, with bodies of loops that no other block shares."""
    return [replace(i, body=_copied(i.body)) if isinstance(i, LoopInstr) else i for i in instrs]


def _copied(block: Block) -> Block:
    return replace(block, instrs=_own(block.instrs))


def _defined(block: Block) -> Iterator[Value]:
    yield from block.inputs
    for instr in block.instrs:
        yield from (v for v in instr.outs if v is not None)
