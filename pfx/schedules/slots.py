"""The notation in which the built-in schedules are written: a device's slots, not yet numbered.

A slot is a kind and the device's own chunk, ``"F0"`` or ``"W1"``. Every schedule takes the
microbatches of a stage in order, so the numbers follow from the slots alone, and a family is a few
repetitions: ``["F0"] * 2 + ["F0", "B0"] * 4 + ["B0"] * 2`` is a device of 1F1B.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from pfx.schedules.action import Action

Slots = list[str]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a pipeline is: its devices, the microbatches of a step, the stages per device."""

    devices: int
    microbatches: int
    virtual: int


def number(slots: Sequence[str], *, stages: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """Give each slot the next microbatch of its stage; leave out those that do not exist.

    Slots past the last microbatch let a family be written for a full pipeline only: what is left
    of an order that runs to its end still runs to its end.

    Args:
        slots: a device's slots; W takes the oldest microbatch of its stage whose I has run.
        stages: the stage of each of the device's chunks.
        microbatches: how many there are.

    >>> print(*number(["F0", "F0", "I0", "W0"], stages=[3], microbatches=1))
    3F0 3I0 3W0
    """
    following: Counter[tuple[int, bool]] = Counter()
    split: defaultdict[int, deque[int]] = defaultdict(deque)
    actions: list[Action] = []
    for slot in slots:
        kind, stage = slot[0], stages[int(slot[1:])]
        if kind == "W":
            microbatch = split[stage].popleft()
        else:
            microbatch = following[stage, kind == "F"]
            following[stage, kind == "F"] += 1
        if kind == "I":
            split[stage].append(microbatch)
        actions.append(Action(stage, kind, microbatch))
    return tuple(action for action in actions if action.microbatch < microbatches)
