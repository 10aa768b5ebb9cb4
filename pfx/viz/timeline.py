"""`timeline`: who works on what and when in a pipeline, as a Gantt chart or a character grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pfx.errors import message
from pfx.schedules import Row, Schedule, Timeline
from pfx.viz import figure as fig
from pfx.viz.runs import Run, Runs, Times, named_timelines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "F": (fig.LIGHT[0], "forward"),
    "B": (fig.LIGHT[1], "backward"),
    "I": (fig.LIGHT[2], "gradient of the input"),
    "W": (fig.LIGHT[3], "gradient of the weights"),
}
PALEST = 0.6  # how far towards white the last stage of a device goes
WIDTH, ROW, HEAD = 7.0, 0.19, 1.5  # inches of the time, of a device, and rows above a schedule
BOX = 0.86  # of a row
FONT, SMALLEST = 7.0, 4.5  # points of the numbers in the boxes


def timeline_text(
    schedules: Runs,
    *,
    t_f: float = 1.0,
    t_b: float = 1.0,
    t_w: float = 1.0,
    t_comm: float = 0.0,
    width: int = 120,
) -> str:
    """Write a pipeline's schedule or run as a grid: a line per device, time to the right, dots for idle.

    Args:
        schedules: a `Schedule`, a `Timeline` (its own times), a `Program` (the times that
            `Program.timeline` predicts), or a list of (name, one of them) to compare.
        t_f: of a `Schedule`: the time of a forward of one microbatch through all stages of a
            device, which share it equally; so schedules with and without virtual stages do the
            same work.
        t_b: the time of the gradient of the inputs, likewise.
        t_w: the time of the gradient of the weights, likewise.
        t_comm: the time a value takes to another device.
        width: the most characters for the time of the longest run.

    Raises:
        TypeError: it is none of them, times are given for what has its own, or some are seconds
            and others have no unit.
        ScheduleError: the schedule cannot run, or a time is negative or not finite.
        ShardingError: the program has no pipeline.

    >>> from pfx import schedules
    >>> runs = [(n, schedules.build(n, stages=2, microbatches=2)) for n in ("gpipe", "zb-h1")]
    >>> print(timeline_text(runs))
    gpipe
    device 0: 0F0 0F1 ............0B0---- 0B1----
    device 1: ....1F0 1F1 1B0---- 1B1---- .......
    makespan 9, bubble 33.3%
    <BLANKLINE>
    zb-h1
    device 0: 0F0 0F1 ....0I0 0W0 0I1 0W1
    device 1: ....1F0 1I0 1F1 1I1 1W0 1W1
    makespan 7, bubble 14.3%
    """
    runs = named_timelines("viz.timeline_text", schedules, Times(t_f, t_b, t_w, t_comm))
    longest = max(_end(run) for _, run in runs) or 1.0
    grids = [run.text(width=round(width * _end(run) / longest)) for _, run in runs]
    if isinstance(schedules, Run) and len(grids) == 1:
        return grids[0]
    return "\n\n".join(f"{name}\n{grid}" for (name, _), grid in zip(runs, grids, strict=True))


def timeline(
    schedules: Runs,
    *,
    t_f: float = 1.0,
    t_b: float = 1.0,
    t_w: float = 1.0,
    t_comm: float = 0.0,
    ax: Any = None,
) -> Figure:
    """Draw a pipeline's schedule or run as a Gantt chart: a row per device, bubbles white.

    A box is the work of one stage on the microbatch whose number it shows, if there is room. Where
    a device holds several stages, the later ones are paler. Several schedules share one time axis.

    Args:
        schedules: a `Schedule`, a `Timeline` (its own times), a `Program` (the times that
            `Program.timeline` predicts), or a list of (name, one of them) to compare.
        t_f: of a `Schedule`: the time of a forward of one microbatch through all stages of a
            device, which share it equally; so schedules with and without virtual stages do the
            same work.
        t_b: the time of the gradient of the inputs, likewise.
        t_w: the time of the gradient of the weights, likewise.
        t_comm: the time a value takes to another device.
        ax: the matplotlib axes to draw in; without it a figure of the right size is made.

    Returns:
        The `matplotlib.figure.Figure`, with one axes if it was made here.

    Raises:
        TypeError: it is none of them, times are given for what has its own, some are seconds and
            others have no unit, or ``ax`` is no axes.
        ScheduleError: the schedule cannot run, or a time is negative or not finite.
        ShardingError: the program has no pipeline.
        ImportError: matplotlib is not installed.

    >>> from pfx import schedules
    >>> figure = timeline(schedules.build("1f1b", stages=2, microbatches=2))
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['1f1b', 'makespan 9 · bubble 33.3% · activations of 2 microbatches']

    The pictures of Qi et al. 2023 (arXiv:2401.10241), figures 2 and 3, are drawn so.
    """
    where = "viz.timeline"
    runs = named_timelines(where, schedules, Times(t_f, t_b, t_w, t_comm))
    if ax is not None:
        if not hasattr(ax, "add_collection"):
            fix = "figure, ax = plt.subplots()"
            raise TypeError(message(f"{where}:", f"ax={ax!r:.60} is no matplotlib axes.", fix=fix))
        _draw(ax, runs)
        return ax.figure
    height = ROW * sum(HEAD + run.schedule.num_devices for _, run in runs)
    with fig.canvas(0.75 + WIDTH + 0.25, 0.35 + height + 0.45, where) as figure:
        _draw(fig.axes_at(figure, 0.75, 0.35, WIDTH, height), runs)
    return figure


def _end(run: Timeline) -> float:
    return max((row.end for row in run.computations()), default=0.0)


def _draw(ax: Any, runs: Sequence[tuple[str, Timeline]]) -> None:
    """Draw the runs one below the other in units of time across and of rows down."""
    tops, rows = [], 0.0
    for _, run in runs:
        tops.append(rows + HEAD)
        rows += HEAD + run.schedule.num_devices
    longest = max(_end(run) for _, run in runs) or 1.0
    ax.set_xlim(0, longest)
    ax.set_ylim(rows + 0.2, 0)
    for top, (name, run) in zip(tops, runs, strict=True):
        ax.text(0, top - 0.2, name, fontsize=8, fontweight="bold", va="bottom", parse_math=False)
        ax.text(
            longest,
            top - 0.2,
            _summary(run),
            fontsize=7.5,
            color=fig.MUTED,
            ha="right",
            va="bottom",
        )
        _add_boxes(ax, top, run)
        _add_numbers(ax, top, run)
    _add_legend(ax, [run for _, run in runs], rows)
    _finish(ax, [(top, run.schedule.num_devices) for top, (_, run) in zip(tops, runs, strict=True)])
    _label_time(ax, runs[0][1].unit)


def _summary(run: Timeline) -> str:
    """Write the costs: an activation is of one stage, so ``virtual`` of them are a microbatch's."""
    held = max(run.peak_activations, default=0) / max(run.schedule.virtual, 1)
    microbatches = "microbatch" if held == 1 else "microbatches"
    return (
        f"makespan {run.time_text(4)} · bubble {100 * run.bubble:.1f}% · "
        f"activations of {held:.3g} {microbatches}"
    )


def _add_boxes(ax: Any, top: float, run: Timeline) -> None:
    """Draw a lane for each device and a box for each computation, all boxes in one collection."""
    from matplotlib.collections import PolyCollection

    bars = run.computations()
    shades = _shades(run.schedule)
    ax.hlines(
        [top + device for device in range(run.schedule.num_devices + 1)],
        0,
        _end(run),
        color=fig.GREY,
        linewidth=0.4,
        zorder=0.5,
    )
    boxes = [_corners(bar, top) for bar in bars]
    colours = [_pale(KINDS[bar.action.kind][0], shades[bar.action.stage]) for bar in bars]
    ax.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.5),
        autolim=False,
    )


def _corners(bar: Row, top: float) -> list[tuple[float, float]]:
    upper = top + bar.device + (1 - BOX) / 2
    lower = upper + BOX
    return [(bar.start, upper), (bar.end, upper), (bar.end, lower), (bar.start, lower)]


def _shades(schedule: Schedule) -> list[float]:
    """For each stage how pale it is: 0 for the first of its device, ``PALEST`` for the last."""
    order = [schedule.place[:stage].count(device) for stage, device in enumerate(schedule.place)]
    return [PALEST * nth / max(schedule.virtual - 1, 1) for nth in order]


def _pale(colour: str, shade: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(part + (1 - part) * shade for part in to_rgb(colour))


def _add_numbers(ax: Any, top: float, run: Timeline) -> None:
    """Write the microbatches into the boxes that hold them, all of a schedule in one size."""
    across, down = _points(ax)
    digits = len(str(run.schedule.microbatches - 1))
    widths = sorted((bar.end - bar.start) * across for bar in run.computations())
    room = next((width for width in widths if width > 0), 0.0)
    size = min(FONT, 0.85 * BOX * down, max(_size(room, digits), SMALLEST))
    if size < SMALLEST:
        return
    for bar in run.computations():
        text = str(bar.action.microbatch)
        if _size((bar.end - bar.start) * across, len(text)) >= size:
            ax.text(
                (bar.start + bar.end) / 2,
                top + bar.device + 0.5,
                text,
                fontsize=size,
                ha="center",
                va="center_baseline",
                color=fig.INK,
            )


def _size(width: float, digits: int) -> float:
    """The largest font for so many digits, 0.64 of its size each, in a width, both in points."""
    return (width - 1.5) / (0.64 * digits)


def _points(ax: Any) -> tuple[float, float]:
    """Return how many points a unit of time and a row are."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    scale = 72 / ax.figure.dpi
    return ax.bbox.width * scale / (right - left), ax.bbox.height * scale / (bottom - top)


def _add_legend(ax: Any, runs: Sequence[Timeline], rows: float) -> None:
    from matplotlib.patches import Patch

    used = {row.action.kind for run in runs for row in run.computations()}
    entries = [(colour, text) for kind, (colour, text) in KINDS.items() if kind in used]
    if any(run.schedule.virtual > 1 for run in runs):
        grey = fig.EDGE
        entries += [(grey, "first"), (_pale(grey, PALEST), "last stage of a device")]
    ax.legend(
        handles=[Patch(facecolor=colour, label=text) for colour, text in entries],
        ncols=len(entries),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        handleheight=1,
        handletextpad=0.4,
        columnspacing=1.2,
        fontsize=7.5,
    )


def _finish(ax: Any, groups: Sequence[tuple[float, int]]) -> None:
    rows = [(top + device + 0.5, device) for top, count in groups for device in range(count)]
    ax.set_yticks([at for at, _ in rows], [f"device {device}" for _, device in rows])
    ax.tick_params(axis="y", length=0, labelsize=7, labelcolor=fig.INK)
    ax.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _label_time(ax: Any, unit: str) -> None:
    """Name the time's unit; seconds are written in milliseconds."""
    ax.set_xlabel("time (ms)" if unit else "time", fontsize=8)
    if unit:
        ax.xaxis.set_major_formatter(lambda seconds, _: f"{1000 * seconds:g}")
