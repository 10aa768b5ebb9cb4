"""Schedules as data: their text, their sends and receives, and the refusal of what cannot run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from pfx.errors import PfxError
from pfx.schedules import KINDS, Action, Schedule, ScheduleError, build, parse, validate

VIRTUAL = {"interleaved": (1, 2, 3), "forward": (1, 2), "zb-v": (2,), "dualpipe-v": (2,)}
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "forward")
BUILT = [
    build(name, stages=stages, microbatches=microbatches, virtual=virtual)
    for name, stages, microbatches in product(NAMES, (1, 2, 3, 4), (1, 2, 3, 5, 8))
    for virtual in VIRTUAL.get(name, (1,))
]


def depends(action: Action, schedule: Schedule) -> set[Action]:
    """Every computation that must come before this one, written down a second time."""
    own = {action.at(action.stage, "I" if action.kind == "W" else "F")}
    if action.kind == "F":
        return {action.at(action.stage - 1, "F")} if action.stage else set()
    if action.kind == "W" or action.stage + 1 == schedule.stages:
        return own
    return own | {action.at(action.stage + 1, kind) for kind in "BI"}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A schedule from a random order in which every need is met, on random places."""
    devices = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, devices - 1), max_size=3))
    place = draw(st.permutations([*range(devices), *extra]))
    microbatches = draw(st.integers(1, 4))
    trains = draw(st.booleans())
    waiting: list[Action] = []
    for stage, microbatch in product(range(len(place)), range(microbatches)):
        kinds = "F" + (draw(st.sampled_from(("B", "IW"))) if trains else "")
        waiting += [Action(stage, kind, microbatch) for kind in kinds]
    everything = frozenset(waiting)
    schedule = Schedule("drawn", len(place), microbatches, ((),) * devices, tuple(place))
    rows: list[list[Action]] = [[] for _ in range(devices)]
    done: set[Action] = set()
    while waiting:
        ready = [a for a in waiting if depends(a, schedule) & everything <= done]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        done.add(action)
        rows[place[action.stage]].append(action)
    return replace(schedule, devices=tuple(map(tuple, rows)))


def moved(schedule: Schedule, device: int, source: int, target: int) -> Schedule:
    row = list(schedule.devices[device])
    row.insert(target, row.pop(source))
    rows = list(schedule.devices)
    rows[device] = tuple(row)
    return replace(schedule, devices=tuple(rows))


def without(schedule: Schedule, action: Action) -> Schedule:
    rows = (tuple(a for a in row if a != action) for row in schedule.devices)
    return replace(schedule, devices=tuple(rows))


def complaint(schedule: Schedule, **options: int | bool) -> str:
    with pytest.raises(ScheduleError) as error:
        validate(schedule, **options)  # pyright: ignore[reportArgumentType]
    return str(error.value)


# The data and its text.


@given(st.builds(Action, st.integers(0, 999), st.sampled_from(KINDS), st.integers(0, 999)))
def test_an_action_is_read_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X1", "0F1x", "-1F0", "0f1", "0 F1", "1234567F0", "0SEND0", "٣F1"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"cannot be read[^$]*0F3") as error:
        Action.parse(text)
    assert isinstance(error.value, PfxError)
    assert isinstance(error.value, ValueError)


@given(schedules())
def test_parse_undoes_text(schedule: Schedule) -> None:
    for one in (schedule, schedule.with_communication()):
        assert parse(one.text(), name=one.name) == one
        bare = "\n".join(" ".join(map(str, row)) for row in one.devices)
        if all(one.devices):
            assert parse(bare) == one


@pytest.mark.parametrize("name", NAMES)
def test_built_schedules_are_read_back(name: str) -> None:
    for schedule in (s for s in BUILT if s.name == name):
        assert parse(str(schedule)) == schedule
        written = schedule.with_communication()
        assert parse(str(written)) == written
        assert written.computations() == schedule


def test_a_schedule_has_its_sizes() -> None:
    schedule = parse("# two stages on a device, as a V\n\ndevice 0: 0F0 3F0\n device 1: 1F0 2F0 \n")
    assert (schedule.name, schedule.stages, schedule.microbatches) == ("custom", 4, 1)
    assert (schedule.num_devices, schedule.virtual, schedule.place) == (2, 2, (0, 1, 1, 0))
    assert schedule == parse("0F0 3F0\n1F0 2F0", name="another")
    assert schedule != parse("3F0 0F0\n1F0 2F0")
    assert str(schedule) == schedule.text() == "device 0: 0F0 3F0\ndevice 1: 1F0 2F0"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "schedule:", "holds no computation"),
        ("device 0:", "schedule:", "holds no computation"),
        ("0SEND_F0", "schedule:", "holds no computation"),
        ("0F0 0B0\n1F0 1Z0", "line 2, cell 2", "'1Z0' cannot be read"),
        ("0F0,,oops", "line 1, cell 3", "'oops' cannot be read"),
        ("\n\n0F0 (0F1;what)OVERLAP_F_B", "line 3, cell 2", "'what' cannot be read"),
        ("0F" + "9" * 5000, "line 1, cell 1", "cannot be read"),
        ("device 1: 0F0", "line 1", "names device 1, but is the row of device 0"),
        ("0F0\n0B0", "stage 0", "is computed on device 0 and on device 1 (0B0)"),
        ("0F0\n2F0", "stage 1", "is computed by no device"),
        ("0F0 999999F0", "stage 1", "is computed by no device"),
        ("0F0 1RECV_F0", "stage 1", "is computed by no device"),
    ],
)
def test_bad_text_is_refused_with_its_place(text: str, where: str, what: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(text)
    first = str(error.value).splitlines()[0]
    assert where in first
    assert what in first
    assert "fix: " in str(error.value)
    assert len(str(error.value)) < 500


@given(st.text(alphabet='0129FBIW,;() \n\t\rSENDRCV_:device#"\x00٣é'))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = parse(text)
    except ScheduleError:
        return
    assert parse(schedule.text()) == schedule


# torch.distributed.pipelining's CSV.

THEIRS = [
    *(("GPipe", stages, count, 1) for stages, count in ((2, 3), (4, 4))),
    *(("Interleaved1F1B", 2, 4, virtual) for virtual in (2, 3)),
    *((name, 2, 4, 2) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")),
]


def torch_csv(rows: Iterable[Iterable[object]]) -> str:
    """The file that torch's ``_dump_csv`` writes."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue()


def words(row: Iterable[object]) -> list[str]:
    """The actions of a row of torch's, those inside an overlap in their order."""
    cells = (str(cell).removesuffix("OVERLAP_F_B").strip("()") for cell in row if cell is not None)
    return [word for cell in cells for word in cell.split(";") if "REDUCE_GRAD" not in word]


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), THEIRS)
def test_torch_csv_is_read(name: str, stages: int, microbatches: int, virtual: int) -> None:
    rows = get_schedule_ops(name, stages, microbatches, virtual)
    schedule = parse(torch_csv(rows), name=name)
    assert (schedule.num_devices, schedule.virtual) == (stages, virtual)
    assert schedule.microbatches == microbatches
    assert [list(map(str, row)) for row in schedule.devices] == [words(row) for row in rows]
    validate(schedule)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual"), [case for case in THEIRS if case[-1] > 1]
)
def test_torch_csv_with_transfers_is_read(
    name: str, stages: int, microbatches: int, virtual: int
) -> None:
    rows = get_schedule_ops(name, stages, microbatches, virtual, with_comms=True)
    schedule = parse(torch_csv(rows))
    plain = parse(torch_csv(get_schedule_ops(name, stages, microbatches, virtual)))
    assert schedule.computations() == plain
    transfers = Counter(a for row in schedule.devices for a in row if "_" in a.kind)
    ours = plain.with_communication()
    assert transfers == Counter(a for row in ours.devices for a in row if "_" in a.kind)


# Sends and receives.


def test_transfers_stand_next_to_their_computations() -> None:
    assert str(parse("0F0 0I0 0W0\n1F0 1B0").with_communication()) == (
        "device 0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0\ndevice 1: 1RECV_F0 1F0 1B0 1SEND_B0"
    )


def test_stages_of_one_device_transfer_nothing() -> None:
    v = parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0").with_communication()
    assert str(v) == (
        "device 0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
        "device 1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"
    )
    alone = parse("0F0 1F0 1B0 0B0")
    assert alone.with_communication() == alone


@given(schedules())
def test_written_transfers_are_legal_and_written_once(schedule: Schedule) -> None:
    written = schedule.with_communication()
    assert validate(written) == validate(schedule)
    assert written.with_communication() == written
    assert written.computations() == schedule


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_transfer_is_refused(name: str) -> None:
    kwargs = {"virtual": VIRTUAL.get(name, (1,))[-1]}
    schedule = build(name, stages=3, microbatches=4, **kwargs).with_communication()
    transfers = [a for row in schedule.devices for a in row if "_" in a.kind]
    assert transfers
    for action in transfers:
        text = complaint(without(schedule, action))
        assert f"{action} is missing on device {schedule.place[action.stage]}." in text
        assert "has its partner" in text


def test_a_transfer_to_nobody_is_refused() -> None:
    text = complaint(parse("0F0 0SEND_F0 1RECV_F0 1F0 2F0\n3F0", name="mine"))
    assert text.startswith("schedule 'mine': 0SEND_F0 transfers what no other device needs.")
    last = parse("0F0 0SEND_F0\n1RECV_F0 1F0 1SEND_F0")
    assert "1SEND_F0 transfers what no other device needs." in complaint(last)


def test_a_transfer_before_its_computation_is_refused() -> None:
    assert "0SEND_F0 before 0F0 on device 0." in complaint(parse("0SEND_F0 0F0\n1RECV_F0 1F0"))
    assert "1F0 before 1RECV_F0 on device 1." in complaint(parse("0F0 0SEND_F0\n1F0 1RECV_F0"))


# Validation.


@pytest.mark.parametrize("name", NAMES)
def test_built_schedules_validate(name: str) -> None:
    for schedule in (s for s in BUILT if s.name == name):
        peaks = validate(schedule)
        assert validate(schedule.with_communication()) == peaks
        assert all(1 <= peak <= schedule.microbatches * schedule.virtual for peak in peaks)


@given(schedules())
def test_any_order_that_meets_every_need_validates(schedule: Schedule) -> None:
    peaks = validate(schedule)
    assert len(peaks) == schedule.num_devices
    assert validate(schedule, buffers=max(peaks)) == peaks


def test_backward_before_forward_is_refused_with_the_pair() -> None:
    assert complaint(parse("0F0 0B0\n1B0 1F0", name="mine")) == (
        "schedule 'mine': 1B0 before 1F0 on device 1.\n  1B0 needs 1F0\n  fix: move 1F0 before 1B0"
    )


@given(st.sampled_from(BUILT), st.data())
def test_dependent_actions_out_of_order_are_refused_with_the_pair(
    schedule: Schedule, data: st.DataObject
) -> None:
    pairs = []
    for device, row in enumerate(schedule.devices):
        for index, action in enumerate(row):
            before = [i for i, other in enumerate(row) if other in depends(action, schedule)]
            pairs += [(device, index, max(before))] if before else []
    assume(pairs)  # not where a device only runs forwards, of stages that are no neighbours
    device, index, first = data.draw(st.sampled_from(pairs))
    row = schedule.devices[device]
    text = complaint(moved(schedule, device, index, first))
    assert f"{row[index]} before {row[first]} on device {device}." in text


@given(schedules(), st.data())
def test_a_dropped_computation_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    everything = [action for row in schedule.devices for action in row]
    action = data.draw(st.sampled_from(everything))
    assume({a.kind for a in everything if a != action} != {"F"} or action.kind == "F")
    text = complaint(without(schedule, action))
    if action.kind == "F":
        assert f"{action} is missing." in text
    else:
        assert f"stage {action.stage} has no whole backward of microbatch" in text


def test_doubled_mixed_and_misplaced_actions_are_refused() -> None:
    assert "0F0 occurs twice." in complaint(parse("0F0 0F0 0B0"))
    assert "it has 0B0 0F0 0W0" in complaint(parse("0F0 0B0 0W0"))
    assert "it has 0B0 0F0 0I0" in complaint(parse("0F0 0I0 0B0"))
    assert "it has 0F0 0W0" in complaint(parse("0F0 0W0"))
    assert "it has 0F1" in complaint(parse("0F0 0B0 0F1"))
    good = parse("0F0 0B0\n1F0 1B0")
    assert "1F0 is on device 1, but stage 1 is on device 0." in complaint(
        replace(good, place=(0, 0))
    )
    assert "2 stages have 1 places." in complaint(replace(good, place=(0,)))
    assert "2 stages have 1 places." in complaint(replace(good, place=(0,)), blocking=True)
    assert "1F0 on device 1 is of stage 1, but there are 1." in complaint(
        replace(good, stages=1, place=(0,))
    )
    assert "0F1 is missing." in complaint(replace(good, microbatches=2))
    odd = Schedule("odd", 1, 1, ((Action(0, "Q", 0),),), (0,))
    assert "0Q0 has no known kind." in complaint(odd)
    below = Schedule("below", 1, 1, ((Action(0, "F", -1),),), (0,))
    assert "is of microbatch -1, but there are 1." in complaint(below)


def test_huge_claims_are_refused_at_once() -> None:
    assert "0F0 is missing." in complaint(parse("0F999999"))


def test_a_deadlock_lists_what_each_device_waits_for() -> None:
    crossed = parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", name="crossed")
    assert complaint(crossed) == (
        "schedule 'crossed': no runnable action.\n"
        "  device 0: 0B0 waits for 1B0\n"
        "  device 1: 1F1 waits for 0F1\n"
        "  fix: move what a device waits for before what the other device waits for"
    )
    written = complaint(crossed.with_communication())
    assert "device 0: 0RECV_B0 waits for 1SEND_B0" in written
    assert "device 1: 1RECV_F1 waits for 0SEND_F1" in written


def test_sends_that_block_deadlock_where_both_sides_send() -> None:
    schedule = build("1f1b", stages=2, microbatches=3)
    assert validate(schedule) == validate(schedule.with_communication()) == (2, 1)
    text = complaint(schedule, blocking=True)
    assert text == complaint(schedule.with_communication(), blocking=True)
    assert "no runnable action." in text
    assert "device 0: 0SEND_F1 waits for 1RECV_F1 to be reached" in text
    assert "device 1: 1SEND_B0 waits for 0RECV_B0 to be reached" in text


def test_sends_that_block_run_where_one_side_receives() -> None:
    for stages, microbatches in product((1, 2, 4), (1, 2, 5)):
        schedule = build("gpipe", stages=stages, microbatches=microbatches)
        assert validate(schedule, blocking=True) == (microbatches,) * stages
    # 1F1B with the receive of device 0 before its next send, as a fused send and receive has it.
    ordered = parse(
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert validate(ordered, blocking=True) == (2, 1)


def test_transfers_that_block_keep_one_order() -> None:
    crossed = parse(
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    assert validate(crossed) == (2, 2)
    text = complaint(crossed, blocking=True)
    assert "0SEND_F1 on device 0 meets 1RECV_F0 on device 1." in text


def test_buffers_bound_the_live_activations() -> None:
    gpipe = build("gpipe", stages=3, microbatches=4)
    assert validate(gpipe, buffers=4) == (4, 4, 4)
    text = complaint(gpipe, buffers=3)
    assert "0F3 makes device 0 hold 4 activations." in text
    assert "3 may be held at once" in text
    assert validate(build("forward", stages=3, microbatches=4), buffers=1) == (1, 1, 1)


def test_an_activation_lives_until_its_weights_have_their_gradient() -> None:
    assert validate(parse("0F0 0B0 0F1 0B1")) == (1,)
    assert validate(parse("0F0 0I0 0W0 0F1 0I1 0W1")) == (1,)
    assert validate(parse("0F0 0I0 0F1 0I1 0W0 0W1")) == (2,)
