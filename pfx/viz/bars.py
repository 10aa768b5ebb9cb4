"""Horizontal bars cut into named parts, with the numbers written where they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pfx.viz import figure as fig
from pfx.viz.units import UNITS, number_text, unit_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bar = tuple[str, Mapping[str, int], str]  # label, bytes by part, text at the end
BAR, WIDTH = 0.34, 4.4  # inches of a bar's slot, and of the longest bar


def stacked_bars(where: str, title: str, bars: Sequence[Bar], colours: Mapping[str, str]) -> Figure:
    """Draw one bar for each entry and a legend of the parts that occur.

    Args:
        bars: label, bytes by part in drawing order, and the text at the end.
        colours: of the parts; one it does not know is grey.
    """
    longest = max([1, *(sum(values.values()) for _, values, _ in bars)])
    parts = {part for _, values, _ in bars for part in values}
    left = 0.2 + 0.075 * max(len(label) for label, _, _ in bars)
    right = 0.3 + 0.08 * max(len(text) for _, _, text in bars)
    with fig.canvas(left + WIDTH + right, 0.95 + BAR * len(bars) + 0.3, where) as figure:
        fig.write(figure, left, 0.08, title, fontsize=9.5, fontweight="bold")
        axes = fig.axes_at(figure, left, 0.68, WIDTH, BAR * len(bars))
        shown = [part for part in colours if part in parts] + sorted(parts - set(colours))
        _add_legend(axes, shown, colours, len(bars))
        for i, bar in enumerate(bars):
            _draw_bar(axes, i, bar, colours, longest)
        _finish(axes, [label for label, _, _ in bars], longest)
    return figure


def _add_legend(axes: Any, parts: Sequence[str], colours: Mapping[str, str], count: int) -> None:
    """Write the parts in one line, flush with the left edge of so many bars."""
    from matplotlib.patches import Patch

    if parts:
        axes.legend(
            handles=[Patch(facecolor=colours.get(part, fig.GREY), label=part) for part in parts],
            ncols=len(parts),
            loc="lower left",
            bbox_to_anchor=(0, 1 + 0.06 / (BAR * count)),
            frameon=False,
            borderaxespad=0,
            borderpad=0,
            handlelength=1,
            handleheight=1,
            handletextpad=0.4,
            columnspacing=1.2,
            fontsize=7.5,
        )


def _draw_bar(axes: Any, at: int, bar: Bar, colours: Mapping[str, str], longest: int) -> None:
    _, values, text = bar
    start, unit = 0.0, 1024 ** unit_scale(longest / 8)
    for part, size in values.items():
        axes.barh(
            at,
            size / unit,
            left=start / unit,
            height=0.72,
            color=colours.get(part, fig.GREY),
            edgecolor="white",
            linewidth=1,
        )
        label = number_text(size / unit)
        if size / longest * WIDTH > 0.08 + 0.07 * len(label):
            axes.text((start + size / 2) / unit, at, label, ha="center", va="center", fontsize=7.5)
        start += size
    axes.annotate(
        text,
        (start / unit, at),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        fontweight="bold",
        annotation_clip=False,
    )


def _finish(axes: Any, labels: Sequence[str], longest: int) -> None:
    scale = unit_scale(longest / 8)
    axes.set_xlim(0, longest / 1024**scale)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=fig.INK)
    axes.set_xlabel(UNITS[scale])
    axes.locator_params(axis="x", nbins=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
