"""What both runtimes share of a pipeline: one stage's work on its microbatches, and what it adds up.

A microbatch leaves values from one phase to the next; they are dropped with their last reader. Sums
are taken in the order of the microbatches, so that every schedule gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from pfx.compiler.ir import Block, PipelineInstr, Stage, Value
from pfx.compiler.pipeline.primitive import EACH, FIRST, SHARE, Output

Run = Callable[[list[Any]], list[Any]]
Held = Any  # what a runtime holds of a value: its part, or a list of parts
Parts = list[torch.Tensor]


class StageRunner:
    """One stage: called with the actions of a schedule, in their order."""

    def __init__(self, stage: Stage, prepare: Callable[[Block], Run]) -> None:
        self.stage = stage
        self.runs = {kind: prepare(phase.block) for kind, phase in stage.phases.items()}
        self.ins = {k: [v.number for v in p.block.inputs] for k, p in stage.phases.items()}
        self.outs = {k: [v.number for v in p.block.outputs] for k, p in stage.phases.items()}
        self.adds = {k: {v.number: i for i, v in p.adds} for k, p in stage.phases.items()}
        self.kept = {kind: stage.needed_after(kind) for kind in self.runs}
        self.held: dict[int, dict[int, Held]] = {}

    def receive(self, kind: str, microbatch: int, values: Sequence[Held]) -> None:
        """Take what a neighbour has sent for an action of this kind."""
        places = self.stage.receives["B" if kind == "I" else kind]
        env = self.held.setdefault(microbatch, {})
        env.update({v.number: held for v, held in zip(places, values, strict=True)})

    def __call__(
        self,
        kind: str,
        microbatch: int,
        operand: Callable[[int, int], Held],
        total: Callable[[int], Held],
    ) -> tuple[list[Held], list[tuple[int, Held]]]:
        """Run a phase on a microbatch; returns what to send on, and what to add up.

        Args:
            operand: gives the row, or the const, that an input with a number is, for a microbatch.
            total: gives the sum of an output, for a phase that adds to it.
        """
        env, adds = self.held.pop(microbatch, {}), self.adds[kind]
        inputs = [
            env[n] if n in env else total(adds[n]) if n in adds else operand(n, microbatch)
            for n in self.ins[kind]
        ]
        kept = {n: held for n, held in env.items() if n in self.kept[kind]}
        env.clear()
        outs = dict(zip(self.outs[kind], self.runs[kind](inputs), strict=True))
        kept |= {n: held for n, held in outs.items() if n in self.kept[kind]}
        if kept:
            self.held[microbatch] = kept
        phase = self.stage.phases[kind]
        sends = [outs[v.number] for v in phase.sends]
        return sends, [(i, outs[v.number]) for i, v in phase.makes]


class Sums:
    """What some devices along a pipeline's axis have of its outputs: sums so far, or rows.

    Args:
        mine: the devices.
        count: of the parts of a value that a device's stage has.
    """

    def __init__(
        self,
        instr: PipelineInstr,
        mine: Collection[int],
        count: Callable[[Value], int],
        device: torch.device,
    ) -> None:
        self.instr, self.device = instr, device
        self.mesh = instr.body.mesh
        self.whole: dict[tuple[int, int], list[Any]] = {}  # by output, and device or stage
        self.made: dict[tuple[int, int], list[Any]] = {}  # by output and stage
        self.counts: dict[tuple[int, int], int] = {}
        self.early: dict[tuple[int, int], dict[int, Parts]] = {}
        self.next: dict[tuple[int, int], int] = {}
        for i, output in enumerate(instr.made.outputs):
            for s in _makers(output, len(instr.stages)):
                value = _made_by(instr.stages[s], i)
                if instr.stages[s].device in mine and value is not None:
                    self.counts[i, s] = count(value)
                    self.early[i, s], self.next[i, s] = {}, 0

    def own(self, i: int, s: int) -> list[Any]:
        """What a stage has of an output: zeros at first, of which a stack's stages have their rows.

        They are made when they are first needed, which is while others already work.
        """
        if (i, s) not in self.made:
            output, stage = self.instr.made.outputs[i], self.instr.stages[s]
            each = output.home == EACH
            # Stages of one device fill one stack; else each has its own sum, whatever their turns.
            key = i, stage.device if each else s
            if key not in self.whole:
                count = self.counts[i, s]
                self.whole[key] = [self.zeros(i) if output.summed else [] for _ in range(count)]
            start, stop = stage.rows
            self.made[i, s] = [part[start:stop] if each else part for part in self.whole[key]]
        return self.made[i, s]

    def zeros(self, i: int) -> torch.Tensor:
        value = self.instr.outs[i]
        return torch.zeros(value.local_shape(self.mesh), dtype=value.dtype, device=self.device)

    def put(self, i: int, s: int, microbatch: int, parts: Parts) -> None:
        """Take what a stage has made for a microbatch, now or once those before it are there."""
        early = self.early[i, s]
        early[microbatch] = parts
        while self.next[i, s] in early:
            for total, part in zip(self.own(i, s), early.pop(self.next[i, s]), strict=True):
                total.append(part) if isinstance(total, list) else total.add_(part)
            self.next[i, s] += 1

    def part(self, i: int, device: int, index: int) -> torch.Tensor:
        """A device's part of an output; zeros where it makes none, in memory if others may write there."""
        mine = [s for k, s in self.counts if k == i and self.instr.stages[s].device == device]
        if not mine and self.instr.made.outputs[i].home == EACH:
            return self.zeros(i)  # the program writes its results over the sums of stacks
        if not mine:
            value = self.instr.outs[i]
            zero = torch.zeros((), dtype=value.dtype, device=self.device)
            return zero.expand(value.local_shape(self.mesh))
        for s in mine:
            self.own(i, s)
        if self.instr.made.outputs[i].home == EACH:
            return self.whole[i, device][index]
        made = [self.whole[i, s][index] for s in mine]
        if isinstance(made[0], list):
            return torch.stack(made[0])
        return functools.reduce(torch.add, made)


def _makers(output: Output, stages: int) -> range:
    """The stages that may make an output."""
    if output.home in (EACH, SHARE):
        return range(stages)
    home = 0 if output.home == FIRST else stages - 1
    return range(home, home + 1)


def _made_by(stage: Stage, i: int) -> Value | None:
    """The value that a stage adds to an output."""
    phases = stage.phases.values()
    made = (v for phase in phases for k, v in (*phase.makes, *phase.adds) if k == i)
    return next(made, None)
