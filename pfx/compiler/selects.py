"""Updates that a guard may undo, as one kernel that runs or does not.

``where(good, new, old)`` over parameters and moments hides the chain that makes the new ones, and costs
three more passes over memory. Selects are set aside while chains become kernels; a kernel whose
every result is selected against the operand it replaces then asks the condition itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pfx.compiler.fuse import fuse_updates
from pfx.compiler.in_place import Kernel
from pfx.compiler.ir import Block, Compute, Instr, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Guarded:
    """A kernel behind a condition (its first argument); without it, results are what they replace."""

    kernel: Any

    @property
    def __name__(self) -> str:
        return f"{self.kernel.__name__}_if"

    @property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """For each result the argument that it replaces."""
        return tuple((places[0] + 1,) for places in self.kernel.operands)

    def __call__(self, condition: Tensor, *args: Tensor, over: tuple[int, ...] = ()) -> Any:
        """Return the kernel's results, or the operands they replace."""
        over = over or (-1,) * len(self.operands)
        if condition.item():
            return self.kernel(*args, over=tuple(max(place - 1, -1) for place in over))
        olds = [args[place - 1] for (place,) in self.operands]
        kept = tuple(x if k >= 0 else x.clone() for x, k in zip(olds, over, strict=True))
        return kept if len(kept) != 1 else kept[0]


@dataclass(frozen=True, eq=False)
class _Select:
    """``out = where(condition, new, old)``."""

    condition: Value
    new: Value
    old: Value
    out: Value
    source: str

    def call(self) -> Compute:
        """The call that it is."""
        args = (self.condition, self.new, self.old)
        ins = tuple(dict.fromkeys(args))
        return Compute(aten.where.self, args, {}, ins, (self.out,), source=self.source)


def fuse_guarded_updates(block: Block) -> None:
    """Replace the chains that update parameters, guarded or not, by kernels, in place."""
    if block.mesh.device != "cpu":
        return
    selects = _set_aside(block)
    fuse_updates(block)
    _put_back(block, selects)


def _set_aside(block: Block) -> list[_Select]:
    """Take out the selects that nothing in the block reads, and those before ``p + where(c, u, −0)``."""
    reads = Counter(v.number for instr in block.instrs for v in instr.ins)
    makers = {out.number: i for i in block.instrs for out in i.outs if out is not None}
    fresh = max([v.number for v in block.inputs] + list(makers), default=0)
    found: list[_Select] = []
    kept: list[Instr] = []
    updates: dict[int, Compute] = {}
    for instr in block.instrs:
        if _selects(instr) and reads[instr.outs[0].number] == 0:  # type: ignore[union-attr]
            found.append(_Select(*instr.args, instr.outs[0], instr.source))  # type: ignore[union-attr, misc]
            continue
        if _keeps_a_parameter(instr, makers) and reads[instr.outs[0].number] == 1:  # type: ignore[union-attr]
            updates[instr.outs[0].number] = instr  # type: ignore[union-attr, assignment]
        elif made := _added(instr, updates):
            p, update = made
            fresh += 1
            out: Value = instr.outs[0]  # type: ignore[assignment]
            new = replace(out, number=fresh)
            args = (p, update.args[1])
            kept.append(replace(instr, args=args, ins=tuple(dict.fromkeys(args)), outs=(new,)))  # type: ignore[call-arg]
            found.append(_Select(update.args[0], new, p, out, update.source))
            kept.remove(update)
            continue
        kept.append(instr)
    block.instrs = kept
    return found


def _selects(instr: Instr) -> bool:
    """Tell a choice by one bool between two values of one form in one place."""
    if not isinstance(instr, Compute) or instr.target is not aten.where.self:
        return False
    condition, new, old = instr.args
    return (
        all(isinstance(v, Value) for v in instr.args)
        and condition.shape == ()
        and _form(new) == _form(old) == _form(instr.outs[0])
    )


def _keeps_a_parameter(instr: Instr, makers: dict[int, Instr]) -> bool:
    """Tell ``where(condition, update, −0)``, which changes no bit of what it is added to."""
    if not isinstance(instr, Compute) or instr.target is not aten.where.self:
        return False
    condition, update, nothing = instr.args
    if not all(isinstance(v, Value) for v in instr.args) or condition.shape != ():
        return False
    full = makers.get(nothing.number)
    if not isinstance(full, Compute) or full.target is not aten.full.default:
        return False
    fill = full.args[1]
    negative = isinstance(fill, (int, float)) and fill == 0 and math.copysign(1, fill) < 0
    return negative and _form(update) == _form(instr.outs[0])


def _added(instr: Instr, updates: dict[int, Compute]) -> tuple[Value, Compute] | None:
    """The parameter and the select of ``p + where(condition, update, −0)``."""
    if not isinstance(instr, Compute) or instr.target is not aten.add.Tensor or instr.kwargs:
        return None
    p, u = instr.args
    if not (isinstance(p, Value) and isinstance(u, Value) and u.number in updates):
        return None
    return (p, updates[u.number]) if _form(p) == _form(u) == _form(instr.outs[0]) else None


def _form(value: Any) -> Any:
    return value.shape, value.dtype, value.layout


def _put_back(block: Block, selects: list[_Select]) -> None:
    """Guard the kernels that make all the new values; select the others as soon as they are there."""
    of_new: dict[int, list[_Select]] = {}
    for select in selects:
        of_new.setdefault(select.new.number, []).append(select)
    reads = Counter(v.number for instr in block.instrs for v in instr.ins)
    reads.update(v.number for v in block.outputs)
    guarded = {id(i): chosen for i in block.instrs if (chosen := _chosen(i, of_new, reads))}
    done = {id(select) for chosen in guarded.values() for select in chosen}
    waiting = [select for select in selects if id(select) not in done]
    made = {v.number for v in block.inputs}
    instrs: list[Instr] = []
    for instr in block.instrs:
        instr = _guarded(instr, guarded[id(instr)]) if id(instr) in guarded else instr
        made |= {v.number for v in instr.outs if v is not None}
        ready = [s for s in waiting if {s.condition.number, s.new.number, s.old.number} <= made]
        waiting = [s for s in waiting if s not in ready]
        made |= {select.out.number for select in ready}
        instrs += [instr, *(select.call() for select in ready)]
    block.instrs = instrs


def _guarded(instr: Instr, chosen: list[_Select]) -> Instr:
    assert isinstance(instr, Compute)
    args = (chosen[0].condition, *instr.args)
    outs = tuple(select.out for select in chosen)
    ins = tuple(dict.fromkeys(args))
    return replace(instr, target=Guarded(instr.target), args=args, ins=ins, outs=outs)


def _chosen(instr: Instr, of_new: dict[int, list[_Select]], reads: Counter[int]) -> list[_Select]:
    """One select for each result of a kernel, if there is nothing else that reads them."""
    if not isinstance(instr, Compute) or not isinstance(instr.target, Kernel):
        return []
    found: list[_Select] = []
    for value, places in zip(instr.outs, instr.target.operands, strict=True):
        given = [] if value is None else of_new.get(value.number, [])
        if len(given) != 1 or reads[given[0].new.number]:
            return []
        if given[0].old.number != instr.args[places[0]].number:
            return []
        found.append(given[0])
    return found if len({select.condition.number for select in found}) == 1 else []
