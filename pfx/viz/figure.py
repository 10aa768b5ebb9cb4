"""What the pictures share: matplotlib imported late, one look, colours for the colour-blind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pfx.errors import message

# Paul Tol's "light" scheme (SRON/EPS/TN/09-002): fills that take black text and that people with
# any colour vision can tell apart.
LIGHT = ("#77AADD", "#EE8866", "#44BB99", "#EEDD88", "#FFAABB", "#BBCC33", "#99DDFF", "#AAAA00")
GREY = "#DDDDDD"
PAPER = "#F7F7F7"
INK = "#222222"
MUTED = "#666666"
EDGE = "#AAAAAA"
DPI = 144
MONO = "DejaVu Sans Mono"

_LOOK = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a picture is the same everywhere
    "font.size": 8.0,
    "text.color": INK,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.0,
    "axes.linewidth": 0.6,
    "axes.unicode_minus": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


def pyplot(where: str) -> Any:
    """Import matplotlib, or say how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            message(
                f"{where}:",
                "draws with matplotlib, which is not installed.",
                fix="pip install 'pfx[viz]'",
            )
        ) from error
    return plt


@contextmanager
def canvas(width: float, height: float, where: str) -> Iterator[Any]:
    """Yield a figure of a size in inches, drawn in one look whatever the user's settings.

    pyplot makes it, since that is what teaches a notebook to show figures; it is closed at once, so
    that a notebook does not show it twice and nothing piles up.
    """
    plt = pyplot(where)
    with plt.rc_context(_LOOK):
        figure = plt.figure(figsize=(width, height), dpi=DPI)
        plt.close(figure)
        yield figure


def axes_at(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """Add axes at a place given in inches from the top left corner of the figure."""
    total_width, total_height = figure.get_size_inches()
    return figure.add_axes(
        (
            left / total_width,
            1 - (top + height) / total_height,
            width / total_width,
            height / total_height,
        )
    )


def write(figure: Any, left: float, top: float, text: str, **style: Any) -> Any:
    """Write text at a place given in inches from the top left corner of the figure."""
    width, height = figure.get_size_inches()
    return figure.text(left / width, 1 - top / height, text, va="top", **style)


def heading(figure: Any, left: float, title: str, subtitle: str) -> None:
    """Write a title in code letters and a muted line below it, at the top of the figure."""
    write(figure, left, 0.08, title, fontfamily=MONO, fontsize=9.5, fontweight="bold")
    write(figure, left, 0.29, subtitle, color=MUTED, fontsize=7.5)


def shard_colours(count: int) -> list[Any]:
    """Colours for so many shards, each its own: the named ones, or steps along viridis."""
    if count <= len(LIGHT):
        return list(LIGHT[:count])
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    return [scale(i / (count - 1)) for i in range(count)]


def rectangle(size: tuple[float, float], longest: float, shortest: float) -> tuple[float, float]:
    """Inches for a tensor of this size: its shape, but never a thread.

    The square root of the ratio is enough to tell wide from tall.
    """
    width, height = (max(n, 1) for n in size)
    ratio = math.sqrt(width / height)
    if ratio >= 1:
        return longest, max(longest / ratio, shortest)
    return max(longest * ratio, shortest), longest
