"""The data of a pipeline schedule: what each device does, in order.

A schedule says nothing about tensors or time. It lists, for every device, which stage works on
which microbatch and in which order; everything else (is it legal, how long does it take, how much
memory does it hold) is a function of that list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self, get_args

from pfx.errors import PfxError, message
from pfx.schedules.communication import insert_communication

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
KINDS: tuple[str, ...] = get_args(Kind)
COMPUTATIONS: tuple[str, ...] = ("F", "B", "I", "W")

# Six digits: a number from an untrusted file never becomes a range that fills the memory.
_ACTION = re.compile(r"([0-9]{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]{1,6})")


class ScheduleError(PfxError, ValueError):
    """A pipeline schedule that cannot be read, built or run."""


@dataclass(frozen=True, slots=True)
class Action:
    """Name one thing that a device does: a kind of work of one stage on one microbatch.

    The kinds are ``F`` (forward), ``B`` (whole backward), ``I`` (gradient of the input only), ``W``
    (gradient of the weights only), and the four ends of a transfer: ``SEND_F`` and ``RECV_F`` of an
    activation, ``SEND_B`` and ``RECV_B`` of a gradient, each with the number of the stage that
    sends or receives.

    >>> str(Action(0, "F", 3))
    '0F3'
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form of one action; raise ``ScheduleError`` if it is not one.

        >>> Action.parse("2SEND_F1")
        Action(stage=2, kind='SEND_F', microbatch=1)
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                message(
                    f"action {text.strip()[:40]!r}",
                    "cannot be read.",
                    f"an action is a stage, one of {' '.join(KINDS)}, and a microbatch",
                    fix='write it as "0F3", "2B1", "1W1" or "0SEND_F3"',
                )
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))

    def at(self, stage: int, kind: str) -> Self:
        """Return the action of another stage and kind on the same microbatch.

        >>> str(Action(0, "F", 3).at(1, "RECV_F"))
        '1RECV_F3'
        """
        return replace(self, stage=stage, kind=kind)


@dataclass(frozen=True)
class Schedule:
    """Hold what every device of a pipeline does, in order.

    Two schedules are equal when their actions, sizes and places are; the name is a label.

    Args:
        name: what to call it in prints and errors.
        stages: the number of stages over all devices.
        microbatches: the number of microbatches of one step.
        devices: for each device its actions, in order.
        place: the device of each stage.

    >>> act = Action.parse
    >>> schedule = Schedule("tiny", 2, 1, ((act("0F0"), act("0B0")), (act("1F0"), act("1B0"))), (0, 1))
    >>> print(schedule)
    device 0: 0F0 0B0
    device 1: 1F0 1B0
    """

    name: str = field(compare=False)
    stages: int
    microbatches: int
    devices: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def virtual(self) -> int:
        """The number of stages on the device that has most of them."""
        return max((self.place.count(device) for device in set(self.place)), default=0)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Iterate over ``(device, action)``, device by device, in order."""
        for device, actions in enumerate(self.devices):
            for action in actions:
                yield device, action

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives are written out."""
        return any(action.kind not in COMPUTATIONS for _, action in self.actions())

    def text(self) -> str:
        """Return one line per device; ``pfx.schedules.parse`` reads it back."""
        lines = (
            " ".join((f"device {device}:", *map(str, actions)))
            for device, actions in enumerate(self.devices)
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def computations(self) -> Schedule:
        """Return the same schedule without sends and receives."""
        devices = (tuple(a for a in row if a.kind in COMPUTATIONS) for row in self.devices)
        return replace(self, devices=tuple(devices))

    def with_communication(self) -> Schedule:
        """Return the same computations with every send and receive written out.

        A value is sent right after the computation that makes it and received right before the one
        that needs it. Nothing is sent between two stages of one device.

        >>> act = Action.parse
        >>> rows = ((act("0F0"), act("0B0")), (act("1F0"), act("1B0")))
        >>> print(Schedule("tiny", 2, 1, rows, (0, 1)).with_communication())
        device 0: 0F0 0SEND_F0 0RECV_B0 0B0
        device 1: 1RECV_F0 1F0 1B0 1SEND_B0
        """
        computations = self.computations()
        return replace(self, devices=insert_communication(computations.devices, self.place))
