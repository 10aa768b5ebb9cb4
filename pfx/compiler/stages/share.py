"""One stage's share of a microbatch: the same instructions, on its own layers.

A stack of layers has the stage's rows. A loop over layers runs over them, and its carry comes from the
neighbour unless it begins here. Nothing is dropped yet: that is for the cut into phases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pfx.compiler.ir import Block, Compute, Instr, LoopInstr, PipelineInstr, Value

aten = torch.ops.aten
_SHAPES = ("size", "sizes", "self_size", "self_sizes", "shape", "input_sizes")  # in schemas of ops


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


@dataclass
class Share:
    """The instructions of one stage, all phases together.

    Attributes:
        instrs, outputs: as those of the pipeline's body.
        loops: those over layers, forward and backward.
        receives: what arrives before an F and a B.
        selects: whether it takes rows of its own from values that all stages have whole.
    """

    instr: PipelineInstr
    layers: Layers
    instrs: list[Instr] = field(default_factory=list)
    loops: list[LoopInstr] = field(default_factory=list)
    receives: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    selects: bool = False

    def __post_init__(self) -> None:
        body = self.instr.body
        self.count = max(v.number for v in _defined(body))
        self.now: dict[int, Value] = {}  # values that are others on this stage
        self.inputs = [self.own(v) for v in body.inputs]
        for instr in body.instrs:
            self.instrs.append(self.visit(instr))
        self.outputs = [self.now.get(v.number, v) for v in body.outputs]

    def fresh(self, like: Value, **changes: Any) -> Value:
        """A value like another, under a number of its own."""
        self.count += 1
        return replace(like, number=self.count, **changes)

    def own(self, value: Value) -> Value:
        """A value with this stage's rows, if it is a stack of layers."""
        if not value.stack:
            return value
        assert not value.layout.dims[0], f"the layers of {value} are split inside a stage"
        self.now[value.number] = replace(value, shape=(len(self.layers), *value.shape[1:]))
        return self.now[value.number]

    def visit(self, instr: Instr) -> Instr:
        """An instruction as this stage runs it."""
        if isinstance(instr, LoopInstr) and instr.axis:
            return self.loop(instr)
        outs: tuple[Value | None, ...] = instr.outs
        pick: Callable[[Value], Value] = lambda value: self.now.get(value.number, value)
        if any(v.stack for v in instr.ins):
            along = {instr.ins[k].number for k in getattr(instr, "rows", ())}
            outs = tuple(None if v is None else self.own(v) for v in instr.outs)
            pick = lambda value: self.rows(value, along)
        picked = {value.number: pick(value) for value in instr.ins}
        ins = tuple(picked[value.number] for value in instr.ins)
        if not isinstance(instr, Compute):
            return replace(instr, ins=ins, outs=outs)  # type: ignore[arg-type]
        args, kwargs = _renamed(instr.args, picked), _renamed(dict(instr.kwargs), picked)
        if outs is not instr.outs:
            args = self.shaped(instr.target, args)
        return replace(instr, args=args, kwargs=kwargs, ins=ins, outs=outs)

    def shaped(self, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an op, with this stage's rows in those that are shapes."""
        names = _argument_names(target, len(args))
        layers, own = self.instr.made.layers, len(self.layers)
        return tuple(
            [own, *arg[1:]] if name in _SHAPES and list(arg[:1]) == [layers] else arg
            for name, arg in zip(names, args, strict=True)
        )

    def rows(self, value: Value, along: Collection[int]) -> Value:
        """This stage's rows of a value that goes along with a stack, or the value itself."""
        if value.stack or value.number not in along:
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
        kind = "B" if self.loops else "F"
        begins = self.layers.last if kind == "B" else self.layers.first
        if begins:
            carry = tuple(self.now.get(v.number, v) for v in instr.ins[:c])
        else:
            carry = tuple(self.fresh(v) for v in instr.body.inputs[:c])
            self.receives[kind] = carry
        xs = [
            self.now.get(v.number, v) if v.stack else self.select(v) for v in instr.ins[c : c + x]
        ]
        consts = (self.now.get(v.number, v) for v in instr.ins[c + x :])
        outs = (*instr.outs[:c], *(self.own(v) for v in instr.outs[c:]))
        made = replace(
            instr, body=copied(instr.body), length=len(self.layers), ins=(*carry, *xs, *consts),
            outs=outs,
        )  # fmt: skip
        self.loops.append(made)
        return made


def _argument_names(target: Any, count: int) -> list[str]:
    schema = getattr(target, "_schema", None)
    return [a.name for a in schema.arguments][:count] if schema else [""] * count


def _renamed(arg: Any, now: Mapping[int, Value]) -> Any:
    if isinstance(arg, Value):
        return now.get(arg.number, arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_renamed(item, now) for item in arg)
    if isinstance(arg, dict):
        return {key: _renamed(item, now) for key, item in arg.items()}
    return arg


def copied(block: Block) -> Block:
    """A block whose instructions, and those of its loops, no other block shares."""
    return replace(block, instrs=owned(block.instrs))


def owned(instrs: Sequence[Instr]) -> list[Instr]:
    """The instructions, with bodies of loops that no other block shares."""
    return [replace(i, body=copied(i.body)) if isinstance(i, LoopInstr) else i for i in instrs]


def _defined(block: Block) -> Iterator[Value]:
    yield from block.inputs
    for instr in block.instrs:
        yield from (v for v in instr.outs if v is not None)
