"""`placement`: one tensor as a grid of blocks, each with the devices that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pfx.mesh import Mesh
from pfx.spec import P
from pfx.viz import figure as fig
from pfx.viz.blocks import Block, Panel, Placed, device_ranges, panels_of, placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.3  # inches that a line of device numbers takes
CHIP = {
    "ha": "center",
    "va": "center",
    "fontsize": 8,
    "bbox": {"boxstyle": "round,pad=0.28", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
}
MARGIN = 0.55  # inches left of a grid, for its indices


def placement_text(value: Any, spec: P | None = None, mesh: Mesh | None = None) -> str:
    """Draw a tensor as a grid of blocks, each with the devices that hold it, in plain characters.

    Indices of the global tensor stand at the edges. A tensor of more than two dims shows the last
    two that are split, once for each block position along the others.

    Args:
        value: an `Array`, or the shape of one (or anything with a `shape`).
        spec, mesh: where a shape would live; not for an `Array`.

    Raises:
        TypeError: neither an Array nor a shape with a spec and a mesh.
        ShardingError: the spec does not fit the shape, or there are more than 256 blocks.

    >>> from pfx.mesh import make_mesh
    >>> print(placement_text((8, 6), P("dp"), make_mesh(dp=2, tp=2)))
    [8/dp, 6] on dp=2 tp=2: 2 blocks, each on 2 devices (copies along tp)
    dim 0 down, dim 1 across
      0     6
    0 ┌─────┐
      │ 0 1 │
    4 ├─────┤
      │ 2 3 │
    8 └─────┘
    """
    tensor = placed(value, spec, mesh, "viz.placement_text")
    row, col = tensor.shown_dims
    lines = [f"{tensor.type} on {tensor.mesh}: {tensor.summary}"]
    if row is not None:
        lines.append(f"dim {row} down, dim {col} across")
    for panel in panels_of(tensor):
        lines += ([panel.title] if panel.title else []) + _grid_lines(panel, tensor.shown_dims)
    return "\n".join(lines)


def _grid_lines(panel: Panel, shown: tuple[int | None, int | None]) -> list[str]:
    labels = [[device_ranges(block.devices) for block in line] for line in panel.cells]
    marks = [f"{edge} " if shown[0] is not None else "" for edge in panel.rows]
    ticks = [str(edge) for edge in panel.cols]
    width = max(*(len(label) + 2 for line in labels for label in line), *map(len, ticks))
    margin = max(map(len, marks))
    ruler = " " * margin + "".join(tick.ljust(width + 1) for tick in ticks).rstrip()
    rows, last = [ruler] if shown[1] is not None else [], len(labels)
    for i, mark in enumerate(marks):
        left, mid, right = "┌┬┐" if i == 0 else "└┴┘" if i == last else "├┼┤"
        rule = mid.join(["─" * width] * (len(ticks) - 1))
        rows.append(f"{mark:>{margin}}{left}{rule}{right}")
        if i < last:
            cells = "│".join(label.center(width) for label in labels[i])
            rows.append(f"{'':>{margin}}│{cells}│")
    return rows


def placement(value: Any, spec: P | None = None, mesh: Mesh | None = None) -> Figure:
    """Draw a tensor as a grid of blocks, one colour for each, numbered with the devices that hold it.

    A block with several numbers is stored several times. Indices of the global tensor stand at the
    edges. A tensor of more than two dims shows the last two that are split, once for each block
    position along the others.

    Args:
        value: an `Array`, or the shape of one (or anything with a `shape`).
        spec, mesh: where a shape would live; not for an `Array`.

    Returns:
        A `matplotlib.figure.Figure` with one axes for each grid.

    Raises:
        TypeError: neither an Array nor a shape with a spec and a mesh.
        ShardingError: the spec does not fit the shape, or there are more than 256 blocks.
        ImportError: matplotlib is not installed.

    >>> from pfx.mesh import make_mesh
    >>> figure = placement((8, 6), P("dp", "tp"), make_mesh(dp=2, tp=2))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['0', '1', '2', '3']
    """
    where = "viz.placement"
    tensor = placed(value, spec, mesh, where)
    panels = panels_of(tensor)
    width, height = _grid_size(tensor, panels[0])
    columns = min(len(panels), max(1, int(8 / (width + MARGIN))))
    rows = -(-len(panels) // columns)
    step_x, step_y = width + MARGIN + 0.15, height + 0.6
    full = max(MARGIN + columns * step_x, _text_width(tensor) + MARGIN)
    with fig.canvas(full, 0.5 + rows * step_y, where) as figure:
        fig.heading(figure, MARGIN, tensor.type, f"on {tensor.mesh}: {tensor.summary}")
        colours = fig.shard_colours(tensor.num_blocks)
        for i, panel in enumerate(panels):
            left, top = MARGIN + i % columns * step_x, 0.95 + i // columns * step_y
            axes = fig.axes_at(figure, left, top, width, height)
            _draw_grid(axes, panel, colours, (width, height))
            _label_dims(axes, tensor, panel)
    return figure


def _text_width(tensor: Placed) -> float:
    """Inches that the two lines of the heading need."""
    return max(len(tensor.type) * 0.085, (len(f"on {tensor.mesh}: {tensor.summary}")) * 0.066)


def _grid_size(tensor: Placed, panel: Panel) -> tuple[float, float]:
    """Inches of one grid, large enough for the numbers in its blocks."""
    if not tensor.shape:
        return 1.5, 0.7
    longest = 3.2 if tensor.num_blocks == len(panel.cells) * len(panel.cells[0]) else 2.0
    width, height = fig.rectangle((panel.cols[-1], panel.rows[-1]), longest, 0.7)
    block = max(_label_width(device_ranges(block.devices)) for block in panel.cells[0]) + 0.12
    n, m = len(panel.cells[0]), len(panel.cells)
    return min(max(width, n * block), 9.0), min(max(height, m * LINE), 9.0)


def _label_width(label: str) -> float:
    """Inches that a label and its white box need."""
    return 0.1 + 0.075 * len(label)


def _draw_grid(axes: Any, panel: Panel, colours: list[Any], size: tuple[float, float]) -> None:
    axes.set_xlim(0, max(panel.cols[-1], 1))
    axes.set_ylim(max(panel.rows[-1], 1), 0)
    inches = size[0] / (len(panel.cols) - 1), size[1] / (len(panel.rows) - 1)
    for i, line in enumerate(panel.cells):
        for j, block in enumerate(line):
            x, y = panel.cols[j], panel.rows[i]
            w, h = panel.cols[j + 1] - x, panel.rows[i + 1] - y
            axes.add_patch(_patch((x, y), w, h, colours[block.number]))
            for label, across, down in _chips(block, inches):
                axes.text(x + w * across, y + h * down, label, **CHIP)


def _patch(corner: tuple[float, float], width: float, height: float, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="white", linewidth=2)


def _chips(block: Block, inches: tuple[float, float]) -> list[tuple[str, float, float]]:
    """One label a device with its place in the block (0–1), or one for all where they do not fit."""
    n, chip = len(block.devices), _label_width(str(block.devices[-1])) + 0.08
    columns = max(1, min(n, int(inches[0] / chip)))
    rows = -(-n // columns)
    if rows * LINE > inches[1]:
        whole = device_ranges(block.devices)
        fits = _label_width(whole) <= inches[0]
        return [(whole if fits else f"{n} ×", 0.5, 0.5)]
    columns = -(-n // rows)
    step_x, step_y = chip / inches[0], LINE / inches[1]
    chips = []
    for k, device in enumerate(block.devices):
        i, j = divmod(k, columns)
        here = min(columns, n - i * columns)
        chips.append(
            (str(device), 0.5 + (j - (here - 1) / 2) * step_x, 0.5 + (i - (rows - 1) / 2) * step_y)
        )
    return chips


def _label_dims(axes: Any, tensor: Placed, panel: Panel) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    row, col = tensor.shown_dims
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(panel.cols if col is not None else [])
    axes.set_yticks(panel.rows if row is not None else [])
    if row is not None:
        axes.set_ylabel(_dim_text(tensor, row))
    title = f"{panel.title}   " if panel.title else ""
    axes.set_xlabel(title + ("" if col is None else _dim_text(tensor, col)), labelpad=4)


def _dim_text(tensor: Placed, dim: int) -> str:
    """The name of a dim and what splits it.

    >>> from pfx.mesh import make_mesh
    >>> _dim_text(placed((8, 6), P("dp"), make_mesh(dp=2), ""), 0)
    'dim 0 / dp'
    """
    return " / ".join([f"dim {dim}", *tensor.layout.dims[dim]])
