"""Sends and receives, written out from the computations and the place of each stage.

Activations go from a stage to the next, gradients to the one before. This file knows an action only
by its three fields, so that the data type can offer the insertion as a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, TypeVar


class Step(Protocol):
    """What the insertion needs to know of an action."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    def at(self, stage: int, kind: str) -> Self: ...


A = TypeVar("A", bound=Step)


def insert_communication(
    devices: Sequence[Sequence[A]], place: Sequence[int]
) -> tuple[tuple[A, ...], ...]:
    """Return the rows with a receive before each computation that needs one and a send after.

    Args:
        devices: for each device its computations, in order.
        place: the device of each stage.

    >>> from pfx.schedules.action import Action
    >>> rows = insert_communication([[Action(0, "F", 0)], [Action(1, "F", 0)]], [0, 1])
    >>> [[str(action) for action in row] for row in rows]
    [['0F0', '0SEND_F0'], ['1RECV_F0', '1F0']]
    """
    return tuple(tuple(b for a in row for b in _surrounded(a, place)) for row in devices)


def _surrounded(action: A, place: Sequence[int]) -> Iterator[A]:
    before, after, letter = _neighbours(action)
    if _apart(action.stage, before, place):
        yield action.at(action.stage, f"RECV_{letter}")
    yield action
    if _apart(action.stage, after, place):
        yield action.at(action.stage, f"SEND_{letter}")


def _neighbours(action: Step) -> tuple[int, int, str]:
    """Return the stage a value comes from, the stage the result goes to, and what travels."""
    stage = action.stage
    if action.kind == "F":
        return stage - 1, stage + 1, "F"
    if action.kind in ("B", "I"):
        return stage + 1, stage - 1, "B"
    return -1, -1, ""


def _apart(stage: int, other: int, place: Sequence[int]) -> bool:
    return 0 <= other < len(place) and place[stage] != place[other]
