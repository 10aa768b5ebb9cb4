"""Run a program for every device of a mesh in one process.

A value is a list of its distinct parts: one per coordinate along the axes its layout uses. What the
layouts say is the same along an axis is computed once, not once per device. With ``check=True`` every
device computes its own copy, and copies that should be equal are asserted to be so, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pfx.compiler.ir import Block, Compute, LoopInstr, PipelineInstr, Reshard, Value, last_uses
from pfx.compiler.reshard import Move
from pfx.lax.manual import transport
from pfx.runtime.local import local_call
from pfx.runtime.simulated_pipeline import SimulatedPipeline
from pfx.runtime.step import Step
from pfx.runtime.timed import Record

Parts = list[torch.Tensor]


class Simulated:
    """An executable program: prepared once, called with the distinct parts of every input."""

    def __init__(
        self,
        program: Block,
        *,
        check: bool = False,
        seed: int | None = None,
        record: Record | None = None,
    ) -> None:
        self.program, self.seed, self.record = program, seed, record
        self.mesh = program.mesh
        self.check = check
        self.steps: list[Step] = []
        dead = last_uses(program.instrs, program.outputs)
        for instr, gone in zip(program.instrs, dead, strict=True):
            run = self.verified(instr) if check else self.prepare(instr)
            ins = tuple(v.number for v in instr.ins)
            outs = tuple(v.number if v is not None else -1 for v in instr.outs)
            self.steps.append(Step(run, ins, outs, gone))

    def __call__(self, inputs: list[Parts]) -> list[Parts]:
        """Run on the distinct parts of every input; empties `inputs`, so that they can be freed."""
        env: dict[int, Parts] = {
            value.number: parts for value, parts in zip(self.program.inputs, inputs, strict=True)
        }
        inputs.clear()
        for step in self.steps:
            step(env)
        return [env[value.number] for value in self.program.outputs]

    def spread(self, value: Value, parts: Parts) -> Parts:
        """One copy for every device, from the distinct parts."""
        axes = self.mesh.ordered(value.layout.axes)
        return [parts[self.mesh.index(place, axes)] for place in self.mesh.coordinates()]

    def gather(self, value: Value, parts: Parts) -> Parts:
        """The distinct parts, from one copy for every device."""
        axes = self.mesh.ordered(value.layout.axes)
        return [parts[self.mesh.index(self.pad(p))] for p in self.mesh.coordinates(axes)]

    def assert_equal_copies(self, value: Value, parts: Parts) -> None:
        """Assert that copies a layout calls equal are so, bit for bit."""
        distinct = self.gather(value, parts)
        for place, part, same in zip(
            self.mesh.coordinates(), parts, self.spread(value, distinct), strict=True
        ):
            equal = torch.equal(part, same) or bool(((part == same) | (part != part)).all())
            assert equal, f"{value}: {value.type} differs on {place} from its copy"

    def varying(self, value: Value) -> tuple[str, ...]:
        """The axes along which a value has copies of its own."""
        return self.mesh.axis_names if self.check else self.mesh.ordered(value.layout.axes)

    def places(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """The coordinates along some axes, in the order parts are listed."""
        return list(self.mesh.coordinates(axes))

    def index_of(self, value: Value, place: Mapping[str, int]) -> int:
        """Which of a value's parts a device at `place` reads."""
        return self.mesh.index(place, self.varying(value))

    def prepare(self, instr: Any) -> Callable[[list[Parts]], list[Parts]]:
        """Compile one instruction into a function from operand parts to result parts."""
        if isinstance(instr, Compute):
            return self.prepare_compute(instr)
        if isinstance(instr, LoopInstr):
            return self.prepare_loop(instr)
        if isinstance(instr, PipelineInstr):
            inner = lambda block: type(self)(block, check=self.check)
            return SimulatedPipeline(instr, inner, self.varying, self.seed, self.record)
        return self.prepare_reshard(instr)

    def verified(self, instr: Any) -> Callable[[list[Parts]], list[Parts]]:
        """As `prepare`, asserting after each instruction what the layouts say."""
        run = self.prepare(instr)

        def wrapped(ins: list[Parts]) -> list[Parts]:
            outs = run(ins)
            for value, parts in zip(instr.outs, outs, strict=True):
                if value is not None and value.number not in self.program.streams:
                    self.assert_equal_copies(value, parts)
            return outs

        return wrapped

    def prepare_compute(self, instr: Compute) -> Callable[[list[Parts]], list[Parts]]:
        axes = set(self.mesh.axis_names) if self.check else set()
        for value in (*instr.ins, *(v for v in instr.outs if v is not None)):
            axes |= set(value.layout.axes)
        places = self.places(self.mesh.ordered(tuple(axes)))
        picks = [tuple(self.index_of(v, place) for v in instr.ins) for place in places]
        call = local_call(instr, reuse=not self.check)
        if instr.offset:
            offsets = [self.offset(instr, place) for place in places]
            return lambda ins: _columns(
                [
                    call([parts[i] for parts, i in zip(ins, pick, strict=True)], offset)
                    for pick, offset in zip(picks, offsets, strict=True)
                ],
                instr,
            )
        if not instr.many and len(instr.ins) == 1:
            return lambda ins: [[call([ins[0][pick[0]]], None) for pick in picks]]
        return lambda ins: _columns(
            [call([parts[i] for parts, i in zip(ins, pick, strict=True)], None) for pick in picks],
            instr,
        )

    def offset(self, instr: Compute, place: Mapping[str, int]) -> tuple[int, ...]:
        """The global index at which each split dim begins on the device at `place`."""
        return tuple(self.mesh.index(place, axes) * size for axes, size in instr.offset)

    def prepare_loop(self, instr: LoopInstr) -> Callable[[list[Any]], list[Any]]:
        """Run the body slice by slice; a stream is kept as one list of parts per iteration."""
        body = type(self)(instr.body, check=self.check)
        c, x = instr.num_carry, instr.num_xs
        order = list(reversed(range(instr.length))) if instr.reverse else list(range(instr.length))
        streams = self.program.streams
        streamed = [value.number in streams for value in instr.ins[c : c + x]]
        keep = [value.number in streams for value in instr.outs[c:]]

        def run(ins: list[Any]) -> list[Any]:
            carry, xs, consts = ins[:c], ins[c : c + x], ins[c + x :]
            ys: list[Any] = [[None] * instr.length if kept else None for kept in keep]
            for i in order:
                now = [
                    parts[i] if is_stream else [part[i] for part in parts]
                    for parts, is_stream in zip(xs, streamed, strict=True)
                ]
                now = [*carry, *now, *consts]
                carry = []  # the body frees it at its last use
                outs = body(now)
                carry = outs[:c]
                for j, parts in enumerate(outs[c:]):
                    if keep[j]:
                        ys[j][i] = parts
                        continue
                    if ys[j] is None:
                        ys[j] = [_stack_of(part, instr.length) for part in parts]
                    for whole, part in zip(ys[j], parts, strict=True):
                        whole[i] = part
            return [*carry, *ys]

        return run

    def prepare_reshard(self, instr: Reshard) -> Callable[[list[Parts]], list[Parts]]:
        moves = instr.moves or (instr.move,) * len(instr.ins)
        runs = [
            self.prepare_move(move, before, after)
            for move, before, after in zip(moves, instr.ins, instr.outs, strict=True)
        ]
        return lambda ins: [run(parts) for run, parts in zip(runs, ins, strict=True)]

    def prepare_move(self, move: Move, before: Value, after: Value) -> Callable[[Parts], Parts]:
        """A function from the distinct parts of a value to those of the moved one."""
        places = [self.pad(place) for place in self.places(self.varying(after))]
        ranks = [self.mesh.index(place, move.axes) for place in places]
        size = self.mesh.count(move.axes)
        if not move.communicates:
            own = [self.index_of(before, place) for place in places]
            alone = transport.alone(move.kind, dim=move.dim, size=size)
            return lambda parts: [alone(parts[i], rank) for i, rank in zip(own, ranks, strict=True)]
        teams = [transport.team(move.groups, rank, size) for rank in ranks]
        everyone = [self.group(before, place, move.axes) for place in places]
        groups = [
            tuple(indices[member] for member in members)
            for indices, (members, _) in zip(everyone, teams, strict=True)
        ]
        joint = _memoized(groups, transport.joint(move.kind, dim=move.dim, reduce=move.reduce))
        pick = transport.pick(
            move.kind, dim=move.dim, to_dim=move.to_dim, size=move.size(self.mesh), perm=move.perm
        )
        return lambda parts: [
            pick(whole, rank) for whole, (_, rank) in zip(joint(parts), teams, strict=True)
        ]

    def pad(self, place: Mapping[str, int]) -> dict[str, int]:
        """A full coordinate: axes a value does not vary along are at 0."""
        return {axis: place.get(axis, 0) for axis in self.mesh.axis_names}

    def group(self, before: Value, place: dict[str, int], axes: Sequence[str]) -> tuple[int, ...]:
        """The parts of the devices that differ from one at `place` only along `axes`, row-major."""
        return tuple(
            self.index_of(before, {**place, **member}) for member in self.mesh.coordinates(axes)
        )


def _memoized(
    groups: Sequence[tuple[int, ...]], combine: Callable[[Parts], Any]
) -> Callable[[Parts], list[Any]]:
    """Combine each distinct group once."""
    distinct = list(dict.fromkeys(groups))
    where = [distinct.index(group) for group in groups]

    def run(parts: Parts) -> list[Any]:
        made = [combine([parts[i] for i in group]) for group in distinct]
        return [made[i] for i in where]

    return run


def _stack_of(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.empty((length, *part.shape), dtype=part.dtype, device=part.device)


def _columns(rows: list[Any], instr: Compute) -> list[Parts]:
    """From one result (or tuple of results) per place to one list of parts per result."""
    if not instr.many:
        return [rows]
    return [list(column) for column in zip(*rows, strict=True)]
