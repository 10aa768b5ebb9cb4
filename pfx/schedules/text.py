"""Schedules from text: pfx's own form, a bare grid, or the CSV of ``torch.distributed.pipelining``.

The text may come from anywhere, so nothing in it is trusted: every complaint names the line and the
cell, and no number in it decides how much memory is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pfx.errors import message
from pfx.schedules.action import COMPUTATIONS, Action, Schedule, ScheduleError

_DEVICE = re.compile(r"device\s+([0-9]{1,6})\s*:")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
# What torch writes for FSDP's parameters inside a stage: no part of the order of the pipeline.
_PARAMETERS = re.compile(r"[0-9]{1,6}(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,6}")


def parse(text: str, *, name: str = "custom") -> Schedule:
    """Read a schedule from text: ``parse(schedule.text()) == schedule``.

    A line is a device and holds its actions in order, separated by spaces, with or without the
    ``device 0:`` in front. A line with commas is a row of the CSV that torch.distributed.pipelining
    writes: an empty cell is idle time, an ``OVERLAP_F_B`` stands for the actions inside it, and the
    bookkeeping of FSDP's parameters (``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``) is left out. Empty
    lines and lines that start with ``#`` are skipped. The device of a stage is the one that
    computes it.

    Reading checks no order: that is what ``pfx.schedules.validate`` does. The CSV with transfers
    posts receives long before they are used; ``.computations().with_communication()`` of what is
    read moves them to where they are.

    Args:
        text: the schedule, one device a line.
        name: what to call it.

    Raises:
        ScheduleError: a cell is no action, a stage has no device or two, or there is nothing.

    >>> schedule = parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")
    >>> schedule.stages, schedule.microbatches, schedule.place
    (2, 2, (0, 1))
    >>> parse("0F0,,,0B0\\r\\n,1F0,1B0,") == parse("device 0: 0F0 0B0\\ndevice 1: 1F0 1B0")
    True
    """
    devices: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        body = line.strip().removeprefix("\ufeff")
        if body and not body.startswith("#"):
            devices.append(tuple(_row(body, number, len(devices))))
    place = _place(devices)
    microbatches = 1 + max(action.microbatch for row in devices for action in row)
    return Schedule(name, len(place), microbatches, tuple(devices), place)


def _row(line: str, number: int, device: int) -> Iterator[Action]:
    head = _DEVICE.match(line)
    if head is not None and int(head[1]) != device:
        raise ScheduleError(
            message(
                f"schedule: line {number}",
                f"names device {int(head[1])}, but is the row of device {device}.",
                fix=f"write the devices in order from 0, or drop {head[0]!r}",
            )
        )
    rest = line[head.end() :] if head is not None else line
    cells = rest.split(",") if "," in rest else rest.split()
    for column, cell in enumerate(cells, start=1):
        yield from _cell(cell.strip().strip('"').strip(), f"line {number}, cell {column}")


def _cell(cell: str, where: str) -> Iterator[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    for part in (overlap[1] if overlap is not None else cell).split(";"):
        word = part.strip()
        if word and not _PARAMETERS.fullmatch(word):
            yield _action(word, where)


def _action(word: str, where: str) -> Action:
    try:
        return Action.parse(word)
    except ScheduleError as error:
        raise ScheduleError(f"schedule: {where}: {error}") from None


def _place(devices: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the device of each stage: the one that computes it."""
    found: dict[int, int] = {}
    for device, row in enumerate(devices):
        for action in row:
            if action.kind in COMPUTATIONS and found.setdefault(action.stage, device) != device:
                _refuse_two(action, found[action.stage], device)
    if not found:
        raise ScheduleError(message("schedule:", "the text holds no computation.", fix="0F0 0B0"))
    stages = 1 + max(action.stage for row in devices for action in row)
    missing = next((stage for stage in range(stages) if stage not in found), None)
    if missing is not None:
        raise ScheduleError(
            message(
                f"schedule: stage {missing}",
                "is computed by no device.",
                f"the stages run from 0 to {stages - 1}",
                fix=f"add the actions of stage {missing} to a line, or number the stages from 0",
            )
        )
    return tuple(found[stage] for stage in range(stages))


def _refuse_two(action: Action, first: int, second: int) -> None:
    raise ScheduleError(
        message(
            f"schedule: stage {action.stage}",
            f"is computed on device {first} and on device {second} ({action}).",
            fix="keep every action of a stage on one line",
        )
    )
