"""Schedules whose stages make gradients in the order of the microbatches.

Sums of floating-point numbers depend on their order. A schedule may take microbatches in any order;
so that all give the same bits, a weight gradient whose turn has not come is put off until it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pfx.schedules.action import Action, Schedule


def in_turn(schedule: Schedule) -> Schedule:
    """Return the schedule with every stage's gradients of weights made in microbatch order.

    A whole backward that comes early becomes the gradient of its input, at once, and that of the
    weights, later. A schedule that has the order already, as all built ones do, stays as it is.

    >>> from pfx.schedules.text import parse
    >>> print(in_turn(parse("0F0 0F1 0B1 0B0")))
    device 0: 0F0 0F1 0I1 0I0 0W0 0W1
    """
    rows = tuple(tuple(_in_turn(row)) for row in schedule.devices)
    return replace(schedule, devices=rows)


def _in_turn(row: Sequence[Action]) -> Iterator[Action]:
    late = {stage for stage in {a.stage for a in row} if not _ordered(row, stage)}
    ready: dict[int, set[int]] = {stage: set() for stage in late}
    turn = dict.fromkeys(late, 0)
    for action in row:
        stage = action.stage
        if stage not in late or action.kind not in ("B", "W"):
            yield action
            continue
        if action.kind == "B":
            yield action.at(stage, "I")
        ready[stage].add(action.microbatch)
        while turn[stage] in ready[stage]:
            yield Action(stage, "W", turn[stage])
            turn[stage] += 1


def _ordered(row: Sequence[Action], stage: int) -> bool:
    made = [a.microbatch for a in row if a.stage == stage and a.kind in ("B", "W")]
    return made == sorted(made)
