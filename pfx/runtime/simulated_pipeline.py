"""Play a pipeline in one process: all stages' actions, in an order that the schedule allows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pfx.compiler.ir import Block, PipelineInstr, Stage, Value
from pfx.mesh import Mesh
from pfx.runtime.pipeline import StageRunner, Sums
from pfx.runtime.timed import Record, Watch
from pfx.schedules.order import play

Parts = list[torch.Tensor]


class SimulatedPipeline:
    """An executable pipeline, called with the parts of every operand.

    Args:
        prepare: makes the block of a phase callable on parts.
        varying: the axes along which the parts of a value are listed.
        seed: shuffles the order of what may run in any order; None: device by device.
        record: is told when each action started and ended.
    """

    def __init__(
        self,
        instr: PipelineInstr,
        prepare: Callable[[Block], Callable[[list[Any]], list[Any]]],
        varying: Callable[[Value], tuple[str, ...]],
        seed: int | None,
        record: Record | None = None,
    ) -> None:
        assert instr.schedule is not None
        self.instr, self.made, self.varying = instr, instr.made, varying
        self.mesh: Mesh = instr.body.mesh
        self.watch = Watch(record, self.mesh.device) if record else None
        self.actions = [action for _, action in play(instr.schedule.computations(), seed=seed)]
        once = functools.cache(prepare)  # stages of one form share their blocks
        self.runners = [StageRunner(stage, once) for stage in instr.stages]
        self.operands = [self.operands_of(stage) for stage in instr.stages]

    def __call__(self, ins: list[Parts]) -> list[Parts]:
        """Play one step."""
        devices = range(self.mesh.shape[self.made.axis])
        count = lambda value: self.mesh.count(self.varying(value))
        sums = Sums(self.instr, devices, count, ins[0][0].device)
        gives = [self.gives(ins, s) for s in range(len(self.runners))]
        for action in self.actions:
            s, m = action.stage, action.microbatch
            total = lambda i, s=s: sums.own(i, s)
            if self.watch:
                self.watch.start()
            sends, makes = self.runners[s](action.kind, m, gives[s], total)
            if sends:
                to, kind = (s + 1, "F") if action.kind == "F" else (s - 1, "B")
                self.runners[to].receive(kind, m, sends)
            for i, parts in makes:
                sums.put(i, s, m, parts)
            if self.watch:
                self.watch.stop(action)
            del sends, makes  # large; they would outlive the next action
        return [self.output(i, sums) for i in range(len(self.made.outputs))]

    def operands_of(self, stage: Stage) -> Mapping[int, tuple[int, list[int]]]:
        """For each input of the body, the operand it is, and which of its parts a stage has."""
        found = {}
        for k, (inner, outer) in enumerate(
            zip(self.instr.body.inputs, self.instr.ins, strict=True)
        ):
            places = self.mesh.coordinates(self.varying(inner))
            found[inner.number] = k, [self.index(outer, p, stage.device) for p in places]
        return found

    def index(self, value: Value, place: Mapping[str, int], device: int) -> int:
        """Which part of a value the stage's device at `place` has."""
        return self.mesh.index({**place, self.made.axis: device}, self.varying(value))

    def gives(self, ins: list[Parts], s: int) -> Callable[[int, int], Parts]:
        """The operands of a stage: its rows of stacks, and the rows of a microbatch."""
        stage, operands, num_xs = self.instr.stages[s], self.operands[s], self.made.num_xs
        start, stop = stage.rows
        stacks: dict[int, Parts] = {}

        def give(number: int, microbatch: int) -> Parts:
            k, picks = operands[number]
            parts = [ins[k][i] for i in picks]
            if k < num_xs:
                return [part[microbatch] for part in parts]
            if not self.made.stacks[k - num_xs]:
                return parts
            if number not in stacks:
                stacks[number] = [part[start:stop] for part in parts]
            return stacks[number]

        return give

    def output(self, i: int, sums: Sums) -> Parts:
        """The parts of an output, from what the stages have added up or stacked."""
        axes, inner = self.varying(self.instr.outs[i]), self.varying(self.instr.body.outputs[i])
        return [
            sums.part(i, place[self.made.axis], self.mesh.index(place, inner))
            for place in self.mesh.coordinates(axes)
        ]
