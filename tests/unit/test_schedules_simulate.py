"""The time of schedules: by hand, against closed forms, the paper's tables, and by its own law."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfx.schedules import Action, Row, ScheduleError, Timeline, build, parse, simulate

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "forward")
VIRTUAL = {"interleaved": 3, "forward": 2, "zb-v": 2, "dualpipe-v": 2}

# Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), the measured times of its
# models and the bubble rates of its tables: stages, microbatches, the times of F, B, W and of a
# transfer in ms, and the bubble rates of 1F1B, ZB-H1 and ZB-H2.
ZERO_BUBBLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, "0.2431", "0.1585", "0.1083"),
    (8, 32, 18.513, 18.086, 9.331, 0.626, "0.1985", "0.1242", "0.0837"),
    (8, 64, 18.546, 18.097, 9.321, 0.762, "0.1240", "0.0674", "0.0444"),
    (8, 24, 29.718, 29.444, 19.927, 0.527, "0.2347", "0.1323", "0.0698"),
    (8, 32, 29.802, 29.428, 19.530, 0.577, "0.1898", "0.1045", "0.0559"),
    (8, 64, 29.935, 29.621, 19.388, 0.535, "0.1091", "0.0554", "0.0294"),
    (16, 48, 11.347, 11.248, 8.132, 0.377, "0.2552", "0.1397", "0.0672"),
    (16, 64, 11.307, 11.254, 8.101, 0.379, "0.2082", "0.1088", "0.0516"),
    (16, 128, 11.325, 11.308, 8.109, 0.378, "0.1251", "0.0576", "0.0266"),
]


def spans(timeline: Timeline) -> list[str]:
    return [f"{row.device} {row.action} {row.start:g}-{row.end:g}" for row in timeline.rows()]


# By hand.


def test_two_devices_by_hand() -> None:
    timeline = simulate(parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), t_f=1, t_b=1.5, t_w=0.5)
    assert spans(timeline) == [
        *("0 0F0 0-1", "0 0F1 1-2", "0 0B0 4-6", "0 0B1 7-9"),
        *("1 1F0 1-2", "1 1B0 2-4", "1 1F1 4-5", "1 1B1 5-7"),
    ]
    assert timeline.makespan == 9
    assert timeline.bubble == 1 - 6 / 9
    assert timeline.peak_activations == (2, 1)


def test_a_transfer_delays_the_other_device_and_nobody_else() -> None:
    schedule = parse("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1")
    timeline = simulate(schedule, t_f=1, t_b=2, t_w=1, t_comm=0.25)
    assert spans(timeline) == [
        *("0 0F0 0-1", "0 0F1 1-2", "0 0I0 4.5-6.5", "0 0W0 6.5-7.5"),
        *("0 0I1 7.5-9.5", "0 0W1 9.5-10.5"),
        *("1 1F0 1.25-2.25", "1 1I0 2.25-4.25", "1 1F1 4.25-5.25", "1 1I1 5.25-7.25"),
        *("1 1W0 7.25-8.25", "1 1W1 8.25-9.25"),
    ]
    assert timeline.makespan == 10.5  # device 1 starts late, but is no longer at it
    assert timeline.bubble == 1 - 8 / 10.5


def test_stages_of_one_device_wait_for_no_transfer() -> None:
    timeline = simulate(parse("0F0 1F0 1B0 0B0"), t_f=1, t_b=2, t_comm=100)
    assert (timeline.makespan, timeline.bubble) == (6, 0)


def test_each_stage_may_have_its_own_time() -> None:
    timeline = simulate(parse("0F0 0B0\n1F0 1B0"), t_f=[1, 3], t_b=(2, 4), t_w=1)
    assert spans(timeline) == ["0 0F0 0-1", "0 0B0 9-12", "1 1F0 1-4", "1 1B0 4-9"]
    assert timeline.bubble == 1 - (4 + 8) / 2 / 12


@pytest.mark.parametrize("name", NAMES)
def test_a_time_for_each_action(name: str) -> None:
    """Law: a function, a mapping, and the times of the kinds that say the same give the same."""
    schedule = build(name, stages=3, microbatches=5, virtual=VIRTUAL.get(name, 1))
    t_f, t_b, t_w = ([1 + k * stage for stage in range(schedule.stages)] for k in (1, 2, 3))

    def time(action: Action) -> float:
        i, w = t_b[action.stage], t_w[action.stage]
        return {"F": t_f[action.stage], "I": i, "W": w, "B": i + w}[action.kind]

    by_kind = simulate(schedule, t_f=t_f, t_b=t_b, t_w=t_w, t_comm=0.5)
    table = {action: time(action) for _, action in schedule.actions()}
    assert simulate(schedule, times=time, t_comm=0.5) == by_kind
    assert simulate(schedule, times=table, t_comm=0.5) == by_kind
    written = simulate(schedule.with_communication(), times=table, t_comm=0.5)
    assert written.computations() == by_kind.rows()


def test_one_slow_action_holds_up_those_that_need_it() -> None:
    schedule = parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    slow = simulate(schedule, times=lambda action: 5 if str(action) == "1F1" else 1)
    assert spans(slow) == [
        *("0 0F0 0-1", "0 0F1 1-2", "0 0B0 3-4", "0 0B1 9-10"),
        *("1 1F0 1-2", "1 1B0 2-3", "1 1F1 3-8", "1 1B1 8-9"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5, "1.5 s"),
        (0.0123456, "12.3 ms"),
        (0.25e-3, "250 us"),
        (0.0, "0 us"),
        (2e-9, "0.002 us"),
    ],
)
def test_seconds_are_written_with_their_unit(seconds: float, text: str) -> None:
    timeline = simulate(parse("0F0"), t_f=seconds, t_b=0, unit="s")
    assert timeline.time_text(6) == text
    assert timeline.text().split("\n")[-1] == f"makespan {text}, bubble 0.0%"


def test_rows_are_in_order_with_names() -> None:
    rows = simulate(parse("0F0\n1F0").with_communication(), t_f=2, t_b=1, t_comm=1).rows()
    assert [(row.device, str(row.action), row.start, row.end) for row in rows] == [
        *((0, "0F0", 0, 2), (0, "0SEND_F0", 2, 2)),
        *((1, "1RECV_F0", 3, 3), (1, "1F0", 3, 5)),
    ]
    assert isinstance(rows[0], Row)


def test_nothing_takes_no_time() -> None:
    timeline = simulate(parse("0F0 0B0"), t_f=0, t_b=0)
    assert (timeline.makespan, timeline.bubble) == (0, 0)
    assert timeline.text() == "device 0: \nmakespan 0, bubble 0.0%"


# The picture.


def test_the_grid_of_characters() -> None:
    timeline = simulate(build("zb-h1", stages=3, microbatches=4), t_f=1, t_b=1, t_w=1)
    assert (
        str(timeline)
        == timeline.text()
        == (
            "device 0: 0F0 0F1 0F2 ........0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
            "device 1: ....1F0 1F1 ....1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3\n"
            "device 2: ........2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3\n"
            "makespan 14, bubble 14.3%"
        )
    )


def test_a_grid_that_is_squeezed_keeps_its_width() -> None:
    timeline = simulate(build("1f1b", stages=2, microbatches=3), t_f=1, t_b=1, t_w=1)
    assert timeline.text(width=24) == (
        "device 0: F F ....B-- F B-- ..B--\n"
        "device 1: ..F B-- F B-- F B-- ....\n"
        "makespan 12, bubble 25.0%"
    )
    for width in (1, 7, 30, 1000):
        narrow = timeline.text(width=width).split("\n")[:-1]
        assert all(len(line) <= len("device 0: ") + width for line in narrow)


# Closed forms.


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 4), (4, 8), (8, 24), (1, 3)])
def test_1f1b_and_gpipe_have_the_bubble_of_their_closed_form(
    stages: int, microbatches: int
) -> None:
    closed = Fraction(stages - 1, microbatches + stages - 1)
    for name, peak in (("1f1b", min(stages, microbatches)), ("gpipe", microbatches)):
        schedule = build(name, stages=stages, microbatches=microbatches)
        timeline = simulate(schedule, t_f=1, t_b=1, t_w=1)
        assert timeline.bubble == pytest.approx(float(closed), abs=1e-12)
        assert max(timeline.peak_activations) == peak


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved_has_its_idle_time_divided_by_the_stages_of_a_device(
    stages: int, virtual: int
) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: idle / ideal = (p - 1) / (v m)."""
    microbatches = 4 * stages
    schedule = build("interleaved", stages=stages, microbatches=microbatches, virtual=virtual)
    timeline = simulate(schedule, t_f=1 / virtual, t_b=1 / virtual, t_w=1 / virtual)
    # From the first start to the last end of all devices, as the paper has it.
    total = max(row.end for row in timeline.rows())
    assert total / (3 * microbatches) - 1 == pytest.approx((stages - 1) / (virtual * microbatches))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_zero_bubble_schedules_hold_what_the_paper_says(stages: int) -> None:
    """Qi et al. 2023, section 2: ZB-H1 holds what 1F1B does, ZB-H2 up to 2 p - 1."""
    for name, peak, bubble in (("zb-h1", stages, stages - 1), ("zb-h2", 2 * stages - 1, 0)):
        schedule = build(name, stages=stages, microbatches=3 * stages)
        timeline = simulate(schedule, t_f=1, t_b=1, t_w=1)
        assert max(timeline.peak_activations) == peak
        assert timeline.makespan == 9 * stages + bubble


@pytest.mark.parametrize("case", ZERO_BUBBLE, ids=lambda case: f"p{case[0]}-m{case[1]}-{case[2]}")
def test_bubbles_of_the_zero_bubble_paper(
    case: tuple[int, int, float, float, float, float],
) -> None:
    stages, microbatches, t_f, t_b, t_w, t_comm, *rates = case
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        schedule = build(name, stages=stages, microbatches=microbatches)
        timeline = simulate(schedule, t_f=t_f, t_b=t_b, t_w=t_w, t_comm=t_comm)
        assert f"{timeline.bubble:.4f}" == rate, name


# The law: every action starts when its device and what it needs are there, and not later.


def arrivals(timeline: Timeline, row: Row, t_comm: float) -> list[float]:
    """When each thing that a computation needs reaches its device."""
    ends = {str(other.action): (other.end, other.device) for other in timeline.computations()}
    stage, kind, k = row.action.stage, row.action.kind, row.action.microbatch
    wanted = {
        "F": [f"{stage - 1}F{k}"],
        "W": [f"{stage}I{k}"],
    }.get(kind, [f"{stage}F{k}", f"{stage + 1}B{k}", f"{stage + 1}I{k}"])
    found = [ends[name] for name in wanted if name in ends]
    return [end + t_comm * (device != row.device) for end, device in found]


TIMES = st.integers(0, 12).map(lambda quarters: quarters / 4)


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5), TIMES, TIMES, TIMES, TIMES)
def test_every_action_starts_as_early_as_it_can(
    name: str, stages: int, microbatches: int, t_f: float, t_b: float, t_w: float, t_comm: float
) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches, virtual=VIRTUAL.get(name, 1))
    timeline = simulate(schedule, t_f=t_f, t_b=t_b, t_w=t_w, t_comm=t_comm)
    times = {"F": t_f, "I": t_b, "W": t_w, "B": t_b + t_w}
    free = [0.0] * stages
    for row in timeline.rows():
        assert row.start == max([free[row.device], *arrivals(timeline, row, t_comm)])
        assert row.end == row.start + times[row.action.kind]
        free[row.device] = row.end
    busy = sum(row.end - row.start for row in timeline.rows())
    assert 0 <= timeline.bubble <= 1
    assert timeline.bubble * timeline.makespan == pytest.approx(timeline.makespan - busy / stages)


@pytest.mark.parametrize("name", NAMES)
def test_written_transfers_change_no_time(name: str) -> None:
    for stages, microbatches in product((1, 2, 4), (1, 3, 8)):
        schedule = build(
            name, stages=stages, microbatches=microbatches, virtual=VIRTUAL.get(name, 1)
        )
        plain = simulate(schedule, t_f=3, t_b=2, t_w=1, t_comm=0.5)
        written = simulate(schedule.with_communication(), t_f=3, t_b=2, t_w=1, t_comm=0.5)
        assert written.computations() == plain.rows()
        assert written.makespan == plain.makespan
        assert written.text() == plain.text()


# Refusals.


def test_what_cannot_run_is_not_timed() -> None:
    with pytest.raises(ScheduleError, match="0B0 before 0F0 on device 0"):
        simulate(parse("0B0 0F0"), t_f=1, t_b=1)


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["t_f", "t_b", "t_w", "t_comm"])
def test_times_that_are_none_are_refused(name: str, time: float) -> None:
    times = {"t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_comm": 1.0, name: time}
    with pytest.raises(ScheduleError, match=rf"simulate: {name} is {time}\.\n  fix: "):
        simulate(parse("0F0 0B0"), **times)


def test_a_time_for_each_stage_or_one_for_all() -> None:
    with pytest.raises(ScheduleError, match=r"simulate: t_b has 2 times for 1 stages\."):
        simulate(parse("0F0 0B0"), t_f=1, t_b=[1, 2])


def test_times_of_actions_that_are_none_are_refused() -> None:
    schedule = parse("0F0 0B0")
    forward = Action.parse("0F0")
    with pytest.raises(ScheduleError, match=r"^simulate: times has no time for 0B0\.\n  fix: "):
        simulate(schedule, times={forward: 1.0})
    for time in (-1.0, float("nan")):
        with pytest.raises(ScheduleError, match=rf"^simulate: the time of 0F0 is {time}\.\n"):
            simulate(schedule, times=lambda _, time=time: time)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "got no t_f."),
        ({"t_f": 1}, "got no t_b."),
        ({"times": {}, "t_f": 1, "t_w": 2}, "got times and t_f, t_w."),
    ],
)
def test_times_are_given_one_way(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        simulate(parse("0F0 0B0"), **given)
    assert str(caught.value).startswith(f"simulate: {problem}\n  fix: ")
