"""How a tensor falls into blocks: the geometry behind the pictures, without any drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx.array import Array
from pfx.errors import ShardingError, message
from pfx.mesh import Mesh
from pfx.spec import Layout, P, layout_of

MAX_BLOCKS = 256


@dataclass(frozen=True)
class Block:
    """A part of a tensor that is stored as one: its place among the blocks and its devices."""

    number: int  # row-major
    index: tuple[int, ...]  # per dim
    slices: tuple[slice, ...]  # of the global tensor
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A global shape with an exact layout on a mesh: what a picture is drawn from."""

    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    dtype: torch.dtype | None = None

    @property
    def type(self) -> str:
        """The sharded type, ``f32[8/dp, 16]``; without the dtype where none is known."""
        if self.dtype is not None:
            return self.layout.text(self.shape, self.dtype)
        text = self.layout.text(self.shape, torch.bool)
        return text[text.index("[") :]

    def cuts(self, dim: int) -> list[tuple[int, int, int]]:
        """The blocks of a dim: begin, end, and the index along its axes of the devices that hold it.

        >>> from pfx.mesh import Deal, make_mesh
        >>> mesh = make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))})
        >>> placed((6,), P("pp"), mesh, "").cuts(0)
        [(0, 2, 0), (2, 4, 1), (4, 5, 1), (5, 6, 0)]
        """
        size, axes = self.shape[dim], self.layout.dims[dim]
        axis = self.mesh.dealt(axes, size)
        if axis is None:
            n = self.mesh.count(axes)
            return [(size // n * i, size // n * (i + 1), i) for i in range(n)]
        found = zip(self.mesh.blocks(axis, size), self.mesh.deal(axis).place, strict=True)
        return [(start, stop, device) for (start, stop), device in found if start < stop]

    @property
    def num_blocks(self) -> int:
        """How many different parts there are."""
        return math.prod(len(self.cuts(dim)) for dim in range(len(self.shape)))

    @property
    def summary(self) -> str:
        """How many blocks, and on how many devices each.

        >>> from pfx.mesh import make_mesh
        >>> placed((8, 16), P("dp"), make_mesh(dp=2, tp=2), "").summary
        '2 blocks, each on 2 devices (copies along tp)'
        """
        n, copies = self.num_blocks, self.mesh.size // self.mesh.count(self.layout.axes)
        unused = [
            axis for axis, size in self.mesh.axes if axis not in self.layout.axes and size > 1
        ]
        blocks = f"{n} blocks, each on" if n > 1 else "1 block, on"
        if copies == 1:
            return f"{blocks} 1 device"
        return f"{blocks} {copies} devices (copies along {', '.join(unused)})"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block, row-major, with the numbers of the devices that hold it."""
        held: dict[tuple[int, ...], list[int]] = {}
        for device, coordinate in enumerate(self.mesh.coordinates()):
            place = tuple(self.mesh.index(coordinate, axes) for axes in self.layout.dims)
            held.setdefault(place, []).append(device)
        cuts = [list(enumerate(self.cuts(dim))) for dim in range(len(self.shape))]
        found = []
        for number, parts in enumerate(itertools.product(*cuts)):
            slices = tuple(slice(start, stop) for _, (start, stop, _) in parts)
            devices = held[tuple(place for _, (_, _, place) in parts)]
            found.append(Block(number, tuple(i for i, _ in parts), slices, tuple(devices)))
        return tuple(found)

    @property
    def shown_dims(self) -> tuple[int | None, int | None]:
        """The dims drawn downwards and across: the last two that are split, else the last ones."""
        ndim = len(self.shape)
        split = [dim for dim in range(ndim) if self.mesh.count(self.layout.dims[dim]) > 1]
        whole = [dim for dim in range(ndim) if dim not in split]
        chosen = sorted((whole + split)[-2:])
        padded: list[int | None] = [None, None, *chosen]
        return padded[-2], padded[-1]


@dataclass(frozen=True)
class Panel:
    """One two-dimensional grid of blocks, and where it lies along the dims not drawn."""

    title: str
    rows: tuple[int, ...]  # the global indices where blocks begin, and the end
    cols: tuple[int, ...]
    cells: tuple[tuple[Block, ...], ...]


def panels_of(tensor: Placed) -> list[Panel]:
    """Cut the blocks into grids, one for each block position along the dims that are not drawn.

    >>> from pfx.mesh import make_mesh
    >>> tensor = placed((2, 4, 6), P("a", "b", "c"), make_mesh(a=2, b=2, c=2), "")
    >>> [(panel.title, panel.rows, panel.cols) for panel in panels_of(tensor)]
    [('dim 0: 0', (0, 2, 4), (0, 3, 6)), ('dim 0: 1', (0, 2, 4), (0, 3, 6))]
    """
    row, col = tensor.shown_dims
    kept = [dim for dim in range(len(tensor.shape)) if dim not in (row, col)]
    groups: dict[tuple[int, ...], list[Block]] = {}
    for block in tensor.blocks:
        groups.setdefault(tuple(block.index[dim] for dim in kept), []).append(block)
    panels = []
    for blocks in groups.values():
        cells = [
            tuple(line)
            for _, line in itertools.groupby(
                blocks, lambda b: None if row is None else b.index[row]
            )
        ]
        title = ", ".join(
            f"dim {dim}: {_range_text(blocks[0].slices[dim])}"
            for dim in kept
            if tensor.mesh.count(tensor.layout.dims[dim]) > 1
        )
        panels.append(Panel(title, _edges(tensor, row), _edges(tensor, col), tuple(cells)))
    return panels


def _range_text(part: slice) -> str:
    return f"{part.start}" if part.stop == part.start + 1 else f"{part.start}–{part.stop - 1}"


def _edges(tensor: Placed, dim: int | None) -> tuple[int, ...]:
    if dim is None:
        return (0, 1)
    return (0, *(stop for _, stop, _ in tensor.cuts(dim)))


def placed(value: Any, spec: Any, mesh: Mesh | None, where: str) -> Placed:
    """Read what the user gave: an Array, or a shape with a spec and a mesh.

    Raises:
        TypeError: when it is neither.
        ShardingError: when the spec does not fit the shape, or there are too many blocks to draw.
    """
    if isinstance(value, Array):
        if spec is not None or mesh is not None:
            raise TypeError(
                message(
                    f"{where}:",
                    "an Array brings its own spec and mesh.",
                    f"array: {value!r}",
                    fix=f"{where}(x), or {where}(x.shape, spec, mesh) for another placement",
                )
            )
        tensor = Placed(value.shape, value.layout, value.mesh, value.dtype)
    else:
        tensor = _from_shape(value, spec, mesh, where)
    if tensor.num_blocks > MAX_BLOCKS:
        raise ShardingError(
            message(
                f"{where}: {tensor.type}",
                f"has {tensor.num_blocks} blocks, too many to draw.",
                f"mesh: {tensor.mesh}; at most {MAX_BLOCKS} blocks.",
                fix="draw it on a small mesh with the same axes; the pattern is the same",
            )
        )
    return tensor


def _from_shape(value: Any, spec: Any, mesh: Mesh | None, where: str) -> Placed:
    shape = getattr(value, "shape", value)
    is_shape = isinstance(shape, Sequence) and all(isinstance(n, int) for n in shape)
    if not is_shape or not isinstance(spec, P) or not isinstance(mesh, Mesh):
        raise TypeError(
            message(
                f"{where}:",
                "needs an Array, or a shape with a spec and a mesh.",
                f"got: {value!r:.60}, {spec!r:.60}, {mesh!r:.60}",
                fix=f'{where}((8, 16), P("dp"), mesh)',
            )
        )
    shape = tuple(shape)
    layout = layout_of(spec, shape, mesh, f"{where}: the shape {shape}")
    return Placed(shape, layout, mesh, getattr(value, "dtype", None))


def device_ranges(devices: Sequence[int]) -> str:
    """List device numbers, runs of three or more as a range, a long list cut short.

    >>> device_ranges([0, 1]), device_ranges([0, 1, 2, 3, 8]), device_ranges(range(0, 64, 2))
    ('0 1', '0–3 8', '0 2 … 62')
    """
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    words = []
    for run in runs:
        words += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(device) for device in run]
    return " ".join(words if len(words) <= 4 else [*words[:2], "…", words[-1]])
