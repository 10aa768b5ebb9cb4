"""The built-in schedules: complete, runnable, as published, and as fast and small as promised."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from pfx.schedules.action import Action, Schedule, ScheduleError
from pfx.schedules.build import FAMILIES, build

EQUAL = {"F": 1, "I": 1, "W": 1, "B": 2}
DEVICES, MICROBATCHES = range(1, 7), range(1, 10)
VIRTUAL = [
    *((name, virtual) for name in ("interleaved", "forward") for virtual in (1, 2, 3)),
    *((name, 1) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *((name, 2) for name in ("zb-v", "dualpipe-v")),
]


def needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """What must have run before, I and B both as "B": the gradient that goes on."""
    stage, kind, k = action.stage, action.kind, action.microbatch
    if kind == "F":
        return [("F", stage - 1, k)] if stage else []
    if kind == "W":
        return [("I", stage, k)]
    return [("F", stage, k), *([("B", stage + 1, k)] if stage + 1 < stages else [])]


def makes(action: Action) -> list[tuple[str, int, int]]:
    names = {"F": "F", "B": "B", "W": "W", "I": "BI"}[action.kind]
    return [(name, action.stage, action.microbatch) for name in names]


def play(schedule: Schedule, times: dict[str, float], hop: float = 0) -> list[list[float]]:
    """The end of each action of each device; fails where no device can go on."""
    ready: dict[tuple[str, int, int], float] = {}
    ends: list[list[float]] = [[] for _ in schedule.devices]
    waiting = set(range(len(schedule.devices)))
    while waiting:
        before = sum(map(len, ends))
        for device in sorted(waiting):
            for action in schedule.devices[device][len(ends[device]) :]:
                wanted = needs(action, schedule.stages)
                if any(value not in ready for value in wanted):
                    break
                arrivals = [
                    ready[value] + hop * (schedule.place[value[1]] != device) for value in wanted
                ]
                now = max([*arrivals, ends[device][-1] if ends[device] else 0])
                ends[device].append(now + times[action.kind])
                ready |= dict.fromkeys(makes(action), ends[device][-1])
            else:
                waiting.discard(device)
        stuck = [str(schedule.devices[d][len(ends[d])]) for d in waiting]
        assert not waiting or sum(map(len, ends)) > before, f"nothing can run: {stuck}\n{schedule}"
    return ends


def makespan(schedule: Schedule, times: dict[str, float] = EQUAL) -> float:
    return max(row[-1] for row in play(schedule, times))


def peaks(schedule: Schedule) -> list[Fraction]:
    """The most activations each device holds, in those of all its stages together."""
    steps = {"F": 1, "B": -1, "I": 0, "W": -1}
    result = []
    for actions in schedule.devices:
        held, most = 0, 0
        for action in actions:
            held += steps[action.kind]
            most = max(most, held)
        result.append(Fraction(most, schedule.virtual))
    return result


def compact(schedule: Schedule, device: int) -> str:
    return "".join(f"{a.kind}{a.microbatch}" for a in schedule.devices[device])


def test_the_executor_stops_where_no_device_can_go_on() -> None:
    good = build("gpipe", stages=2, microbatches=1)
    bad = replace(good, devices=(good.devices[0][::-1], good.devices[1]))
    play(good, EQUAL)
    with pytest.raises(AssertionError, match=r"nothing can run: \['0B0', '1F0'\]"):
        play(bad, EQUAL)


@pytest.mark.parametrize(("name", "virtual"), VIRTUAL)
def test_every_size_is_complete_and_runs_to_its_end(name: str, virtual: int) -> None:
    for p, m in [*product(DEVICES, MICROBATCHES), (12, 5), (8, 37)]:
        schedule = build(name, stages=p, microbatches=m, virtual=virtual)
        assert (schedule.num_devices, schedule.stages) == (p, p * virtual)
        assert (schedule.microbatches, schedule.virtual) == (m, virtual)
        done: Counter[tuple[str, int, int]] = Counter()
        for device, actions in enumerate(schedule.devices):
            for action in actions:
                assert schedule.place[action.stage] == device
                done[action.kind, action.stage, action.microbatch] += 1
        assert set(done.values()) == {1}
        for stage, k in product(range(p * virtual), range(m)):
            kinds = {kind for kind in "FBIW" if done[kind, stage, k]}
            assert kinds in ([{"F"}] if name == "forward" else [{"F", "B"}, {"F", "I", "W"}])
        assert sum(done.values()) == sum(map(len, schedule.devices))
        play(schedule, EQUAL)


@pytest.mark.parametrize(("name", "virtual"), VIRTUAL)
def test_a_stage_takes_the_microbatches_in_order(name: str, virtual: int) -> None:
    """So that gradients add up in one order under every schedule, bit for bit."""
    for p, m in product(DEVICES, MICROBATCHES):
        schedule = build(name, stages=p, microbatches=m, virtual=virtual)
        for stage, letters in product(range(schedule.stages), ("F", "BI", "BW")):
            actions = schedule.devices[schedule.place[stage]]
            seen = [a.microbatch for a in actions if a.stage == stage and a.kind in letters]
            assert seen == ([] if name == "forward" and letters != "F" else list(range(m)))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_device_has_no_bubble(name: str) -> None:
    virtual = FAMILIES[name].virtual or 3
    for m in MICROBATCHES:
        schedule = build(name, stages=1, microbatches=m, virtual=virtual)
        assert makespan(schedule) == m * virtual * (1 if name == "forward" else 3)


def test_the_published_1f1b_picture() -> None:
    schedule = build("1f1b", stages=3, microbatches=4)
    assert [compact(schedule, device) for device in range(3)] == [
        "F0F1F2B0F3B1B2B3",
        "F0F1B0F2B1F3B2B3",
        "F0B0F1B1F2B2F3B3",
    ]


def test_the_published_interleaved_order() -> None:
    """Narayanan et al. 2021, figure 4, its first and last of 4 devices with 8 microbatches."""
    schedule = build("interleaved", stages=4, microbatches=8, virtual=2)
    assert " ".join(map(str, schedule.devices[0])).startswith(
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1"
    )
    assert " ".join(map(str, schedule.devices[3])).startswith(
        "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zb-h1", ["F0F1F2I0W0F3I1W1I2W2I3W3", "F0F1I0F2I1W0F3I2W1I3W2W3", "F0I0F1I1F2I2W0F3I3W1W2W3"]),
        ("zb-h2", ["F0F1F2F3I0W0I1W1I2W2I3W3", "F0F1F2I0F3I1I2W0I3W1W2W3", "F0I0F1I1F2I2F3I3W0W1W2W3"]),
    ],
)  # fmt: skip
def test_zero_bubble_rules(name: str, expected: list[str]) -> None:
    """Qi et al. 2023: p-i-1 or 2(p-i-1) forwards first, W late by i or 2i."""
    schedule = build(name, stages=3, microbatches=4)
    assert [compact(schedule, device) for device in range(3)] == expected


ZERO_BUBBLE_TABLE = [  # p, m, t_f, t_b, t_w, t_comm; bubbles of 1F1B, ZB-H1, ZB-H2
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
]


@pytest.mark.parametrize("row", ZERO_BUBBLE_TABLE)
def test_published_zero_bubble_rates(row: tuple[float, ...]) -> None:
    """Qi et al. 2023, the tables of bubble rates; a device's time is from its start to its end."""
    p, m, t_f, t_b, t_w, hop, *expected = row
    times = {"F": t_f, "I": t_b, "W": t_w, "B": t_b + t_w}
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), expected, strict=True):
        cost = max(
            ends[-1] - (ends[0] - t_f)
            for ends in play(build(name, stages=int(p), microbatches=int(m)), times, hop)
        )
        assert 1 - m * (t_f + t_b + t_w) / cost == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (4, 3), (6, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_flush_bubble(name: str, p: int, m: int) -> None:
    total = makespan(build(name, stages=p, microbatches=m))
    assert 1 - Fraction(3 * m) / Fraction(total) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_interleaved_bubble_is_that_of_1f1b_over_virtual(virtual: int) -> None:
    """For any number of microbatches that fills the pipeline, a multiple or not."""
    for p, m in product(DEVICES, range(1, 15)):
        if m >= p:
            schedule = build("interleaved", stages=p, microbatches=m, virtual=virtual)
            assert makespan(schedule) - 3 * m * virtual == 3 * (p - 1)  # in chunks: 1/v of a device


def test_zero_bubble_at_equal_times() -> None:
    """ZB-H1 keeps a third of 1F1B's bubble; ZB-H2's and ZB-V's devices work without a pause."""
    for p in DEVICES:
        m = 3 * p
        assert makespan(build("zb-h1", stages=p, microbatches=m)) - 3 * m == p - 1
        for name, virtual in [("zb-h2", 1), ("zb-v", 2)]:
            ends = play(build(name, stages=p, microbatches=m, virtual=virtual), EQUAL)
            assert [row[-1] - (row[0] - 1) for row in ends] == [3 * m * virtual] * p


def test_peak_activations() -> None:
    for p in DEVICES:
        m = 3 * p
        assert set(peaks(build("gpipe", stages=p, microbatches=m))) == {m}
        assert peaks(build("1f1b", stages=p, microbatches=m)) == [p - d for d in range(p)]
        assert set(peaks(build("zb-h1", stages=p, microbatches=m))) == {p}
        assert set(peaks(build("zb-h2", stages=p, microbatches=m))) == {2 * p - 1}
        assert max(peaks(build("zb-v", stages=p, microbatches=m, virtual=2))) <= p
        dual = peaks(build("dualpipe-v", stages=p, microbatches=m, virtual=2))
        assert max(dual) == p + Fraction(1, 2)
        interleaved = peaks(build("interleaved", stages=p, microbatches=m, virtual=3))
        assert interleaved[0] == p + Fraction(p - 1, 3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_fewer_microbatches_than_stages_hold_no_more_than_they_are(name: str) -> None:
    """1, 2 and 3 microbatches on 4 stages (pytorch/torchtitan#775)."""
    for m in (1, 2, 3):
        schedule = build(name, stages=4, microbatches=m)
        assert max(peaks(schedule)) == m
        assert makespan(schedule) <= 3 * (m + 3)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_forward_only_waits_for_the_first_microbatch_alone(p: int) -> None:
    for m, virtual in product(range(p, 12), (1, 2, 3)):
        schedule = build("forward", stages=p, microbatches=m, virtual=virtual)
        assert makespan(schedule) == m * virtual + p - 1


@pytest.mark.parametrize(
    ("name", "has", "asked"),
    [("gpipe", 1, 2), ("1f1b", 1, 3), ("zb-h1", 1, 2), ("zb-h2", 1, 2), ("zb-v", 2, 1)]
    + [("zb-v", 2, 3), ("dualpipe-v", 2, 1)],
)
def test_a_virtual_that_the_schedule_has_not(name: str, has: int, asked: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, stages=4, microbatches=8, virtual=asked)
    text = str(caught.value)
    assert f"schedules.build({name!r}) has virtual={has}" in text
    assert f"not virtual={asked}." in text
    assert "stages=4 microbatches=8" in text


def test_an_error_reads() -> None:
    with pytest.raises(ScheduleError) as caught:
        build("zb-v", stages=4, microbatches=8)
    assert str(caught.value) == inspect.cleandoc(
        """
        schedules.build('zb-v') has virtual=2 (stages per device), not virtual=1.
          stages=4 microbatches=8 virtual=1
          fix: pass virtual=2, or a schedule that has virtual=1: gpipe, 1f1b, interleaved, zb-h1, zb-h2, forward.
        """  # noqa: E501
    )


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 4, 1)])
def test_sizes_below_one(size: tuple[int, int, int]) -> None:
    p, m, virtual = size
    with pytest.raises(ScheduleError, match=f"stages={p} microbatches={m} virtual={virtual}"):
        build("interleaved", stages=p, microbatches=m, virtual=virtual)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"'zbv'(.|\n)*zb-v, dualpipe-v, forward"):
        build("zbv", stages=2, microbatches=2)
