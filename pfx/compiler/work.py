"""What a block has one device do: multiplications, bytes moved, calls; and how long that may take.

The model has three terms. Matrix products, convolutions and attention cost their floating-point
operations. All other calls cost the bytes that they read and write, and so do collectives inside the
block. Each call costs a constant, which on small models is most of the time. A view costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pfx._torch import OpOverload
from pfx.compiler.flops import flops_of
from pfx.compiler.in_place import add_product_to
from pfx.compiler.ir import (
    Block,
    Compute,
    LoopInstr,
    Phase,
    PipelineInstr,
    Reshard,
    Value,
    is_view,
)
from pfx.compiler.products import PRODUCTS
from pfx.mesh import Mesh
from pfx.schedules import Action, Timeline, simulate


class Rates(NamedTuple):
    """What a device does in a second, and what a call costs.

    Attributes:
        flops: floating-point operations a second.
        bytes: bytes read or written a second.
        call: seconds that a call takes beside its work.
    """

    flops: float
    bytes: float
    call: float


# These read only as much of their operands as they write.
PICKS = frozenset(("embedding", "gather", "index", "index_select"))


@dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products, bytes that other calls move, and calls.

    >>> (Work(flops=1e9) + Work(bytes=1e8, calls=2)).seconds(Rates(flops=1e9, bytes=1e9, call=0.5))
    2.1
    """

    flops: int = 0
    bytes: int = 0
    calls: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.calls + other.calls)

    def __mul__(self, times: int) -> Work:
        return Work(self.flops * times, self.bytes * times, self.calls * times)

    def seconds(self, rates: Rates) -> float:
        """How long a device of these rates takes."""
        return self.flops / rates.flops + self.bytes / rates.bytes + self.calls * rates.call


def work_of(block: Block) -> Work:
    """Add up what one device does in a block, loops multiplied out."""
    return sum((_of_instr(instr, block.mesh) for instr in block.instrs), Work())


def work_of_phase(instr: PipelineInstr, phase: Phase) -> Work:
    """Add up what a stage does in a phase of one microbatch, adding to the pipeline's sums too."""
    mesh = instr.body.mesh
    sums = [value for i, value in phase.makes if instr.made.outputs[i].summed]
    added = Work(bytes=3 * sum(value.local_bytes(mesh) for value in sums), calls=len(sums))
    return work_of(phase.block) + added


def predicted(instr: PipelineInstr, rates: Rates, t_comm: float) -> Timeline:
    """Simulate a pipeline's schedule with the time that the work of each phase takes, in seconds."""
    assert instr.schedule is not None
    seconds: dict[tuple[int, str], float] = {}
    for phases in {id(stage.phases): stage.phases for stage in instr.stages}.values():
        for kind, phase in phases.items():
            seconds[id(phases), kind] = work_of_phase(instr, phase).seconds(rates)

    def time(action: Action) -> float:
        return seconds[id(instr.stages[action.stage].phases), action.kind]

    return simulate(instr.schedule.computations(), times=time, t_comm=t_comm, unit="s")


def _of_instr(instr: Any, mesh: Mesh) -> Work:
    if isinstance(instr, LoopInstr):
        return work_of(instr.body) * instr.length
    if isinstance(instr, Compute):
        return _of_call(instr, mesh)
    if isinstance(instr, Reshard):
        if not instr.communicates or instr.move.moves_nothing(mesh):
            return Work()
        moved = (*instr.ins, *instr.outs)
        return Work(bytes=sum(value.local_bytes(mesh) for value in moved), calls=1)
    raise AssertionError(f"no work of {type(instr).__name__}")


def _of_call(instr: Compute, mesh: Mesh) -> Work:
    if is_view(instr.target):
        return Work()
    outs = [value for value in instr.outs if value is not None]
    name = _name(instr.target)
    shapes = [a.local_shape(mesh) if isinstance(a, Value) else a for a in instr.args]
    flops = flops_of(name, shapes, outs[0].local_shape(mesh) if outs else ())
    if flops is not None:
        causal = _option(instr, "is_causal") is True  # what lies above the diagonal is skipped
        return Work(flops=flops // 2 if causal else flops, calls=1)
    written = sum(value.local_bytes(mesh) for value in outs)
    read = sum(value.local_bytes(mesh) for value in instr.ins)
    return Work(bytes=written + (min(read, written) if name in PICKS else read), calls=1)


def _name(target: Any) -> str:
    """The name of an aten op without its overload; nothing for another function."""
    if target is add_product_to:
        return "addmm"
    if target in PRODUCTS:
        return "mm"
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""


def _option(instr: Compute, name: str) -> Any:
    """An argument of an op by name; None of one that is none, or has no such argument."""
    if not isinstance(instr.target, OpOverload):
        return None
    names = [argument.name for argument in instr.target._schema.arguments]
    given = dict(zip(names, instr.args, strict=False)) | dict(instr.kwargs)
    return given.get(name)
