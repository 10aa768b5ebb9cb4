"""Dims that a mesh axis deals unequally or out of order (`pfx.mesh.Deal`), in a program of equal parts.

Every device's part has the same extent, so an op that treats rows alike runs on it as it is, padding
and all. What padding holds is nobody's concern: where rows are summed up it is first replaced by what
adds nothing, and a move between devices takes it out, and puts the rows in order, on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx.compiler.ir import Compute, Instr, Reshard, Value
from pfx.compiler.reshard import Move
from pfx.compiler.rule import Assignment, Rule, operand_nodes
from pfx.mesh import Mesh, Rows
from pfx.spec import take_rows

aten = torch.ops.aten
_GAINS = {"slice": "dim", "reduce_scatter": "dim", "all_to_all": "to_dim"}
_DIVIDES = (aten.floor_divide, aten.remainder, aten.fmod, aten.div)


def emit_move(
    value: Value,
    move: Move,
    mesh: Mesh,
    number: Callable[[], int],
    source: str = "",
    reason: str = "",
) -> list[Instr]:
    """The instructions of one move; the last one makes the moved value.

    A dim is dealt before it is split, so that equal blocks of it are the parts, and put in order again
    after it is gathered.
    """
    shape, lost = value.shape, move.dim if move.kind in ("all_gather", "all_to_all") else -1
    gained = getattr(move, _GAINS[move.kind]) if move.kind in _GAINS else -1
    to = mesh.dealt(move.layout.dims[gained], shape[gained]) if gained >= 0 else None
    back = mesh.dealt(value.layout.dims[lost], shape[lost]) if lost >= 0 else None
    make = lambda shape, layout: replace(value, number=number(), shape=shape, layout=layout)
    if to is not None and move.kind == "slice":
        rows = mesh.rows(to, shape[gained])
        out = make(shape, move.layout)
        return [Compute(own_rows, (value, gained, rows), {}, (value,), (out,), ((move.axes, 1),))]
    instrs: list[Instr] = []
    if to is not None:
        dealt = make(_padded(shape, gained, to, mesh), value.layout)
        args = (value, gained, mesh.rows(to, shape[gained]))
        instrs.append(Compute(in_places, args, {}, (value,), (dealt,)))
        value = dealt
    full = shape if back is None else _padded(shape, lost, back, mesh)
    out = make(full, move.layout)
    instrs.append(Reshard(move, (value,), (out,), source, reason, (move,)))
    if back is not None:
        places = mesh.positions(back, shape[lost])
        ordered = make(shape, move.layout)
        instrs.append(Compute(from_places, (out, lost, places), {}, (out,), (ordered,)))
    return instrs


def _padded(shape: Sequence[int], dim: int, axis: str, mesh: Mesh) -> tuple[int, ...]:
    """A shape with room along a dim for the parts of all devices, padding included."""
    room = mesh.shape[axis] * mesh.extent((axis,), shape[dim])
    return (*shape[:dim], room, *shape[dim + 1 :])


def own_rows(x: torch.Tensor, dim: int, rows: Rows, *, offset: tuple[int, ...]) -> torch.Tensor:
    """The rows of one device, padded."""
    return take_rows(x, dim, rows[offset[0]], max(map(len, rows)))


def in_places(x: torch.Tensor, dim: int, rows: Rows) -> torch.Tensor:
    """The parts of all devices one after the other, each padded with zeros."""
    extent = max(map(len, rows))
    out = x.new_zeros((*x.shape[:dim], len(rows) * extent, *x.shape[dim + 1 :]))
    for device, held in enumerate(rows):
        index = torch.tensor(held, dtype=torch.long, device=x.device)
        out.narrow(dim, device * extent, len(held)).copy_(x.index_select(dim, index))
    return out


def from_places(x: torch.Tensor, dim: int, places: Sequence[int]) -> torch.Tensor:
    """The rows in order, without padding."""
    return x.index_select(dim, torch.tensor(places, device=x.device))


def can_deal(rule: Rule, factor: str, axis: str, mesh: Mesh) -> bool:
    """Tell whether a factor may be split as an axis deals it.

    Not where the op asks for a global position along it, nor where it combines rows in a way that no
    padding is neutral to.
    """
    size = rule.sizes[factor]
    if size < 2 or mesh.dealt((axis,), size) is None or factor in rule.whole | rule.placed:
        return False
    if _unpadded(mesh.rows(axis, size)) or not _combined(rule, factor):
        return True
    if rule.reduce.get(factor, "sum") != "sum":
        return len(rule.operands) == 1
    return any(
        group and all(_has(rule.operands[i], factor) for i in group) for group in rule.linear
    )


def _unpadded(rows: Rows) -> bool:
    return len(set(map(len, rows))) == 1


def _combined(rule: Rule, factor: str) -> bool:
    """Tell whether a result is made of all rows along a factor."""
    return not all(_has(dims, factor) for dims in rule.results)


def _has(dims: Sequence[Sequence[str]], factor: str) -> bool:
    return any(factor in dim for dim in dims)


def neutralized(
    node: torch.fx.Node,
    rule: Rule,
    assignment: Assignment,
    values: Sequence[Value],
    mesh: Mesh,
    number: Callable[[], int],
) -> tuple[list[Instr], list[Value]]:
    """Fill the padding of a call's operands where its contents would matter, with what does nothing.

    That is the reduction's identity, a row that exists for an index, and 1 for an integer divisor.
    """
    instrs: list[Instr] = []
    filled = list(values)
    if not mesh.deals:
        return instrs, filled
    done: dict[Any, Value] = {}
    for i, dims in enumerate(rule.operands):
        for dim, factors in enumerate(dims):
            for factor in factors:
                axes, size = assignment.get(factor, ()), rule.sizes[factor]
                axis = mesh.dealt(axes, size)
                fill = axis and _fill(node, rule, factor, i)
                if axis is None or fill is None or _unpadded(mesh.rows(axis, size)):
                    continue
                before = filled[i]
                key = (before.number, dim, fill)
                if key not in done:
                    counts = tuple(map(len, mesh.rows(axis, size)))
                    out = done[key] = replace(before, number=number())
                    args = (before, dim, counts, fill)
                    at = ((axes, 1),)
                    instrs.append(Compute(filled_after, args, {}, (before,), (out,), at))
                filled[i] = done[key]
    return instrs, filled


def _fill(node: torch.fx.Node, rule: Rule, factor: str, operand: int) -> Any:
    """What an operand's padding along a factor must hold; None if anything will do."""
    value = operand_nodes(node)[operand].meta["val"]
    exact = not (value.dtype.is_floating_point or value.dtype.is_complex)
    if _combined(rule, factor):
        return _identity(rule.reduce.get(factor, "sum"), value.dtype)
    if not exact or value.dtype == torch.bool:
        return None
    if getattr(node.target, "overloadpacket", None) in _DIVIDES:
        return operand or None
    return None if torch.Tag.pointwise in getattr(node.target, "tags", ()) else 0  # an index


def _identity(reduce: str, dtype: torch.dtype) -> Any:
    if reduce == "sum":
        return 0
    if dtype == torch.bool:
        return reduce == "min"
    if dtype.is_floating_point:
        return -math.inf if reduce == "max" else math.inf
    bounds = torch.iinfo(dtype)
    return bounds.min if reduce == "max" else bounds.max


def filled_after(
    x: torch.Tensor, dim: int, counts: Sequence[int], fill: Any, *, offset: tuple[int, ...]
) -> torch.Tensor:
    """A copy in which the rows after those that this device has hold `fill`."""
    count = counts[offset[0]]
    out = x.clone()
    out.narrow(dim, count, x.shape[dim] - count).fill_(fill)
    return out


def unaligned(rule: Rule, assignment: Assignment, mesh: Mesh) -> set[str]:
    """The factors of an assignment that an axis deals, and whose position the op asks for."""
    return {f for f in rule.placed if mesh.dealt(assignment.get(f, ()), rule.sizes[f])}
