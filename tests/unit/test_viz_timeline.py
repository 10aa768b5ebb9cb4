"""Pictures of pipeline schedules: each computation is a box at the simulator's time, none is lost."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pfx import schedules, viz
from pfx.schedules import Schedule, ScheduleError, Timeline
from pfx.viz.timeline import HEAD, KINDS

SIZES = [
    ("gpipe", 2, 3, 1),
    ("1f1b", 3, 4, 1),
    ("interleaved", 2, 3, 3),
    ("zb-h1", 4, 6, 1),
    ("zb-h2", 3, 12, 1),
    ("zb-v", 3, 5, 2),
    ("dualpipe-v", 2, 7, 2),
    ("forward", 4, 2, 1),
]
UNEVEN = {"t_f": 1.0, "t_b": 1.25, "t_w": 0.5, "t_comm": 0.125}

Box = tuple[float, float, float, tuple[float, ...]]  # start, end, row, colour


def build(name: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    return schedules.build(name, stages=stages, microbatches=microbatches, virtual=virtual)


def timed(schedule: Schedule) -> Timeline:
    """What `UNEVEN` means: the stages of a device share its times."""
    times = {name: UNEVEN[name] / schedule.virtual for name in ("t_f", "t_b", "t_w")}
    return schedules.simulate(schedule, **times, t_comm=UNEVEN["t_comm"])


def boxes(ax: Any) -> list[list[Box]]:
    """The boxes of each schedule, in drawing order."""
    groups = [c for c in ax.collections if len(c.get_facecolors())]  # the lanes are lines
    return [
        [
            _box(path.vertices, colour)
            for path, colour in zip(c.get_paths(), c.get_facecolors(), strict=True)
        ]
        for c in groups
    ]


def _box(corners: Any, colour: Any) -> Box:
    (start, top), (end, bottom) = np.min(corners, axis=0), np.max(corners, axis=0)
    assert 0 < bottom - top < 1
    return float(start), float(end), float((top + bottom) / 2), tuple(colour[:3])


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


# Boxes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), SIZES)
def test_each_computation_is_a_box_at_the_time_of_the_simulator(
    name: str, stages: int, microbatches: int, virtual: int
) -> None:
    schedule = build(name, stages, microbatches, virtual)
    rows = timed(schedule).computations()
    (drawn,) = boxes(viz.timeline(schedule, **UNEVEN).axes[0])
    assert [box[:2] for box in drawn] == [pytest.approx((row.start, row.end)) for row in rows]
    assert [box[2] - HEAD - 0.5 for box in drawn] == pytest.approx([row.device for row in rows])


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), SIZES)
def test_boxes_leave_the_bubble_white(
    name: str, stages: int, microbatches: int, virtual: int
) -> None:
    schedule = build(name, stages, microbatches, virtual)
    (drawn,) = boxes(viz.timeline(schedule, **UNEVEN).axes[0])
    per_row = {row: sorted(box[:2] for box in drawn if box[2] == row) for _, _, row, _ in drawn}
    for spans in per_row.values():
        gaps = [later[0] - earlier[1] for earlier, later in zip(spans, spans[1:], strict=False)]
        assert min(gaps, default=0) >= -1e-9, "boxes overlap"
    work = sum(end - start for start, end, _, _ in drawn)
    span = max(spans[-1][1] - spans[0][0] for spans in per_row.values())
    assert 1 - work / stages / span == pytest.approx(timed(schedule).bubble)


def test_communication_takes_no_box() -> None:
    plain = build("1f1b", 3, 4)
    explicit = plain.with_communication()
    pair = [boxes(viz.timeline(s, **UNEVEN).axes[0]) for s in (plain, explicit)]
    assert pair[0] == pair[1]


def test_a_kind_has_its_colour_and_the_legend_names_those_that_occur() -> None:
    ax = viz.timeline(build("dualpipe-v", 2, 7, 2)).axes[0]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    kinds = ["forward", "backward", "gradient of the input", "gradient of the weights"]
    assert legend == [*kinds, "first", "last stage of a device"]
    assert len({colour for colour, _ in KINDS.values()}) == 4
    ax = viz.timeline(build("zb-h1", 2, 3)).axes[0]
    rows = timed(build("zb-h1", 2, 3)).computations()
    for row, box in zip(rows, boxes(ax)[0], strict=True):
        assert box[3] == pytest.approx(to_rgb(KINDS[row.action.kind][0]))
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["forward", "gradient of the input", "gradient of the weights"]


def test_later_stages_of_a_device_are_paler() -> None:
    schedule = build("interleaved", 2, 3, 3)
    (drawn,) = boxes(viz.timeline(schedule).axes[0])
    by_stage: dict[int, set[tuple[float, ...]]] = {}
    for row, box in zip(timed(schedule).computations(), drawn, strict=True):
        if row.action.kind == "F":
            by_stage.setdefault(row.action.stage, set()).add(box[3])
    assert all(len(found) == 1 for found in by_stage.values())
    light = {stage: sum(next(iter(found))) for stage, found in by_stage.items()}
    assert light[0] == light[1] < light[2] == light[3] < light[4] == light[5] < 2.9


# Words -------------------------------------------------------------------------------------------


def test_a_box_shows_its_microbatch() -> None:
    schedule = build("1f1b", 3, 4)
    ax = viz.timeline(schedule).axes[0]
    numbers = {t.get_position(): t.get_text() for t in ax.texts if t.get_text().isdigit()}
    rows = schedules.simulate(schedule, t_f=1, t_b=1, t_w=1).computations()
    assert numbers == {
        ((row.start + row.end) / 2, HEAD + row.device + 0.5): str(row.action.microbatch)
        for row in rows
    }


def test_a_number_is_left_out_where_it_would_not_fit() -> None:
    """Of 1600 narrow boxes none has one; of wide and narrow boxes the wide ones have."""
    assert not any(t.isdigit() for t in texts(viz.timeline(build("gpipe", 4, 400)).axes[0]))
    ax = viz.timeline(build("1f1b", 2, 30), t_f=0.1, t_b=2).axes[0]
    shown = Counter(text for text in texts(ax) if text.isdigit())
    assert shown == {str(k): 2 for k in range(30)}


@pytest.mark.parametrize("microbatches", [8, 16, 120])
def test_numbers_lie_inside_their_boxes(microbatches: int) -> None:
    schedule = build("zb-v", 3, microbatches, 2)
    figure = viz.timeline(schedule)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ax = figure.axes[0]
    (drawn,) = boxes(ax)
    middles = {(round((start + end) / 2, 6), row): (start, end) for start, end, row, _ in drawn}
    numbers = [text for text in ax.texts if text.get_text().isdigit()]
    assert bool(numbers) == (microbatches < 100)
    for text in numbers:
        extent = text.get_window_extent(canvas.get_renderer())
        at, row = text.get_position()
        start, end = middles[round(at, 6), row]
        assert extent.x0 >= ax.transData.transform((start, row))[0]
        assert extent.x1 <= ax.transData.transform((end, row))[0]


def test_the_costs_are_written_next_to_the_name() -> None:
    ax = viz.timeline(build("interleaved", 2, 4, 2)).axes[0]
    run = schedules.simulate(build("interleaved", 2, 4, 2), t_f=0.5, t_b=0.5, t_w=0.5)
    held = max(run.peak_activations) / 2
    assert texts(ax)[:2] == [
        "interleaved",
        f"makespan {run.makespan:g} · bubble {100 * run.bubble:.1f}% · "
        f"activations of {held:g} microbatches",
    ]
    single = texts(viz.timeline(build("1f1b", 1, 1)).axes[0])
    assert single[:2] == ["1f1b", "makespan 3 · bubble 0.0% · activations of 1 microbatch"]


# Several schedules -------------------------------------------------------------------------------


def test_schedules_are_stacked_on_one_time_axis_and_do_the_same_work() -> None:
    pairs = [(name, build(name, 2, 4, v)) for name, v in (("1f1b", 1), ("interleaved", 2))]
    ax = viz.timeline(pairs, **UNEVEN).axes[0]
    one, two = boxes(ax)
    work = [sum(end - start for start, end, _, _ in group) for group in (one, two)]
    assert work[0] == pytest.approx(work[1])
    assert max(row for _, _, row, _ in one) + HEAD < min(row for _, _, row, _ in two)
    assert ax.get_xlim() == (0, max(end for _, end, _, _ in one + two))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["device 0", "device 1"] * 2
    assert [text for text in texts(ax) if text in ("1f1b", "interleaved")] == [p[0] for p in pairs]


def test_a_timeline_is_drawn_at_its_own_times_next_to_a_schedule() -> None:
    """As a measured run next to the predicted one."""
    schedule = build("1f1b", 2, 3)
    measured = schedules.simulate(schedule, t_f=[1, 2], t_b=[2, 1])
    runs = [("predicted", schedule), ("measured", measured)]
    predicted, drawn = boxes(viz.timeline(runs, t_f=3).axes[0])
    rows = measured.computations()
    assert [box[:2] for box in drawn] == [(row.start, row.end) for row in rows]
    assert predicted[0][:2] == (0, 3)


def test_an_axes_given_is_drawn_in() -> None:
    mine = Figure(figsize=(4, 2))
    left, right = mine.subplots(1, 2)
    assert viz.timeline(build("1f1b", 2, 3), ax=right) is mine
    assert len(boxes(right)[0]) == 12
    assert not left.texts and len(mine.axes) == 2


# Text --------------------------------------------------------------------------------------------


def test_text_of_one_schedule_is_the_grid_of_the_simulator() -> None:
    schedule = build("1f1b", 3, 4)
    assert viz.timeline_text(schedule, **UNEVEN) == timed(schedule).text()
    assert viz.timeline_text(timed(schedule), width=40) == timed(schedule).text(width=40)


def test_text_of_several_schedules_has_one_scale() -> None:
    """Squeezed to 60 characters, the shorter run is shorter by the ratio of their times."""
    runs = [(name, build(name, 4, 8)) for name in ("1f1b", "zb-h1")]
    first, second = viz.timeline_text(runs, width=66).split("\n\n")
    assert first.splitlines()[0] == "1f1b" and second.splitlines()[0] == "zb-h1"
    lengths = [max(len(line) for line in grid.splitlines()[1:-1]) for grid in (first, second)]
    assert lengths == pytest.approx([10 + 33 * 2, 10 + 27 * 2], abs=1)
    assert first.endswith("makespan 33, bubble 27.3%")
    assert second.endswith("makespan 27, bubble 11.1%")


# Chrome trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), SIZES)
def test_a_trace_has_every_action_once(
    name: str, stages: int, microbatches: int, virtual: int
) -> None:
    schedule = build(name, stages, microbatches, virtual).with_communication()
    events = json.loads(viz.chrome_trace(schedule, **UNEVEN, scale=1000))["traceEvents"]
    found = {
        (e["tid"], e["name"]): (e["ts"], e["ts"] + e.get("dur", 0))
        for e in events
        if e["ph"] in "Xi"
    }
    rows = timed(schedule).rows()
    assert len([e for e in events if e["ph"] in "Xi"]) == len(rows) == len(found)
    for row in rows:
        times = pytest.approx((1000 * row.start, 1000 * row.end))
        assert found[row.device, str(row.action)] == times
    assert {e["name"] for e in events if e["ph"] == "X"} == {
        str(action) for _, action in schedule.computations().actions()
    }


def test_the_events_of_a_trace() -> None:
    schedule = build("forward", 2, 1).with_communication()
    trace = json.loads(viz.chrome_trace([("a", schedule), ('b "é"', schedule)], t_f=5, t_comm=2))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1}
    second = [e for e in trace["traceEvents"] if e["pid"] == 1]
    meta = [(e["name"], e["tid"], e["args"]) for e in second if e["ph"] == "M"]
    assert meta == [
        ("process_name", 0, {"name": 'b "é" (bubble 0.0%)'}),
        ("process_sort_index", 0, {"sort_index": 1}),
        ("thread_name", 0, {"name": "device 0"}),
        ("thread_sort_index", 0, {"sort_index": 0}),
        ("thread_name", 1, {"name": "device 1"}),
        ("thread_sort_index", 1, {"sort_index": 1}),
    ]
    args = {"stage": 1, "kind": "F", "microbatch": 0}
    last = {"name": "1F0", "cat": "forward", "pid": 1, "tid": 1, "args": args}
    assert second[-1] == last | {"ph": "X", "ts": 7, "dur": 5}
    receive = {"name": "1RECV_F0", "cat": "communication", "ph": "i", "s": "t", "ts": 7}
    assert second[-2] == second[-2] | receive and "dur" not in second[-2]


def test_a_trace_is_written_to_a_path_as_it_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    text = viz.chrome_trace(build("1f1b", 2, 3), path)
    assert path.read_text(encoding="utf-8") == text
    assert viz.chrome_trace(build("1f1b", 2, 3), str(path)) == text


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), "ms"])
def test_a_scale_that_is_none(scale: Any) -> None:
    with pytest.raises(ValueError) as caught:
        viz.chrome_trace(build("1f1b", 2, 3), scale=scale)
    assert str(caught.value) == (
        f"viz.chrome_trace: scale={scale!r} is no positive number.\n"
        "  fix: scale=1e6 for times in seconds"
    )


# Misuse ------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., Any]] = {
    "timeline": viz.timeline,
    "timeline_text": viz.timeline_text,
    "chrome_trace": viz.chrome_trace,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("runs", [[], "1f1b", None, [("a", 1)], [build("1f1b", 2, 2)]], ids=repr)
def test_what_is_no_schedule(name: str, runs: Any) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[name](runs)
    build_one = '("1F1B", schedules.build("1f1b", stages=4, microbatches=8))'
    assert str(caught.value).splitlines() == [
        f"viz.{name}: needs a Schedule, a Timeline or a Program, or a list of (name, one of them).",
        f"  got: {runs!r:.60}",
        f"  fix: viz.{name}([{build_one}])",
    ]


@pytest.mark.parametrize("name", CALLS)
def test_times_for_what_has_its_own(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[name](timed(build("1f1b", 2, 2)), t_f=2, t_comm=1)
    assert str(caught.value).splitlines() == [
        f"viz.{name}: got times for a Timeline, which has its own.",
        "  got: t_f=2, t_comm=1",
        "  fix: pass them to schedules.simulate, or pass the Schedule",
    ]


@pytest.mark.parametrize("name", CALLS)
def test_times_of_each_stage_need_a_timeline(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[name](build("1f1b", 2, 2), t_b=[1, 2])
    assert str(caught.value).splitlines() == [
        f"viz.{name}: t_b must be a number.",
        "  got: [1, 2]",
        "  fix: for a time for each stage, pass schedules.simulate(schedule, ...)",
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_schedule_that_cannot_run_or_times_that_cannot_be(name: str) -> None:
    backward_first = schedules.parse("0B0 0F0")
    with pytest.raises(ScheduleError):
        CALLS[name](backward_first)
    with pytest.raises(ScheduleError, match="t_w"):
        CALLS[name](build("1f1b", 2, 2), t_w=-1)


def test_an_axes_that_is_none() -> None:
    with pytest.raises(TypeError) as caught:
        viz.timeline(build("1f1b", 2, 2), ax=3)
    assert str(caught.value) == (
        "viz.timeline: ax=3 is no matplotlib axes.\n  fix: figure, ax = plt.subplots()"
    )


@pytest.mark.parametrize("draw", [viz.timeline, viz.timeline_text, viz.chrome_trace])
def test_work_that_takes_no_time_is_drawn_all_the_same(draw: Callable[..., Any]) -> None:
    assert draw(build("zb-h1", 2, 2), t_f=0, t_b=0, t_w=0)
    assert draw(build("zb-h1", 2, 2), t_w=0)


# One look ----------------------------------------------------------------------------------------


def all_kinds() -> Figure:
    runs = [(r"$\no_math$", build("dualpipe-v", 2, 7, 2)), ("1f1b", build("1f1b", 12, 12))]
    return viz.timeline(runs)


def test_without_matplotlib_the_figure_says_what_to_install_and_text_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        all_kinds()
    assert str(caught.value) == (
        "viz.timeline: draws with matplotlib, which is not installed.\n"
        "  fix: pip install 'pfx[viz]'"
    )
    assert viz.timeline_text(build("1f1b", 2, 2)).startswith("device 0: 0F0")
    assert json.loads(viz.chrome_trace(build("1f1b", 2, 2)))


def test_a_figure_is_the_same_every_time_and_leaves_nothing_behind() -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    def pixels() -> bytes:
        canvas = FigureCanvasAgg(all_kinds())
        canvas.draw()
        return bytes(canvas.buffer_rgba())

    first = pixels()
    with matplotlib.rc_context({"font.size": 20, "font.family": "serif"}):
        assert pixels() == first
    assert plt.get_fignums() == []


def test_no_text_of_a_figure_is_cut_off() -> None:
    figure = all_kinds()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ax = figure.axes[0]
    words = [*ax.texts, *ax.get_legend().get_texts(), ax.xaxis.label]
    for text in [*words, *ax.get_yticklabels(), *ax.get_xticklabels()]:
        extent = text.get_window_extent(canvas.get_renderer())
        assert extent.x0 >= 0 and extent.y0 >= 0, text
        assert extent.x1 <= figure.bbox.x1 and extent.y1 <= figure.bbox.y1, text
