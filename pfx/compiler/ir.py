"""The instructions of a program: typed values, local calls, moves and loops.

Every value has a global shape, a layout and a number. An instruction reads earlier values and makes
new ones (static single assignment); a loop holds a program of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pfx._torch import OpOverload
from pfx.compiler.pipeline.primitive import Pipeline
from pfx.compiler.reshard import Move
from pfx.mesh import Mesh
from pfx.schedules.action import Schedule
from pfx.spec import Axes, Layout, local_bytes, local_shape


@dataclass(frozen=True, eq=False)
class Value:
    """One tensor of a program: its number, global shape, dtype and layout.

    In the body of a pipeline, dim 0 of a `stack` counts the layers, of which each stage has its own.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    role: str = ""
    stack: bool = False

    def __str__(self) -> str:
        return f"%{self.number}"

    @property
    def type(self) -> str:
        """The type as printed, e.g. ``f32[8/dp, 128]``."""
        return self.layout.text(self.shape, self.dtype)

    def local_bytes(self, mesh: Mesh) -> int:
        """The bytes of one device's part."""
        return local_bytes(self.shape, self.dtype, self.layout, mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one device's part."""
        return local_shape(self.shape, self.layout, mesh)


@dataclass(frozen=True, eq=False)
class Compute:
    """A call of `target` on local tensors; `Value`s in args and kwargs stand for them.

    `offset` lists (axes, local size) of the dims whose global position the call needs.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ins: tuple[Value, ...]
    outs: tuple[Value | None, ...]
    offset: tuple[tuple[Axes, int], ...] = ()
    source: str = ""
    many: bool = False  # the call returns a tuple
    over: tuple[int, ...] = ()  # per result the place in `ins` of the operand whose memory it takes
    rows: tuple[int, ...] = ()  # of a stack of layers: the operands whose dim 0 counts them too


@dataclass(frozen=True, eq=False)
class Reshard:
    """One `Move` of one or more values (a bucket) at once."""

    move: Move
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    source: str = ""
    reason: str = ""
    moves: tuple[Move, ...] = ()  # one per value; dims may differ within a bucket
    reasons: tuple[tuple[str, str], ...] = ()  # (source, reason) of each value of a bucket

    @property
    def communicates(self) -> bool:
        """Tell a collective from a local slice."""
        return self.move.communicates


@dataclass(frozen=True, eq=False)
class LoopInstr:
    """A scan: `body` runs `length` times; operands are carries, xs, consts; outs carries, ys."""

    body: Block
    num_carry: int
    num_xs: int
    length: int
    reverse: bool
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    source: str = ""
    axis: str = ""  # in a pipeline: that over whose devices the iterations are spread


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a stage's work on one microbatch: forward, backward, or a half of the backward.

    Attributes:
        block: its inputs are rows of the microbatch, consts, what was received, and what earlier
            phases of the same microbatch have left; its outputs what is sent, made, and left.
        sends: which values the next stage (or the one before, in a backward) waits for.
        makes: (output of the pipeline, value) for what is added up or stacked.
        adds: (output, input) for sums that go in, and that the block adds to in place.
    """

    block: Block
    sends: tuple[Value, ...]
    makes: tuple[tuple[int, Value], ...]
    adds: tuple[tuple[int, Value], ...] = ()


@dataclass(frozen=True, eq=False)
class Stage:
    """The layers ``start:stop``, on one device of the pipeline's axis, with what runs beside them.

    `phases` has one for each kind of action: F and, where there is a backward pass, B, I and W.
    `receives` names the values that arrive before an F, and before a B or an I. `rows` are the
    first row of the layers in the device's own part of a stack, and of the end.
    """

    device: int
    start: int
    stop: int
    rows: tuple[int, int]
    phases: Mapping[str, Phase]
    receives: Mapping[str, tuple[Value, ...]]

    def needed_after(self, kind: str) -> frozenset[int]:
        """The values of a microbatch that a phase after the one of this kind reads."""
        later = {"F": "BIW", "I": "W"}.get(kind, "")
        phases = (self.phases[k] for k in later if k in self.phases)
        return frozenset(v.number for phase in phases for v in phase.block.inputs)


@dataclass(frozen=True, eq=False)
class PipelineInstr:
    """A pipeline: `stages` work on `made.length` microbatches as `schedule` says.

    Operands are xs (a row for each microbatch), then consts. `body` is one microbatch on all stages
    at once: what the stages are cut from. Its values never mention the pipeline's axis.
    """

    made: Pipeline
    body: Block
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    source: str = ""
    schedule: Schedule | None = None
    stages: tuple[Stage, ...] = ()


Instr = Compute | Reshard | LoopInstr | PipelineInstr


@dataclass(eq=False)
class Block:
    """Instructions between inputs and outputs: the body of a loop, or a whole program."""

    mesh: Mesh
    inputs: list[Value]
    outputs: list[Value]
    instrs: list[Instr]
    names: list[str] = field(default_factory=list)  # key paths of the inputs of a program
    donated: frozenset[int] = frozenset()  # numbers of inputs whose memory may be reused
    report: list[str] = field(default_factory=list)  # what the compiler had to fall back on
    rows: frozenset[int] = frozenset()  # inputs and outputs that are handed over as lists of rows

    @cached_property
    def streams(self) -> frozenset[int]:
        """Stacked results that only other loops read, slice by slice: they need no stacking."""
        return self.rows | streams_of(self.instrs, self.outputs)


class Constant:
    """A call that returns a tensor the traced function held."""

    __name__ = "constant"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor


def values_in(arg: Any) -> Iterator[Value]:
    """The values mentioned in a call's arguments, in order."""
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from values_in(item)
    elif isinstance(arg, Mapping):
        for item in arg.values():
            yield from values_in(item)


def last_uses(instrs: Sequence[Instr], outputs: Sequence[Value]) -> list[tuple[int, ...]]:
    """For each instruction, the numbers of the values nobody reads after it."""
    alive = {value.number for value in outputs}
    dead: list[tuple[int, ...]] = []
    for instr in reversed(instrs):
        read = {value.number for value in instr.ins}
        made = {value.number for value in instr.outs if value is not None}
        dead.append(tuple((read | made) - alive))
        alive |= read
    return dead[::-1]


def streams_of(instrs: Sequence[Instr], outputs: Sequence[Value]) -> frozenset[int]:
    """Numbers of the ys of loops whose every reader is a loop that takes them as xs."""
    found: set[int] = set()
    elsewhere = {value.number for value in outputs}
    for instr in instrs:
        sliced: range = range(0)
        if isinstance(instr, LoopInstr):
            found |= {v.number for v in instr.outs[instr.num_carry :]}
            sliced = range(instr.num_carry, instr.num_carry + instr.num_xs)
        elsewhere |= {v.number for i, v in enumerate(instr.ins) if i not in sliced}
    return frozenset(found - elsewhere)


def is_view(target: Any) -> bool:
    """Tell whether a call returns its first operand's memory."""
    if target is torch.ops.aten.reshape.default:
        return True  # a copy only where the strides force one
    if not isinstance(target, OpOverload):
        return False
    return any(r.alias_info is not None for r in target._schema.returns)
