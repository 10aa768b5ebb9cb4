"""`devices`: a panel for each device, with every tensor of a tree and the part that it holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pfx import tree
from pfx.array import Array
from pfx.errors import MeshError, message
from pfx.mesh import Mesh
from pfx.viz import figure as fig
from pfx.viz.blocks import Placed
from pfx.viz.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "viz.devices"
MAX_DEVICES = 32
PER_LINE = 5  # tensors side by side
TENSOR = 0.5  # inches of the longer side of a tensor
LINE = 0.72  # inches of a tensor with its name below
TITLE = 0.24  # inches of the title of a row
HEAD, FOOT, GAP = 0.42, 0.26, 0.12  # inches above, below and between the tensors of a panel


Corners = tuple[int, float, float, float, float]  # number of a block, x, y, w, h


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the tree: its short name, its array and the blocks that each device holds."""

    name: str
    array: Array
    corners: tuple[tuple[Corners, ...], ...]  # of its blocks, by device


@dataclass(frozen=True)
class _Row:
    """Tensors drawn side by side under one title."""

    title: str
    tensors: tuple[_Tensor, ...]


def devices(arrays: Any) -> Figure:
    """Draw, for each device, every tensor of a tree with the part that the device holds filled in.

    The outline is the whole tensor. Within one tensor the same colour means the same data, so a
    colour seen on several devices is a copy. A dict of dicts gets a row for each of its keys.

    Args:
        arrays: a pytree of `Array` on one mesh of at most 32 devices.

    Returns:
        A `matplotlib.figure.Figure` with one axes a device, in the order of the mesh: the first
        axis down, the others across; a mesh of one axis is one row.

    Raises:
        TypeError: a leaf is no Array (its key path is in the message), or there is none.
        MeshError: the leaves are on different meshes, or on too many devices to draw.
        ImportError: matplotlib is not installed.

    >>> import torch
    >>> from pfx.api import device_put
    >>> from pfx.mesh import make_mesh
    >>> from pfx.spec import P
    >>> figure = devices(device_put({"w": torch.zeros(4, 8)}, make_mesh(dp=2), P("dp")))
    >>> [axes.texts[-1].get_text() for axes in figure.axes]
    ['holds 64 B of 128 B', 'holds 64 B of 128 B']
    """
    leaves = _leaves(arrays)
    mesh = leaves[0][1].mesh
    order = list(arrays) if isinstance(arrays, dict) else []
    rows = [line for row in _rows(_in_order(leaves, order)) for line in _wrapped(row)]
    cell = max(_cell_width(tensor.name) for row in rows for tensor in row.tensors)
    width = max(max(len(row.tensors) for row in rows) * cell + 0.2, _header_width(mesh), 1.75)
    height = HEAD + sum(LINE + (TITLE if row.title else 0) for row in rows) + FOOT
    down, across = _grid(mesh)
    size = 0.15 + across * (width + GAP), 0.6 + down * (height + GAP)
    with fig.canvas(max(size[0], 4.6), size[1], WHERE) as figure:
        fig.heading(
            figure, 0.15, f"mesh {mesh}", "filled: the part a device holds; same colour, same data"
        )
        for number in range(mesh.size):
            left = 0.15 + number % across * (width + GAP)
            top = 0.6 + number // across * (height + GAP)
            axes = fig.axes_at(figure, left, top, width, height)
            _draw_device(axes, (width, height), number, _place(mesh, number), rows, cell)
    return figure


def _leaves(arrays: Any) -> list[tuple[tree.Path, Array]]:
    pairs, _ = tree.flatten_with_path(arrays)
    for path, leaf in pairs:
        if not isinstance(leaf, Array):
            raise TypeError(
                message(
                    f"{WHERE}: arrays{tree.path_string(path)}",
                    f"is a {type(leaf).__name__}, not an Array.",
                    fix="put it on a mesh first: pfx.device_put(x, mesh, specs)",
                )
            )
    if not pairs:
        raise TypeError(
            message(f"{WHERE}:", "the tree holds no Array.", fix=f'{WHERE}({{"x": x}})')
        )
    mesh = pairs[0][1].mesh
    for path, leaf in pairs:
        if leaf.mesh != mesh:
            raise MeshError(
                message(
                    f"{WHERE}: arrays{tree.path_string(path)}",
                    "is on another mesh.",
                    f"{leaf.mesh} ({leaf.mesh.kind}); the first leaf: {mesh} ({mesh.kind})",
                    fix="draw one picture for each mesh",
                )
            )
    if mesh.size > MAX_DEVICES:
        raise MeshError(
            message(
                f"{WHERE}:",
                f"{mesh.size} devices are too many to draw.",
                f"mesh: {mesh}; at most {MAX_DEVICES} devices.",
                fix="draw it on a small mesh with the same axes, or viz.placement of one tensor",
            )
        )
    return pairs


def _in_order(
    leaves: Sequence[tuple[tree.Path, Array]], keys: Sequence[Any]
) -> list[tuple[tree.Path, Array]]:
    """The leaves in the order in which the user wrote the dict, not by sorted key."""
    place = {f"[{key!r}]": i for i, key in enumerate(keys)}
    return sorted(leaves, key=lambda pair: place.get(pair[0][0], 0) if pair[0] else 0)


def _grid(mesh: Mesh) -> tuple[int, int]:
    """Panels down and across: the first axis down, the rest across, never more than 8 across."""
    sizes = [size for _, size in mesh.axes if size > 1]
    across = mesh.size if len(sizes) < 2 else mesh.size // sizes[0]
    while across > 8 and across % 2 == 0:
        across //= 2
    return -(-mesh.size // across), across


def _rows(leaves: Sequence[tuple[tree.Path, Array]]) -> list[_Row]:
    """One row for each top-level key with something below it; all leaves in one if there is none."""
    nested = any(len(path) > 1 for path, _ in leaves)
    groups: dict[str, list[tuple[tree.Path, Array]]] = {}
    for path, array in leaves:
        key = _plain(path[0]) if nested else ""
        groups.setdefault(key, []).append((path[1:] if nested else path, array))
    return [_Row(key, _named(members)) for key, members in groups.items()]


def _named(members: Sequence[tuple[tree.Path, Array]]) -> tuple[_Tensor, ...]:
    """Name each leaf by the last step of its path, by the last two where that is not unique."""
    last = Counter(path[-1] for path, _ in members if path)
    named = []
    for path, array in members:
        steps = path[-1:] if not path or last[path[-1]] == 1 else path[-2:]
        named.append(_Tensor(".".join(map(_plain, steps)), array, _corners(array)))
    return tuple(named)


def _place(mesh: Mesh, device: int) -> str:
    return "  ".join(f"{axis}={i}" for axis, i in mesh.coordinate(device).items())


def _header_width(mesh: Mesh) -> float:
    """Inches for the number of a device and its coordinates side by side."""
    return 1.05 + 0.066 * len(_place(mesh, mesh.size - 1))


def _cell_width(name: str) -> float:
    """Inches for a tensor and its name."""
    return max(TENSOR + 0.16, 0.056 * len(name) + 0.1)


def _plain(step: str) -> str:
    """Write a step of a key path as a word: ``['w_up']`` and ``.w_up`` are both w_up."""
    return step.lstrip(".").strip("[]'\"")


def _wrapped(row: _Row) -> list[_Row]:
    lines = [row.tensors[i : i + PER_LINE] for i in range(0, len(row.tensors), PER_LINE)]
    return [_Row(row.title if i == 0 else "", line) for i, line in enumerate(lines)]


def _corners(array: Array) -> tuple[tuple[Corners, ...], ...]:
    """The blocks of each device within a unit square, over the two dims that are drawn."""
    tensor = Placed(array.shape, array.layout, array.mesh, array.dtype)
    row, col = tensor.shown_dims
    found: list[list[Corners]] = [[] for _ in range(array.mesh.size)]
    for block in tensor.blocks:
        y, height = _span(array, block.slices, row)
        x, width = _span(array, block.slices, col)
        for device in block.devices:
            found[device].append((block.number, x, y, width, height))
    return tuple(map(tuple, found))


def _span(array: Array, slices: Sequence[slice], dim: int | None) -> tuple[float, float]:
    if dim is None:
        return 0.0, 1.0
    size = max(array.shape[dim], 1)
    return slices[dim].start / size, (slices[dim].stop - slices[dim].start) / size


def _draw_device(
    axes: Any,
    size: tuple[float, float],
    number: int,
    place: str,
    rows: Sequence[_Row],
    cell: float,
) -> None:
    """Draw one panel; its coordinates are inches, downwards."""
    axes.set_xlim(0, size[0])
    axes.set_ylim(size[1], 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor(fig.PAPER)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(0.1, 0.16, f"device {number}", va="center", fontsize=8.5, fontweight="bold")
    axes.text(size[0] - 0.1, 0.16, place, va="center", ha="right", color=fig.MUTED, fontsize=7.5)
    top = HEAD
    for row in rows:
        if row.title:
            axes.text(0.1, top + 0.06, row.title, va="center", fontsize=7.5, color=fig.MUTED)
            top += TITLE
        for i, tensor in enumerate(row.tensors):
            _draw_tensor(axes, 0.1 + i * cell, top, tensor, number)
        top += LINE
    arrays = [tensor.array for row in rows for tensor in row.tensors]
    held = sum(array.bytes_per_device for array in arrays)
    total = sum(array.dtype.itemsize * math.prod(array.shape) for array in arrays)
    share = f"{bytes_text(held)} of" if held < total else "all"
    axes.text(0.1, size[1] - 0.13, f"holds {share} {bytes_text(total)}", va="center", fontsize=7.5)


def _draw_tensor(axes: Any, left: float, top: float, tensor: _Tensor, device: int) -> None:
    from matplotlib.patches import Rectangle

    row, col = Placed(tensor.array.shape, tensor.array.layout, tensor.array.mesh).shown_dims
    size = tuple(1 if dim is None else tensor.array.shape[dim] for dim in (col, row))
    width, height = (0.16, 0.16) if col is None else fig.rectangle((size[0], size[1]), TENSOR, 0.16)
    x0, y0 = left, top + (TENSOR - height) / 2
    blocks = max(number for corners in tensor.corners for number, *_ in corners) + 1
    colours = fig.shard_colours(blocks)
    axes.add_patch(Rectangle((x0, y0), width, height, facecolor="white", edgecolor="none"))
    for number, x, y, w, h in tensor.corners[device]:
        part = (x0 + x * width, y0 + y * height)
        axes.add_patch(
            Rectangle(part, w * width, h * height, facecolor=colours[number], edgecolor="none")
        )
    axes.add_patch(
        Rectangle((x0, y0), width, height, fill=False, edgecolor=fig.EDGE, linewidth=0.7)
    )
    axes.text(
        left, top + TENSOR + 0.08, tensor.name, va="center", fontsize=6.5, fontfamily=fig.MONO
    )
