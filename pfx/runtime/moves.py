"""What one device does in a move: pack a bucket into one buffer, communicate once, unpack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx.compiler.ir import Reshard
from pfx.compiler.reshard import Move
from pfx.lax.manual.transport import alone
from pfx.mesh import Mesh
from pfx.runtime.reduction import Group, Reduction

Parts = list[torch.Tensor]
Run = Callable[[Parts], Parts]
Shape = tuple[int, ...]


def prepare_local(instr: Reshard, rank: int, size: int) -> Run:
    """A function of a bucket's parts for a move that needs nobody else.

    Args:
        rank: this device's place among the `size` that differ only along the move's axes.
    """
    moves = instr.moves or (instr.move,) * len(instr.ins)
    runs = [alone(move.kind, dim=move.dim, size=size) for move in moves]
    return lambda parts: [run(part, rank) for run, part in zip(runs, parts, strict=True)]


def prepare_collective(instr: Reshard, mesh: Mesh, group: Group, *, deterministic: bool) -> Run:
    """A function of a bucket's parts on this device, in the order of `instr.ins`.

    Args:
        group: the devices that this one communicates with.
        deterministic: add in group order, as the simulated mesh does, bit for bit.
    """
    moves = instr.moves or (instr.move,) * len(instr.ins)
    buckets: dict[Any, list[int]] = {}
    for i, (move, value) in enumerate(zip(moves, instr.ins, strict=True)):
        buckets.setdefault((value.dtype, move.reduce), []).append(i)
    prepare = _COLLECTIVES[instr.move.kind]
    runs: list[tuple[Run, list[int]]] = []
    for (dtype, reduce), members in buckets.items():
        shapes = [instr.ins[i].local_shape(mesh) for i in members]
        reduction = Reduction(group, dtype, reduce, deterministic=deterministic)
        runs.append((prepare([moves[i] for i in members], shapes, group, reduction), members))
    return runs[0][0] if len(runs) == 1 else _spread(runs, len(moves))


def _spread(runs: Sequence[tuple[Run, list[int]]], count: int) -> Run:
    """Run each bucket of one dtype on its own members."""

    def run(parts: Parts) -> Parts:
        outs: list[Any] = [None] * count
        for one, members in runs:
            for i, out in zip(members, one([parts[i] for i in members]), strict=True):
                outs[i] = out
        return outs

    return run


# One collective for a whole bucket


def _all_reduce(
    moves: Sequence[Move], shapes: Sequence[Shape], group: Group, reduction: Reduction
) -> Run:
    ranges = _ranges(shapes)

    def run(parts: Parts) -> Parts:
        total = reduction.whole(torch.cat([part.reshape(-1) for part in parts]))
        if len(parts) == 1 and parts[0].is_contiguous():
            return [total.view(parts[0].shape)]
        # Strides as a local sum would have them: later sums then run in the simulated mesh's order.
        outs = [torch.empty_like(part) for part in parts]
        for out, (start, stop) in zip(outs, ranges, strict=True):
            out.copy_(total[start:stop].view(out.shape))
        return outs

    return run


def _all_gather(
    moves: Sequence[Move], shapes: Sequence[Shape], group: Group, reduction: Reduction
) -> Run:
    ranges, n = _ranges(shapes), group.size

    def run(parts: Parts) -> Parts:
        flats = [part.contiguous().view(-1) for part in parts]
        rows = group.gather(flats[0] if len(flats) == 1 else torch.cat(flats))
        return [
            _joined(rows[:, start:stop].view(n, *shape), move.dim)
            for move, shape, (start, stop) in zip(moves, shapes, ranges, strict=True)
        ]

    return run


def _reduce_scatter(
    moves: Sequence[Move], shapes: Sequence[Shape], group: Group, reduction: Reduction
) -> Run:
    dims = [move.dim for move in moves]
    blocks = [_block(shape, dim, group.size) for shape, dim in zip(shapes, dims, strict=True)]
    ranges = _ranges(blocks)

    def run(parts: Parts) -> Parts:
        total = reduction.scattered(_rows(parts, dims, blocks, ranges, group.size))
        if len(parts) == 1:
            return [total.view(blocks[0])]
        return [
            total[start:stop].view(block).clone()  # a view would keep the whole bucket alive
            for block, (start, stop) in zip(blocks, ranges, strict=True)
        ]

    return run


def _all_to_all(
    moves: Sequence[Move], shapes: Sequence[Shape], group: Group, reduction: Reduction
) -> Run:
    n, dims = group.size, [move.to_dim for move in moves]
    blocks = [_block(shape, dim, n) for shape, dim in zip(shapes, dims, strict=True)]
    ranges = _ranges(blocks)

    def run(parts: Parts) -> Parts:
        rows = group.exchange(_rows(parts, dims, blocks, ranges, n))
        return [
            _joined(rows[:, start:stop].view(n, *block), move.dim)
            for move, block, (start, stop) in zip(moves, blocks, ranges, strict=True)
        ]

    return run


def _permute(
    moves: Sequence[Move], shapes: Sequence[Shape], group: Group, reduction: Reduction
) -> Run:
    ranges, perm = _ranges(shapes), moves[0].perm

    def run(parts: Parts) -> Parts:
        flats = [part.reshape(-1) for part in parts]
        got = group.permute(flats[0] if len(flats) == 1 else torch.cat(flats), perm)
        if len(parts) == 1:
            return [got.view(shapes[0])]
        return [
            got[start:stop].view(shape).clone()  # a view would keep the whole bucket alive
            for shape, (start, stop) in zip(shapes, ranges, strict=True)
        ]

    return run


_COLLECTIVES: dict[str, Callable[..., Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}

# Layouts of buffers


def _block(shape: Shape, dim: int, n: int) -> Shape:
    """The shape of one of `n` equal blocks along `dim`."""
    return (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def _ranges(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Where each of some tensors lies in a buffer that holds them one after the other."""
    ends = list(itertools.accumulate((math.prod(shape) for shape in shapes), initial=0))
    return list(itertools.pairwise(ends))


def _rows(
    parts: Parts,
    dims: Sequence[int],
    blocks: Sequence[Shape],
    ranges: Sequence[tuple[int, int]],
    n: int,
) -> torch.Tensor:
    """Pack what is for each member into one row: its block of every part along that part's dim."""
    if len(parts) == 1 and dims[0] == 0 and parts[0].is_contiguous():
        return parts[0].view(n, ranges[-1][1])
    rows = parts[0].new_empty((n, ranges[-1][1]))
    for part, dim, block, (start, stop) in zip(parts, dims, blocks, ranges, strict=True):
        split = part.unflatten(dim, (n, block[dim])).movedim(dim, 0)
        rows[:, start:stop].view(n, *block).copy_(split)
    return rows


def _joined(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate the blocks rows[0], rows[1], … along `dim`; a whole buffer is not copied."""
    return rows.movedim(0, dim).flatten(dim, dim + 1).contiguous()
