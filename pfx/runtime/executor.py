"""Run a program on one device of a mesh; what other devices hold comes through its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfx.compiler.ir import Block, Compute, Instr, LoopInstr, PipelineInstr, Reshard
from pfx.lax.manual.transport import Groups
from pfx.mesh import Coordinate
from pfx.runtime.generated import block_function
from pfx.runtime.moves import prepare_collective, prepare_local
from pfx.runtime.pipeline_device import Channels, Pairs, PipelineDevice
from pfx.runtime.reduction import Group
from pfx.runtime.timed import Record
from pfx.spec import Axes

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Executor:
    """An executable program: prepared once, called with this device's part of every input.

    Args:
        coordinate: of the device.
        group: its group along some axes.
        channels: its channels to the devices along an axis, for programs that have pipelines.
        record: is told when each of its actions in a pipeline started and ended.
    """

    def __init__(
        self,
        program: Block,
        coordinate: Coordinate,
        group: Callable[[Axes, Groups], Group],
        *,
        deterministic: bool,
        channels: Callable[[str, Pairs], Channels] | None = None,
        record: Record | None = None,
    ) -> None:
        self.program, self.mesh = program, program.mesh
        self.coordinate, self.group, self.deterministic = coordinate, group, deterministic
        self.channels, self.record = channels, record
        self.function = block_function(program, self.prepare, self.offset)

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the parts of every input; empties `inputs`, so that they can be freed."""
        return self.function(inputs)

    def offset(self, instr: Compute) -> tuple[int, ...]:
        """The global index at which this device's part of each split dim begins."""
        return tuple(self.mesh.index(self.coordinate, axes) * n for axes, n in instr.offset)

    def prepare(self, instr: Instr) -> Run:
        """Compile what is no local call into a function from operand parts to result parts."""
        if isinstance(instr, LoopInstr):
            return self.loop(instr)
        if isinstance(instr, PipelineInstr):
            return self.pipeline(instr)
        assert isinstance(instr, Reshard)
        return self.reshard(instr)

    def inner(self, block: Block) -> Executor:
        """The executor of a block inside this one."""
        return Executor(
            block,
            self.coordinate,
            self.group,
            deterministic=self.deterministic,
            channels=self.channels,
        )

    def reshard(self, instr: Reshard) -> Run:
        """One collective for a whole bucket."""
        move = instr.move
        size = move.size(self.mesh)
        if move.moves_nothing(self.mesh):
            return list
        if size == 1:
            return lambda parts: [torch.zeros_like(part) for part in parts]
        if not instr.communicates:
            return prepare_local(instr, self.mesh.index(self.coordinate, move.axes), size)
        group = self.group(move.axes, move.groups)
        return prepare_collective(instr, self.mesh, group, deterministic=self.deterministic)

    def loop(self, instr: LoopInstr) -> Run:
        """Run the body once per row of xs, handing the carry on; a stream is a list of its rows."""
        body = self.inner(instr.body)
        c, x = instr.num_carry, instr.num_xs
        order = range(instr.length)[:: -1 if instr.reverse else 1]
        streams = [value.number in self.program.streams for value in instr.outs[c:]]

        def run(ins: list[Any]) -> list[Any]:
            carry, xs, consts = ins[:c], ins[c : c + x], ins[c + x :]
            ys: list[Any] = [[None] * instr.length if is_stream else None for is_stream in streams]
            for i in order:
                now = [*carry, *(rows[i] for rows in xs), *consts]
                carry = []  # the body frees it at its last use
                outs = body(now)
                carry = outs[:c]
                for k, row in enumerate(outs[c:]):
                    if ys[k] is None:
                        ys[k] = _stack_of(row, instr.length)
                    ys[k][i] = row
            return [*carry, *ys]

        return run

    def pipeline(self, instr: PipelineInstr) -> Run:
        """This device's stages, and its messages to and from the others."""
        assert self.channels is not None
        here = self.coordinate[instr.made.axis]
        return PipelineDevice(instr, here, self.inner, self.channels, self.record)


def _stack_of(row: torch.Tensor, length: int) -> torch.Tensor:
    return row.new_empty((length, *row.shape))
