"""From one layout to another: the shortest list of moves, each a slice or one collective.

Axes that a dim gains are sliced (free). A partial sum becomes a reduce-scatter where the target is
split over its axes and one all-reduce over the flattened rest elsewhere. An axis that changes dims is
an all-to-all; an axis that a dim loses is gathered, last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from pfx.lax.manual.transport import Groups, Perm
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout

LOCAL = ("slice", "own", "cast")  # kinds of moves without communication


@dataclass(frozen=True)
class Move:
    """One step: `kind` is one of `LOCAL`, or all_reduce, reduce_scatter, all_gather, all_to_all, permute.

    `dim` is the dim that gains (slice, reduce_scatter) or loses (all_gather, all_to_all) the axes;
    `to_dim` the one that gains them in an all_to_all. "own" turns a whole value into a partial sum
    that only the first device of each group contributes to. "cast" is the part itself, under another
    layout: values that are the same on several devices may from here on be counted per device.

    Ranks number the devices along `axes`, row-major. `perm` has the (source, destination) ranks of a
    permute; who is nobody's destination gets zeros. With `groups`, disjoint and equally large, ranks
    communicate within theirs, in the order it lists them.
    """

    kind: str
    axes: Axes
    dim: int
    to_dim: int
    layout: Layout  # after the move
    reduce: str = "sum"
    perm: Perm = ()
    groups: Groups = ()

    @property
    def communicates(self) -> bool:
        """Tell a collective from what a device does alone."""
        return self.kind not in LOCAL

    def size(self, mesh: Mesh) -> int:
        """The number of devices that communicate with each other."""
        return len(self.groups[0]) if self.groups else mesh.count(self.axes)

    def local_shape(self, before: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of a device's part after the move, from that before it."""
        shape, n = list(before), self.size(mesh)
        if self.kind in ("slice", "reduce_scatter"):
            shape[self.dim] //= n
        if self.kind in ("all_gather", "all_to_all"):
            shape[self.dim] *= n
        if self.kind == "all_to_all":
            shape[self.to_dim] //= n
        return tuple(shape)

    def moves_nothing(self, mesh: Mesh) -> bool:
        """Tell whether every device ends with its own part: it is alone, and sends to itself."""
        return self.size(mesh) == 1 and (self.kind != "permute" or bool(self.perm))


def _set(layout: Layout, dim: int, axes: Axes) -> Layout:
    dims = (*layout.dims[:dim], axes, *layout.dims[dim + 1 :])
    return replace(layout, dims=dims)


def _without(layout: Layout, axes: Axes) -> Layout:
    return replace(layout, partial=tuple(a for a in layout.partial if a not in axes))


@functools.lru_cache(maxsize=65536)
def plan_moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves that turn `source` into `target` (same rank, varying over the same axes)."""
    assert len(source.dims) == len(target.dims), (source, target)
    assert set(source.varying) == set(target.varying), (source, target)
    moves: list[Move] = []
    now = source

    def step(kind: str, axes: Axes, after: Layout, dim: int = -1, to_dim: int = -1) -> None:
        nonlocal now
        now = after
        moves.append(Move(kind, axes, dim, to_dim, after, source.reduce))

    def gains(dim: int) -> Axes:
        have, want = now.dims[dim], target.dims[dim]
        return want[len(have) :] if want[: len(have)] == have else ()

    def grow() -> None:
        """Slice what a dim wants next and no other holds; scatter what it wants next and is owed."""
        growing = True
        while growing:
            for dim in range(len(now.dims)):
                free = tuple(takewhile(lambda axis: axis not in now.axes, gains(dim)))
                if free:
                    step("slice", free, _set(now, dim, now.dims[dim] + free), dim)
            owed = (
                [] if now.reduce != "sum" else [a for a in now.partial if a not in target.partial]
            )
            growing = False
            for dim in range(len(now.dims)):
                run = tuple(takewhile(owed.__contains__, gains(dim)))
                if run and not growing:
                    after = _without(_set(now, dim, now.dims[dim] + run), run)
                    step("reduce_scatter", run, after, dim)
                    growing = True

    grow()
    owed_axes = tuple(a for a in now.partial if a not in target.partial)
    if owed_axes:
        step("all_reduce", owed_axes, _without(now, owed_axes))
    grow()
    for dim, to_dim in ((i, j) for i in range(len(now.dims)) for j in range(len(now.dims))):
        have, held, want = now.dims[dim], now.dims[to_dim], target.dims[to_dim]
        moves_axis = bool(have) and want[: len(held) + 1] == held + have[-1:]
        if dim != to_dim and have != target.dims[dim] and moves_axis:
            after = _set(_set(now, dim, have[:-1]), to_dim, held + have[-1:])
            step("all_to_all", have[-1:], after, dim, to_dim)
    for dim, want in enumerate(target.dims):
        have = now.dims[dim]
        kept = 0
        while kept < min(len(have), len(want)) and have[kept] == want[kept]:
            kept += 1
        if have[kept:]:
            step("all_gather", have[kept:], _set(now, dim, have[:kept]), dim)
    grow()
    lent = tuple(a for a in target.partial if a not in now.partial)
    if lent:
        step("own", lent, replace(now, partial=target.partial, reduce=target.reduce))
    assert now.dims == target.dims and set(now.partial) == set(target.partial), (source, target)
    return tuple(moves)


def move_bytes(move: Move, before: Layout, numel: int, itemsize: int, mesh: Mesh) -> float:
    """Bytes one device sends in a move, by the ring algorithms' counts."""
    n = move.size(mesh)
    local = numel / mesh.count([a for dim in before.dims for a in dim]) * itemsize
    if not move.communicates or n == 1:
        return 0.0
    if move.kind == "permute":
        return local
    if move.kind == "all_reduce":
        return 2 * local * (n - 1) / n
    if move.kind == "all_gather":
        return local * (n - 1)
    return local * (n - 1) / n


def reshard_bytes(source: Layout, target: Layout, numel: int, itemsize: int, mesh: Mesh) -> float:
    """Bytes one device sends to reshard a value; a free value costs nothing."""
    if source.free:
        return 0.0
    total, now = 0.0, source
    for move in plan_moves(source, target):
        total += move_bytes(move, now, numel, itemsize, mesh)
        now = move.layout
    return total
