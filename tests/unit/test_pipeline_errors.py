"""What users are told of pipelines that cannot be, and of loops that are none: texts in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import pfx
from pfx import P, Plan
from pfx.errors import PfxError, ShardingError
from pfx.mesh import make_mesh
from pfx.schedules import ScheduleError, build, parse

F64 = torch.float64
MESH = make_mesh("simulated", pp=2)


def told(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, PfxError)
    return str(caught.value)


# Plans ---------------------------------------------------------------------------------------------

SHARDING: Mapping[str, tuple[dict[str, Any], str]] = {
    "no devices": ({"pp": 0}, "Plan: pp=0 must be an integer of at least 1."),
    "half a device": ({"pp": 1.5}, "Plan: pp=1.5 must be an integer of at least 1."),
    "a flag": ({"pp": True}, "Plan: pp=True must be an integer of at least 1."),
    "no microbatch": (
        {"pp": 2, "microbatches": 0},
        "Plan: microbatches=0 must be an integer of at least 1.",
    ),
    "an axis that is there": (
        {"pp": 2, "axes": {"pp": 4}},
        "Plan: axes['pp'] is an axis of every plan.\n  fix: Plan(pp=4)",
    ),
    "a schedule for other microbatches": (
        {"pp": 2, "microbatches": 4, "schedule": build("1f1b", stages=2, microbatches=8)},
        """\
Plan: schedule '1f1b' is for another pipeline.
  schedule: 2 devices, 2 stages, 8 microbatches
  plan: pp=2, virtual=1, microbatches=4
  fix: Plan(pp=2, microbatches=8, virtual=1)""",
    ),
    "a schedule for other devices": (
        {"pp": 2, "microbatches": 4, "schedule": build("zb-v", stages=4, microbatches=4, virtual=2)},
        """\
Plan: schedule 'zb-v' is for another pipeline.
  schedule: 4 devices, 8 stages, 4 microbatches
  plan: pp=2, virtual=2, microbatches=4
  fix: Plan(pp=4, microbatches=4, virtual=2)""",
    ),
    "too many numbers of layers": (
        {"pp": 2, "stage_layers": (1, 2, 3)},
        """\
Plan: stage_layers=(1, 2, 3) does not say how many layers each stage has; stages: 2
  fix: a tuple with a number of at least 0 for each stage, in order""",
    ),
    "a number for each device, not each stage": (
        {"pp": 2, "schedule": "zb-v", "stage_layers": (3, 3)},
        """\
Plan: stage_layers=(3, 3) does not say how many layers each stage has; stages: 4
  fix: a tuple with a number of at least 0 for each stage, in order""",
    ),
    "no number for each stage": (
        {"pp": 2, "stage_layers": 3},
        """\
Plan: stage_layers=3 does not say how many layers each stage has; stages: 2
  fix: a tuple with a number of at least 0 for each stage, in order""",
    ),
    "half a layer": (
        {"pp": 2, "stage_layers": (1.5, 2)},
        """\
Plan: stage_layers=(1.5, 2) does not say how many layers each stage has; stages: 2
  fix: a tuple with a number of at least 0 for each stage, in order""",
    ),
    "no stage on a device": (
        {"pp": 2, "schedule": "interleaved", "virtual": 0},
        "Plan: virtual=0 must be an integer of at least 1, or None.",
    ),
    "a schedule with other stages": (
        {"pp": 2, "microbatches": 4, "virtual": 1,
         "schedule": build("zb-v", stages=2, microbatches=4, virtual=2)},
        """\
Plan: schedule 'zb-v' is for another pipeline.
  schedule: 2 devices, 4 stages, 4 microbatches
  plan: pp=2, virtual=1, microbatches=4
  fix: Plan(pp=2, microbatches=4, virtual=2)""",
    ),
    "a negative number of layers": (
        {"pp": 2, "stage_layers": (5, -1)},
        """\
Plan: stage_layers=(5, -1) does not say how many layers each stage has; stages: 2
  fix: a tuple with a number of at least 0 for each stage, in order""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDING)
def test_plans(name: str) -> None:
    arguments, text = SHARDING[name]
    assert told(ShardingError, lambda: Plan(**arguments)) == text


SCHEDULES: Mapping[str, tuple[dict[str, Any], str]] = {
    "an unknown name": (
        {"pp": 2, "schedule": "2f2b"},
        """\
schedules.build('2f2b') is no schedule.
  fix: name one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, forward.""",
    ),
    "an unknown name, without a pipeline": (
        {"schedule": "2f2b"},
        """\
schedules.build('2f2b') is no schedule.
  fix: name one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, forward.""",
    ),
    "stages that the schedule has not": (
        {"pp": 2, "microbatches": 4, "virtual": 2},
        """\
schedules.build('1f1b') has virtual=1 (stages per device), not virtual=2.
  stages=2 microbatches=4 virtual=2
  fix: pass virtual=1, or a schedule that has virtual=2: interleaved, zb-v, dualpipe-v, forward.""",
    ),
    "too many stages for a V": (
        {"pp": 2, "virtual": 3, "schedule": "zb-v"},
        """\
schedules.build('zb-v') has virtual=2 (stages per device), not virtual=3.
  stages=2 microbatches=1 virtual=3
  fix: pass virtual=2, or a schedule that has virtual=3: interleaved, forward.""",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_without_a_schedule(name: str) -> None:
    arguments, text = SCHEDULES[name]
    assert told(ScheduleError, lambda: Plan(**arguments)) == text


def test_stage_layers_of_another_model() -> None:
    """Three layers are planned for, the model has four: not four in other stages."""
    train = pfx.make_train_step(
        lambda params, batch, key: (training(params, batch), torch.ones(()), {}),
        pfx.optim.sgd(0.1), Plan(pp=2, microbatches=2, stage_layers=(1, 2)),
        init=lambda key: torch.zeros(4, 3, 3), axes="layers embed mlp",
    )  # fmt: skip
    text = told(ShardingError, lambda: train.lower(pfx.ShapeDtype((4, 3), torch.float32)))
    assert (
        text
        == """\
Plan: stage_layers=(1, 2) do not hold the 4 layers of the model.
  1 + 2 = 3; params has 4 layers
  fix: numbers whose sum is 4, or None for equal ones"""
    )


# jit: the schedule and what it is to run --------------------------------------------------------------


def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.tanh(x @ w), None


def training(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The loss of a microbatch."""
    return pfx.scan(layer, x, w)[0].square().sum()


def gradients(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    add = lambda total, x: (total + torch.func.grad(training)(w, x), None)
    return pfx.scan(add, torch.zeros_like(w), xs)[0]


def arguments(microbatches: int = 3) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = (4, 3, 3), (3, 3), (microbatches, 2, 3)
    w, h, xs = (torch.randn(*s, generator=draw, dtype=F64) for s in shapes)
    return w, h, xs


def compiled(fn: Any, **options: Any) -> pfx.api.Jitted:
    return pfx.jit(fn, mesh=MESH, in_specs=(P("pp"), P(), P()), **options)


def of_jit(schedule: Any) -> str:
    """What is told of a schedule for three microbatches on two devices."""
    return told(PfxError, lambda: compiled(gradients, schedule=schedule).lower(*arguments()))


JIT: Mapping[str, tuple[Any, str]] = {
    "an unknown name": (
        "zb-h3",
        """\
schedules.build('zb-h3') is no schedule.
  fix: name one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, forward.""",
    ),
    "a name with more stages than the mesh": (
        "zb-v",
        """\
jit(gradients): schedule 'zb-v' puts the stages on other devices than the mesh puts the layers.
  schedule: stages on devices (0, 1, 1, 0)
  mesh: pp=2, stages on devices (0, 1)
  fix: make_mesh(..., deals={"pp": Deal((0, 1, 1, 0))})""",
    ),
    "other microbatches": (
        build("gpipe", stages=2, microbatches=4),
        """\
jit(gradients): schedule 'gpipe' is for another pipeline.
  schedule: 2 devices, 4 microbatches
  pipeline: pp=2, 3 microbatches
  fix: schedules.build(..., stages=2, microbatches=3)""",
    ),
    "other devices": (
        build("gpipe", stages=4, microbatches=3),
        """\
jit(gradients): schedule 'gpipe' is for another pipeline.
  schedule: 4 devices, 3 microbatches
  pipeline: pp=2, 3 microbatches
  fix: schedules.build(..., stages=2, microbatches=3)""",
    ),
    "other places": (
        build("zb-v", stages=2, microbatches=3, virtual=2),
        """\
jit(gradients): schedule 'zb-v' puts the stages on other devices than the mesh puts the layers.
  schedule: stages on devices (0, 1, 1, 0)
  mesh: pp=2, stages on devices (0, 1)
  fix: make_mesh(..., deals={"pp": Deal((0, 1, 1, 0))})""",
    ),
    "forward only": (
        "forward",
        """\
jit(gradients): schedule 'forward' has no backward pass, the function has.
  fix: a schedule with B, or with I and W, for every F""",
    ),
    "backward before forward": (
        parse("0F0 0B0 0F1 0B1 0F2 0B2\n1B0 1F0 1F1 1B1 1F2 1B2", name="mine"),
        """\
schedule 'mine': 1B0 before 1F0 on device 1.
  1B0 needs 1F0
  fix: move 1F0 before 1B0""",
    ),
    "each waits for the other": (
        parse("0F0 0B0 0F1 0B1 0F2 0B2\n1F1 1B1 1F0 1B0 1F2 1B2", name="mine"),
        """\
schedule 'mine': no runnable action.
  device 0: 0B0 waits for 1B0
  device 1: 1F1 waits for 0F1
  fix: move what a device waits for before what the other device waits for""",
    ),
    "a microbatch is left out": (
        parse("0F0 0B0 0F2 0B2\n1F0 1B0 1F2 1B2", name="mine"),
        """\
schedule 'mine': 0F1 is missing.
  fix: add 0F1, or drop its microbatch""",
    ),
}


@pytest.mark.parametrize("name", JIT)
def test_schedules_of_jit(name: str) -> None:
    schedule, text = JIT[name]
    assert of_jit(schedule) == text


# Loops that are no pipelines: a line in the report, and right results ---------------------------------

ZERO = torch.zeros((), dtype=F64)


def a_running_mean(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    step = lambda mean, x: (0.9 * mean + pfx.scan(layer, x, w)[0].sum(), None)
    return pfx.scan(step, ZERO, xs)[0]


def a_recurrence(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    step = lambda state, x: (state + pfx.scan(layer, x + state, w)[0], None)
    return pfx.scan(step, torch.zeros_like(xs[0]), xs)[0]


def a_weight_by_position(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    def step(carry: Any, x: torch.Tensor) -> Any:
        total, count = carry
        return (total + count * pfx.scan(layer, x, w)[0].sum(), count + 1), None

    return pfx.scan(step, (ZERO, torch.zeros((), dtype=torch.int64)), xs)[0]


def a_wider_sum(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    step = lambda total, x: (total + pfx.scan(layer, x, w)[0].sum(), None)
    return pfx.scan(step, torch.zeros(3, dtype=F64), xs)[0]


def two_scans(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    twice = lambda x: pfx.scan(layer, pfx.scan(layer, x, w)[0], w)[0]
    return pfx.scan(lambda total, x: (total + twice(x).sum(), None), ZERO, xs)[0]


def three_scans(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = pfx.scan(layer, x, w)[0]
        return total + x.sum(), None

    return pfx.scan(step, ZERO, xs)[0]


def from_the_last_layer(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    step = lambda total, x: (total + pfx.scan(layer, x @ h, w, reverse=True)[0].sum(), None)
    return pfx.scan(step, ZERO, xs)[0]


def gradient_from_the_last_layer(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    loss = lambda w, x: pfx.scan(layer, x @ h, w, reverse=True)[0].square().sum()
    add = lambda total, x: (total + torch.func.grad(loss)(w, x), None)
    return pfx.scan(add, torch.zeros_like(w), xs)[0]


def clipped_in_each_microbatch(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        grad = torch.func.grad(training)(w, x)
        return total + grad / grad.square().sum().sqrt(), None

    return pfx.scan(step, torch.zeros_like(w), xs)[0]


def all_layers_of_all_microbatches(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    step = lambda carry, x: (carry, torch.func.grad(training)(w, x))
    return pfx.scan(step, None, xs)[1]


def both_ends_multiplied(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    loss = lambda h, x: pfx.scan(layer, x @ h, w)[0].square().sum()

    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        grad, value = torch.func.grad_and_value(loss)(h, x)
        return total + grad * value, None

    return pfx.scan(step, torch.zeros_like(h), xs)[0]


def gradient_around_the_microbatches(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    def loss(w: torch.Tensor) -> torch.Tensor:
        add = lambda total, x: (total + training(w, x), None)
        return pfx.scan(add, ZERO, xs)[0]

    return torch.func.grad(loss)(w)


def scaled_by_all_layers(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> Any:
    step = lambda total, x: (total + pfx.scan(layer, x, w * w.sum())[0].sum(), None)
    return pfx.scan(step, ZERO, xs)[0]


DEPENDS = "a microbatch reads what the one before made, so they cannot overlap"
TWICE = "it scans layers 2 times, not forward and backward once"
STACKED = (
    "is stacked for each microbatch and made on several stages; "
    "take gradients inside the scan over microbatches, and add them up there"
)
LOOPS: Mapping[Callable[..., Any], str] = {
    a_running_mean: DEPENDS,
    a_recurrence: DEPENDS,
    a_weight_by_position: DEPENDS,
    a_wider_sum: "a microbatch changes the shape of what it adds to",
    three_scans: "it scans layers 3 times, not forward and backward once",
    two_scans: TWICE,
    from_the_last_layer: "it scans layers from the last to the first",
    gradient_from_the_last_layer: TWICE,
    clipped_in_each_microbatch: r"layers read \w+, which another stage makes in the same pass",
    all_layers_of_all_microbatches: r"\w+ " + STACKED,
    gradient_around_the_microbatches: r"\w+ " + STACKED,
    both_ends_multiplied: r"\w+ \(unit/test_pipeline_errors.py:\d+\) mixes what several stages make",
    scaled_by_all_layers: r"layers read \w+, which another stage makes in the same pass",
}


@pytest.mark.parametrize("fn", LOOPS, ids=lambda fn: fn.__name__)
def test_loops_that_are_no_pipelines(fn: Any) -> None:
    values = arguments()
    run = compiled(fn, check=True)
    program = run.lower(*values)
    assert "pipeline over" not in program.text()
    line = (
        r"the scan at unit/test_pipeline_errors.py:\d+ is over split layers, but is no pipeline: "
    )
    assert re.fullmatch(line + LOOPS[fn], program.report[0])
    assert any(c.op == "all_gather" and c.axes == ("pp",) for c in program.collectives())
    for got, want in zip(
        pfx.tree.leaves(pfx.device_get(run(*values))), pfx.tree.leaves(fn(*values)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_line_is_that_of_the_scan_over_microbatches() -> None:
    line, gathers = compiled(a_running_mean).lower(*arguments()).report
    at = a_running_mean.__code__.co_firstlineno + 2
    assert line.startswith(f"the scan at unit/test_pipeline_errors.py:{at} is over split layers")
    assert gathers == (
        f"the scan at unit/test_pipeline_errors.py:{at - 1} runs over rows that 'pp' splits: "
        "all are gathered"
    )


def test_a_batch_split_over_the_same_axis_needs_every_layer() -> None:
    values = arguments()
    run = pfx.jit(gradients, mesh=MESH, in_specs=(P("pp"), P(), P(None, "pp")), check=True)
    program = run.lower(*values)
    line = program.report[0]
    assert line.endswith("is no pipeline: 'pp' splits the batch, so its devices need every layer")
    torch.testing.assert_close(
        pfx.device_get(run(*values)), gradients(*values), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "change", [lambda w: w.flip(0), lambda w: w[:3]], ids=["flipped", "a part"]
)
def test_what_is_no_stack_of_the_stages_layers_any_more(change: Any) -> None:
    def fn(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        add = lambda total, x: (total + training(change(w), x), None)
        return pfx.scan(add, ZERO, xs)[0]

    values = arguments()
    run = compiled(fn, check=True, schedule="gpipe")
    program = run.lower(*values)
    line = fn.__code__.co_firstlineno + 2
    assert program.report == [
        f"the scan at unit/test_pipeline_errors.py:{line} is over split layers, but is no pipeline: "
        "no scan in it runs over their rows as they are",
        "schedule: no scan over layers became a pipeline, so nothing runs by it",
    ]
    torch.testing.assert_close(pfx.device_get(run(*values)), fn(*values), rtol=1e-12, atol=0)
