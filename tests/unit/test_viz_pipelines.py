"""Timelines of programs: predicted from the work of each stage, measured by running it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
from pfx import P, schedules, viz
from pfx.compiler.program import Program
from pfx.compiler.work import work_of_phase
from pfx.errors import ShardingError
from pfx.mesh import Deal
from pfx.schedules import Timeline

ROWS, DIM, LAYERS, MICROBATCHES = 3, 8, 4, 5
MESH = pfx.make_mesh(pp=2)
XS, WS = torch.ones(MICROBATCHES, ROWS, DIM), torch.ones(LAYERS, DIM, DIM) / DIM
DRAW = [viz.timeline, viz.timeline_text, viz.chrome_trace]


def layer(h: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.tanh(h @ w), None


def gradients(ws: torch.Tensor, xs: torch.Tensor) -> Any:
    """A loss of a stack of layers and its gradient, summed over microbatches."""

    def add(total: Any, x: torch.Tensor) -> Any:
        loss = lambda ws: pfx.scan(layer, x, ws)[0].square().sum()
        return pfx.tree.map(torch.add, total, pfx.value_and_grad(loss)(ws)), None

    return pfx.scan(add, (xs.new_zeros(()), torch.zeros_like(ws)), xs)[0]


def piped(mesh: pfx.Mesh = MESH, **options: Any) -> Any:
    return pfx.jit(
        gradients, mesh=mesh, in_specs=(P("pp"), P()), out_specs=(P(), P("pp")), **options
    )


def lowered(mesh: pfx.Mesh = MESH, **options: Any) -> Program:
    return piped(mesh, **options).lower(WS, XS)


def plain() -> Program:
    return pfx.jit(torch.matmul, mesh=MESH).lower(torch.ones(2, 2), torch.ones(2, 2))


def seconds(timeline: Timeline) -> dict[str, float]:
    return {str(row.action): row.end - row.start for row in timeline.computations()}


# Predicted ---------------------------------------------------------------------------------------


def test_a_program_gives_its_pipelines() -> None:
    program = lowered()
    (pipeline,) = program.pipelines()
    assert program.pipeline() is pipeline
    assert [(stage.start, stage.stop) for stage in pipeline.stages] == [(0, 2), (2, 4)]
    assert plain().pipelines() == []


def test_the_work_of_a_stage_is_that_of_its_layers() -> None:
    """A product a layer forwards, two backwards."""
    product = 2 * ROWS * DIM * DIM
    mesh = pfx.make_mesh(pp=2, deals={"pp": Deal((0, 1), (3, 1))})
    flops: dict[tuple[int, str], int] = {}
    for name in ("1f1b", "zb-h1"):
        pipeline = lowered(mesh, schedule=name).pipeline()
        for number, stage in enumerate(pipeline.stages):
            for kind, phase in stage.phases.items():
                flops[number, kind] = work_of_phase(pipeline, phase).flops // product
    assert flops == {
        (0, "F"): 3,
        (0, "B"): 6,
        (0, "I"): 3,
        (0, "W"): 3,
        (1, "F"): 1,
        (1, "B"): 2,
        (1, "I"): 1,
        (1, "W"): 1,
    }


def test_a_longer_stage_takes_longer() -> None:
    mesh = pfx.make_mesh(pp=2, deals={"pp": Deal((0, 1), (3, 1))})
    timeline = lowered(mesh).timeline(flops=1.0, bytes=math.inf, call=0.0, t_comm=7.0)
    found = seconds(timeline)
    assert timeline.unit == "s"
    for k in range(MICROBATCHES):
        assert found[f"0F{k}"] == 3 * found[f"1F{k}"] == 3 * 2 * ROWS * DIM * DIM
    starts = {str(row.action): row.start for row in timeline.rows()}
    assert starts["1F0"] == found["0F0"] + 7.0


def test_each_rate_is_used() -> None:
    program = lowered()
    pipeline = program.pipeline()
    work = work_of_phase(pipeline, pipeline.stages[1].phases["F"])
    assert min(work.flops, work.bytes, work.calls) > 0
    for rates, expected in (
        ({"flops": 2.0, "bytes": math.inf, "call": 0.0}, work.flops / 2),
        ({"flops": math.inf, "bytes": 4.0, "call": 0.0}, work.bytes / 4),
        ({"flops": math.inf, "bytes": math.inf, "call": 3.0}, work.calls * 3),
    ):
        assert seconds(program.timeline(**rates))["1F0"] == pytest.approx(expected)


def test_work_is_that_of_one_device() -> None:
    """Split over dp, a device has half of the rows."""
    mesh = pfx.make_mesh(pp=2, dp=2)
    xs = torch.ones(MICROBATCHES, 2 * ROWS, DIM)
    specs = P("pp"), P(None, "dp")
    step = pfx.jit(gradients, mesh=mesh, in_specs=specs, out_specs=(P(), P("pp")))
    pipeline = step.lower(WS, xs).pipeline()
    alone = lowered().pipeline()
    for stage, other in zip(pipeline.stages, alone.stages, strict=True):
        works = [work_of_phase(p, s.phases["F"]) for p, s in ((pipeline, stage), (alone, other))]
        assert works[0].flops == works[1].flops == 2 * 2 * ROWS * DIM * DIM


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_pictures_of_a_program_have_its_predicted_times(name: str) -> None:
    program = lowered(schedule=name)
    timeline = program.timeline()
    assert timeline.schedule == schedules.build(name, stages=2, microbatches=MICROBATCHES)
    assert viz.timeline_text(program) == timeline.text()
    assert viz.chrome_trace(program) == viz.chrome_trace([(name, timeline)], scale=1e6)
    assert viz.timeline_text(program, t_comm=1.0) == program.timeline(t_comm=1.0).text()
    ax = viz.timeline(program).axes[0]
    words = [text.get_text() for text in ax.texts]
    assert words[0] == name and words[1].startswith(f"makespan {timeline.time_text(4)} · ")
    assert ax.get_xlabel() == "time (ms)"
    assert ax.get_xlim() == (0, max(row.end for row in timeline.rows()))


def test_ticks_of_seconds_are_milliseconds() -> None:
    ax = viz.timeline(lowered().timeline(flops=1e6)).axes[0]
    ax.figure.canvas.draw()
    at = [label.get_position()[0] for label in ax.get_xticklabels()]
    assert [float(label.get_text()) for label in ax.get_xticklabels()] == pytest.approx(
        [1000 * x for x in at]
    )


def test_an_evaluation_has_forwards_alone() -> None:
    def evaluate(ws: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        add = lambda total, x: (total + pfx.scan(layer, x, ws)[0].sum(), None)
        return pfx.scan(add, xs.new_zeros(()), xs)[0]

    program = pfx.jit(evaluate, mesh=MESH, in_specs=(P("pp"), P())).lower(WS, XS)
    kinds = {row.action.kind for row in program.timeline().computations()}
    assert kinds == {"F"}


# Measured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_timed_run_returns_what_a_run_does_and_each_action_once(name: str, check: bool) -> None:
    step = piped(schedule=name, check=check, seed=3)
    out, timeline = step.timed(WS, XS)
    for a, b in zip(pfx.device_get(out), pfx.device_get(step(WS, XS)), strict=True):
        assert torch.equal(a, b)
    assert timeline.schedule == schedules.build(name, stages=2, microbatches=MICROBATCHES)
    found = {row.action: row.end - row.start for row in timeline.rows()}
    assert min(found.values()) > 0 and timeline.unit == "s"
    again = schedules.simulate(timeline.schedule, times=found, unit="s")
    assert again.makespan == pytest.approx(timeline.makespan)


def test_predicted_and_measured_in_one_trace() -> None:
    program, (_, measured) = lowered(), piped().timed(WS, XS)
    runs = [("predicted", program), ("measured", measured)]
    events = json.loads(viz.chrome_trace(runs))["traceEvents"]
    names = [e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    for pid, run in enumerate((program.timeline(), measured)):
        boxes = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
        assert [e["name"] for e in boxes] == [str(row.action) for row in run.rows()]
        expected = [(1e6 * row.start, 1e6 * (row.end - row.start)) for row in run.rows()]
        assert [(e["ts"], e["dur"]) for e in boxes] == [pytest.approx(pair) for pair in expected]
    assert viz.timeline_text(runs).startswith("predicted\ndevice 0: ")


def test_a_timed_step_of_training() -> None:
    def loss(params: torch.Tensor, batch: torch.Tensor, key: Any) -> Any:
        return pfx.scan(layer, batch, params)[0].square().sum(), batch.new_ones(()), {}

    train = pfx.make_train_step(
        loss, pfx.optim.sgd(0.1), pfx.Plan(pp=2, microbatches=2),
        init=lambda key: torch.ones(LAYERS, DIM, DIM), axes="layers embed mlp",
    )  # fmt: skip
    batch, key = torch.ones(4, DIM), pfx.random.key(0)
    (state, metrics), timeline = train.timed(train.init(key), batch)
    other, _ = train.step(train.init(key), batch)
    assert torch.equal(pfx.device_get(state.params), pfx.device_get(other.params))
    assert "loss" in metrics and timeline.schedule == train.plan.pipeline


# Misuse ------------------------------------------------------------------------------------------

NONE = (
    "program: has no pipeline.\n  mesh: pp=2\n"
    '  fix: Plan(pp=2, microbatches=4), or P("pp") on the layers of a scan inside a scan over '
    "microbatches"
)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda draw=draw: draw(plain()) for draw in DRAW),
        lambda: plain().timeline(),
        lambda: pfx.jit(torch.matmul, mesh=MESH).timed(torch.ones(2, 2), torch.ones(2, 2)),
    ],
)
def test_a_program_without_a_pipeline(call: Callable[[], Any]) -> None:
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == NONE


def test_a_pipeline_that_is_not_there() -> None:
    with pytest.raises(ShardingError, match=r"has no pipeline 1\."):
        lowered().timeline(pipeline=1)


def twice(ws: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    return gradients(ws, xs)[1] + gradients(ws, xs + 1)[1]


def test_of_two_pipelines_both_are_drawn_and_none_is_timed() -> None:
    step = pfx.jit(twice, mesh=MESH, in_specs=(P("pp"), P()), out_specs=P("pp"))
    program = step.lower(WS, XS)
    assert len(program.pipelines()) == 2
    heads = [line for line in viz.timeline_text([("a", program)]).split("\n") if "pipe" in line]
    assert heads == ["a, pipeline 0", "a, pipeline 1"]
    assert viz.timeline_text(program).startswith("1f1b, pipeline 0\n")
    with pytest.raises(ShardingError, match="has 2 pipelines"):
        step.timed(WS, XS)


@pytest.mark.parametrize("draw", DRAW)
def test_times_for_a_program(draw: Callable[..., Any]) -> None:
    with pytest.raises(TypeError) as caught:
        draw(lowered(), t_f=2.0)
    assert str(caught.value).startswith(
        f"viz.{draw.__name__}: got times for a Program, which has its own.\n  got: t_f=2.0\n"
    )


@pytest.mark.parametrize("draw", DRAW)
def test_seconds_next_to_times_without_a_unit(draw: Callable[..., Any]) -> None:
    schedule = schedules.build("1f1b", stages=2, microbatches=2)
    with pytest.raises(TypeError) as caught:
        draw([("model", lowered()), ("by hand", schedule)])
    assert str(caught.value).splitlines() == [
        f"viz.{draw.__name__}: got times in seconds and times without a unit.",
        "  'by hand' has none",
        '  fix: schedules.simulate(schedule, ..., unit="s") for times that are seconds',
    ]
    timed = schedules.simulate(schedule, t_f=0.1, t_b=0.1, unit="s")
    assert draw([("model", lowered()), ("by hand", timed)])


# What devices send and hold ----------------------------------------------------------------------


def test_sends_are_counted_for_the_device_that_has_most() -> None:
    """Of four stages the middle ones send an activation and a gradient for each microbatch."""
    program = lowered(pfx.make_mesh(pp=4))
    size = 4 * ROWS * DIM
    each = f"{viz.units.bytes_text(MICROBATCHES * size)}"
    both = f"{viz.units.bytes_text(2 * MICROBATCHES * size)}"
    lines = viz.collectives_text(program).splitlines()
    sends = [line.split() for line in lines if line.startswith("send")]
    assert [line[1:3] for line in sends] == [["pp", str(MICROBATCHES)]] * 2
    assert all(each in " ".join(line) for line in sends)
    assert f"{2 * MICROBATCHES} · {both}" in viz.collectives_text([("a", program)])
    others = [c for c in program.collectives() if c.device is None]
    count = 2 * MICROBATCHES + sum(c.count for c in others)
    assert lines[-1].startswith(f"{count} collectives in ")
    ax = viz.collectives(program).axes[0]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "send" in legend


def test_layers_that_are_dealt() -> None:
    mesh = pfx.make_mesh(pp=2, dp=2, deals={"pp": Deal((0, 1, 1, 0))})
    text = """
f32[6/pp, 4] on pp=2 dp=2: 4 blocks, each on 2 devices (copies along dp)
dim 0 down, dim 1 across
  0     4
0 ┌─────┐
  │ 0 1 │
2 ├─────┤
  │ 2 3 │
4 ├─────┤
  │ 2 3 │
5 ├─────┤
  │ 0 1 │
6 └─────┘"""
    array = pfx.device_put(torch.zeros(6, 4), mesh, P("pp"))
    assert viz.placement_text(array) == text.strip()
    grid = viz.placement(array).axes[0]
    assert [patch.get_height() for patch in grid.patches] == [2, 2, 1, 1]


def test_a_device_with_two_stages_has_two_parts() -> None:
    mesh = pfx.make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))})
    drawn = viz.devices(pfx.device_put(torch.zeros(6, 4), mesh, P("pp")))
    parts = []
    for axes in drawn.axes:
        _, *filled, _ = [patch for patch in axes.patches if patch.get_facecolor()[3] or True]
        parts.append([patch.get_facecolor() for patch in filled])
        heights = [patch.get_height() for patch in filled]
        assert heights[0] == pytest.approx(2 * heights[1])
    assert len({*parts[0], *parts[1]}) == 4


def test_empty_stages_have_no_block() -> None:
    mesh = pfx.make_mesh(pp=2, deals={"pp": Deal((0, 1, 0, 1), (2, 1, 0, 0))})
    assert "2 blocks, each on 1 device" in viz.placement_text((3,), P("pp"), mesh)
