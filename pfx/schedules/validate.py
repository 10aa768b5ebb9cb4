"""Whether a schedule can run, and how many activations it keeps alive.

The checks go from what one action says, over what one device does, to what all of them do together,
so that the first complaint is the simplest one that is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from pfx.errors import message
from pfx.schedules.action import COMPUTATIONS, KINDS, Action, Schedule, ScheduleError
from pfx.schedules.order import needs, partner, play, value


def validate(
    schedule: Schedule, *, buffers: int | None = None, blocking: bool = False
) -> tuple[int, ...]:
    """Check that a schedule can run; return the peak of live activations of each device.

    An activation of a stage and a microbatch lives from its F to its B, or to its W where the
    backward is split; in a schedule without backward it is gone as soon as it has been handed on.
    A schedule without sends and receives is checked for its computations alone, whose values are
    then taken to arrive by themselves. A receive holds its device until the value is there, so what
    passes runs as well where receives are posted early.

    Args:
        schedule: what to check, from any source.
        buffers: how many activations a device may hold at once; None for any number.
        blocking: whether a send holds its device until the receive is reached. The default is that
            a send leaves the value behind, as ``isend`` does. Sends and receives are inserted
            first where the schedule has none.

    Raises:
        ScheduleError: an action is missing, doubled, out of range or on the wrong device; an action
            comes before one that it needs on the same device; a send or a receive has no partner;
            no device can run its next action; ``buffers`` is exceeded.

    >>> from pfx.schedules.text import parse
    >>> validate(parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"))
    (2, 1)
    >>> validate(parse("0F0 0B0\\n1B0 1F0", name="mine"))
    Traceback (most recent call last):
    pfx.schedules.action.ScheduleError: schedule 'mine': 1B0 before 1F0 on device 1.
      1B0 needs 1F0
      fix: move 1F0 before 1B0
    """
    if blocking and not schedule.communicates:
        _check_actions(schedule)
        schedule = schedule.with_communication()
    _check_actions(schedule)
    _check_complete(schedule)
    _check_rows(schedule)
    _check_matched(schedule)
    if blocking:
        _check_channels(schedule)
    play(schedule, blocking=blocking)
    return _check_buffers(schedule, buffers)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations that each device holds at once.

    >>> from pfx.schedules.text import parse
    >>> peak_activations(parse("0F0 0I0 0F1 0W0 0I1 0W1"))
    (2,)
    """
    live = _live(schedule)
    return tuple(max((count for _, count in row), default=0) for row in live)


def _live(schedule: Schedule) -> Iterator[list[tuple[Action, int]]]:
    """Yield for each device its computations with the activations alive while they run."""
    trains = any(action.kind in ("B", "I", "W") for _, action in schedule.actions())
    for row in schedule.devices:
        counts: list[tuple[Action, int]] = []
        live = 0
        for action in row:
            live += action.kind == "F"
            counts.append((action, live))
            live -= action.kind in ("B", "W") or (action.kind == "F" and not trains)
        yield counts


def _check_actions(schedule: Schedule) -> None:
    """Check every action by itself, and that a stage is on one device."""
    if len(schedule.place) != schedule.stages:
        _refuse(
            schedule,
            f"{schedule.stages} stages have {len(schedule.place)} places.",
            fix="give `place` the device of each stage",
        )
    seen: set[Action] = set()
    for device, action in schedule.actions():
        _check_action(schedule, device, action)
        if action in seen:
            _refuse(schedule, f"{action} occurs twice.", fix=f"drop one {action}")
        seen.add(action)


def _check_action(schedule: Schedule, device: int, action: Action) -> None:
    if action.kind not in KINDS:
        _refuse(schedule, f"{action} has no known kind.", fix=f"use one of {' '.join(KINDS)}")
    for what, number, size in (
        ("stage", action.stage, schedule.stages),
        ("microbatch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= number < size:
            _refuse(
                schedule,
                f"{action} on device {device} is of {what} {number}, but there are {size}.",
                fix=f"number every {what} from 0 to {size - 1}",
            )
    place = schedule.place[action.stage]
    if place != device:
        _refuse(
            schedule,
            f"{action} is on device {device}, but stage {action.stage} is on device {place}.",
            fix="keep every action of a stage on one device",
        )


def _check_complete(schedule: Schedule) -> None:
    """Check that each microbatch passes each stage once, forward and backward."""
    have: dict[tuple[int, int], str] = {}
    for _, action in schedule.actions():
        if action.kind in COMPUTATIONS:
            key = action.stage, action.microbatch
            have[key] = "".join(sorted(have.get(key, "") + action.kind))
    trains = any(kinds != "F" for kinds in have.values())
    wanted = ("BF", "FIW") if trains else ("F",)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = have.get((stage, microbatch), "")
            if kinds not in wanted:
                _refuse_kinds(schedule, stage, microbatch, kinds)


def _refuse_kinds(schedule: Schedule, stage: int, microbatch: int, kinds: str) -> NoReturn:
    if "F" not in kinds:
        missing = f"{stage}F{microbatch}"
        _refuse(schedule, f"{missing} is missing.", fix=f"add {missing}, or drop its microbatch")
    found = " ".join(f"{stage}{kind}{microbatch}" for kind in kinds)
    _refuse(
        schedule,
        f"stage {stage} has no whole backward of microbatch {microbatch}.",
        f"it has {found}",
        fix=f"give it {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}",
    )


def _check_rows(schedule: Schedule) -> None:
    """Check that what an action needs from its own device comes before it."""
    for device, row in enumerate(schedule.devices):
        where = {value(action): index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            for need in needs(action, schedule):
                if where.get(need, -1) > index:
                    first = row[where[need]]
                    _refuse(
                        schedule,
                        f"{action} before {first} on device {device}.",
                        f"{action} needs {first}",
                        fix=f"move {first} before {action}",
                    )


def _check_matched(schedule: Schedule) -> None:
    """Check that the sends and receives are those which the computations need."""
    if not schedule.communicates:
        return
    expected = _transfers(schedule.with_communication())
    present = _transfers(schedule)
    for action in present:
        if action not in expected:
            _refuse(
                schedule,
                f"{action} transfers what no other device needs.",
                fix=f"drop {action} and its partner",
            )
    for action in expected:
        if action not in present:
            other = partner(action)
            waits = f"device {schedule.place[other.stage]} has its partner {other}"
            _refuse(
                schedule,
                f"{action} is missing on device {schedule.place[action.stage]}.",
                waits if other in present else "",
                fix=f"add {action}, or let schedule.with_communication() write all of them",
            )


def _transfers(schedule: Schedule) -> Counter[Action]:
    """Return the sends and receives, in order; each occurs once."""
    return Counter(action for _, action in schedule.actions() if action.kind not in COMPUTATIONS)


def _check_channels(schedule: Schedule) -> None:
    """Check that two devices agree on the order of what goes from the one to the other."""
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for device, action in schedule.actions():
        if action.kind.startswith("SEND"):
            other = schedule.place[partner(action).stage]
            sends.setdefault((device, other), []).append(action)
        elif action.kind.startswith("RECV"):
            other = schedule.place[partner(action).stage]
            receives.setdefault((other, device), []).append(action)
    for (sender, receiver), sent in sends.items():
        for send, receive in zip(sent, receives[sender, receiver], strict=True):
            if partner(send) != receive:
                _refuse(
                    schedule,
                    f"{send} on device {sender} meets {receive} on device {receiver}.",
                    "transfers that block must be sent and received in one order",
                    fix=f"receive {partner(send)} there, or send {partner(receive)} first",
                )


def _check_buffers(schedule: Schedule, buffers: int | None) -> tuple[int, ...]:
    for device, row in enumerate(_live(schedule)):
        for action, count in row:
            if buffers is not None and count > buffers:
                _refuse(
                    schedule,
                    f"{action} makes device {device} hold {count} activations.",
                    f"{buffers} may be held at once",
                    fix=f"run a backward before {action}, or allow buffers={count}",
                )
    return peak_activations(schedule)


def _refuse(schedule: Schedule, what: str, *details: str, fix: str) -> NoReturn:
    raise ScheduleError(message(f"schedule {schedule.name!r}:", what, *details, fix=fix))
