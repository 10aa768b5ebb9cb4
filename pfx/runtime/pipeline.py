"""What both runtimes share of a pipeline: one stage's work on its microbatches, and what it adds up.

A microbatch leaves values from one phase to the next; they are dropped with their last reader. Sums
are taken in the order of the microbatches, whatever order they arrive in, so that every schedule
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx.compiler.ir import Block, Stage
from pfx.compiler.pipeline.primitive import EACH, FIRST, Output

Run = Callable[[list[Any]], list[Any]]
Held = Any  # what a runtime holds of a value: its part, or a list of parts


class StageRunner:
    """One stage: called with the actions of a schedule, in their order."""

    def __init__(self, stage: Stage, prepare: Callable[[Block], Run]) -> None:
        self.stage = stage
        self.runs = {kind: prepare(phase.block) for kind, phase in stage.phases.items()}
        self.ins = {k: [v.number for v in p.block.inputs] for k, p in stage.phases.items()}
        self.outs = {k: [v.number for v in p.block.outputs] for k, p in stage.phases.items()}
        self.kept = {kind: stage.needed_after(kind) for kind in self.runs}
        self.held: dict[int, dict[int, Held]] = {}

    def receive(self, kind: str, microbatch: int, values: Sequence[Held]) -> None:
        """Take what a neighbour has sent for an action of this kind."""
        places = self.stage.receives["B" if kind == "I" else kind]
        env = self.held.setdefault(microbatch, {})
        env.update({v.number: held for v, held in zip(places, values, strict=True)})

    def __call__(
        self, kind: str, microbatch: int, operand: Callable[[int, int], Held]
    ) -> tuple[list[Held], list[tuple[int, Held]]]:
        """Run a phase on a microbatch; returns what to send on, and what to add up.

        Args:
            operand: gives the row, or the const, that an input with a number is, for a microbatch.
        """
        env = self.held.pop(microbatch, {})
        inputs = [env[n] if n in env else operand(n, microbatch) for n in self.ins[kind]]
        kept = {n: held for n, held in env.items() if n in self.kept[kind]}
        env.clear()
        outs = dict(zip(self.outs[kind], self.runs[kind](inputs), strict=True))
        kept |= {n: held for n, held in outs.items() if n in self.kept[kind]}
        if kept:
            self.held[microbatch] = kept
        phase = self.stage.phases[kind]
        sends = [outs[v.number] for v in phase.sends]
        return sends, [(i, outs[v.number]) for i, v in phase.makes]


class InOrder:
    """A sum over microbatches that adds them in order, and keeps those that come too early."""

    def __init__(self, add: Callable[[Held | None, Held], Held]) -> None:
        self.add, self.next, self.total = add, 0, None
        self.early: dict[int, Held] = {}

    def put(self, microbatch: int, value: Held) -> None:
        """Add the value of a microbatch, now or once those before it have been."""
        self.early[microbatch] = value
        while self.next in self.early:
            self.total = self.add(self.total, self.early.pop(self.next))
            self.next += 1


def makers(output: Output, stages: int) -> range:
    """The stages that may make an output."""
    if output.home == EACH:
        return range(stages)
    home = 0 if output.home == FIRST else stages - 1
    return range(home, home + 1)


def added(output: Output, total: Any, part: torch.Tensor) -> Any:
    """What a device has of an output, once one more microbatch has made its part: a sum, or rows."""
    if not output.summed:
        rows = [] if total is None else total
        rows.append(part)
        return rows
    return part.to(output.dtype, copy=True) if total is None else total.add_(part)


def joined(output: Output, totals: Sequence[Any], zeros: torch.Tensor) -> torch.Tensor:
    """A device's part of an output, from what its own stages have of it.

    Args:
        totals: of those of its stages that make the output, in order.
        zeros: its part where it makes none of it.
    """
    if not totals:
        return zeros
    if not output.summed:
        return torch.stack(totals[0])
    if output.home != EACH:
        return totals[0]
    rows = sum(len(total) for total in totals)
    if rows < len(zeros):
        totals = [*totals, zeros[rows:]]
    return totals[0] if len(totals) == 1 else torch.cat(list(totals))
