"""What an action needs, and an order of all devices' actions that respects it.

The order is found by playing: each device runs its next action as soon as what it needs is there.
Devices only ever wait for values, so if one order exists, playing in any turn finds one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from pfx.errors import message
from pfx.schedules.action import Action, Schedule, ScheduleError

Value = tuple[str, int, int]
"""A thing that an action makes: what, stage, microbatch."""

# A whole backward and an input gradient make the same thing: the gradient that the stage before
# waits for. Only an I makes something a W can use, which ``validate`` checks by counting.
_MAKES = {"I": "B"}


def value(action: Action) -> Value:
    """Return what the action makes, for others to wait for.

    >>> value(Action(1, "I", 0)) == value(Action(1, "B", 0))
    True
    """
    return _MAKES.get(action.kind, action.kind), action.stage, action.microbatch


def needs(action: Action, schedule: Schedule) -> Iterator[Value]:
    """Yield what must be there before the action can run.

    >>> act = Action.parse
    >>> rows = ((act("0F0"), act("0B0")), (act("1F0"), act("1B0")))
    >>> list(needs(act("0B0"), Schedule("tiny", 2, 1, rows, (0, 1))))
    [('F', 0, 0), ('B', 1, 0)]
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind == "RECV_F":
        yield "SEND_F", stage - 1, microbatch
    elif kind == "RECV_B":
        yield "SEND_B", stage + 1, microbatch
    elif kind in ("SEND_F", "SEND_B"):
        yield kind[-1], stage, microbatch
    elif kind == "W":
        yield "B", stage, microbatch
    elif kind == "F":
        yield from _arrival("F", action, stage - 1, schedule)
    else:
        yield "F", stage, microbatch
        yield from _arrival("B", action, stage + 1, schedule)


def _arrival(letter: str, action: Action, other: int, schedule: Schedule) -> Iterator[Value]:
    if not 0 <= other < schedule.stages:
        return
    apart = schedule.place[other] != schedule.place[action.stage]
    if apart and schedule.communicates:
        yield f"RECV_{letter}", action.stage, action.microbatch
    else:
        yield letter, other, action.microbatch


def partner(action: Action) -> Action:
    """Return the other end of a send or a receive.

    >>> str(partner(Action(0, "SEND_F", 3))), str(partner(Action(0, "RECV_B", 3)))
    ('1RECV_F3', '1SEND_B3')
    """
    end, letter = action.kind.split("_")
    ahead = (end == "SEND") == (letter == "F")
    other = action.stage + 1 if ahead else action.stage - 1
    return action.at(other, f"{'RECV' if end == 'SEND' else 'SEND'}_{letter}")


def play(
    schedule: Schedule, *, blocking: bool = False, seed: int | None = None
) -> list[tuple[int, Action]]:
    """Return ``(device, action)`` of all devices in an order in which every need is met.

    Args:
        schedule: what to play.
        blocking: whether a send holds its device until the receive is reached (a rendezvous)
            instead of leaving the value behind; only for schedules with sends and receives.
        seed: draws which of the devices that could run does so next; None: in turn, as far as
            each can.

    Raises:
        ScheduleError: no device can run its next action; what each one waits for is listed.

    >>> act = Action.parse
    >>> rows = ((act("0F0"), act("0B0")), (act("1F0"), act("1B0")))
    >>> [str(action) for _, action in play(Schedule("tiny", 2, 1, rows, (0, 1)))]
    ['0F0', '1F0', '1B0', '0B0']
    """
    player = _Player(schedule, blocking=blocking)
    turn = player.turn if seed is None else functools.partial(player.draw, random.Random(seed))
    while turn():
        pass
    if player.waiting():
        raise ScheduleError(_stuck(player))
    return player.played


class _Player:
    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self.schedule = schedule
        self.blocking = blocking
        self.at = [0] * schedule.num_devices
        self.made: set[Value] = set()
        self.played: list[tuple[int, Action]] = []

    def turn(self) -> bool:
        """Let each device run as far as it can; return whether anything ran."""
        before = len(self.played)
        for device in range(self.schedule.num_devices):
            while self._step(device):
                pass
        return len(self.played) > before

    def draw(self, rng: random.Random) -> bool:
        """Let one device, drawn from all, run one action; return whether one could."""
        devices = list(range(self.schedule.num_devices))
        rng.shuffle(devices)
        return any(self._step(device) for device in devices)

    def next(self, device: int) -> Action | None:
        row = self.schedule.devices[device]
        return row[self.at[device]] if self.at[device] < len(row) else None

    def waiting(self) -> list[tuple[int, Action]]:
        heads = ((device, self.next(device)) for device in range(self.schedule.num_devices))
        return [(device, action) for device, action in heads if action is not None]

    def missing(self, action: Action) -> list[Value]:
        return [need for need in needs(action, self.schedule) if need not in self.made]

    def _step(self, device: int) -> bool:
        action = self.next(device)
        if action is None or self.missing(action):
            return False
        if self.blocking and action.kind.startswith("SEND"):
            return self._meet(device, action)
        self._run(device, action)
        return True

    def _meet(self, device: int, send: Action) -> bool:
        """Run a send and its receive together, if the receiver has come to it."""
        receive = partner(send)
        receiver = self.schedule.place[receive.stage]
        if self.next(receiver) != receive:
            return False
        self._run(device, send)
        self._run(receiver, receive)
        return True

    def _run(self, device: int, action: Action) -> None:
        self.made.add(value(action))
        self.played.append((device, action))
        self.at[device] += 1


def _stuck(player: _Player) -> str:
    lines: list[str] = []
    for device, action in player.waiting():
        missing = player.missing(action)
        if missing:
            what = ", ".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in missing)
        else:
            what = f"{partner(action)} to be reached"
        lines.append(f"device {device}: {action} waits for {what}")
    fix = "move what a device waits for before what the other device waits for"
    if player.blocking:
        fix = "post sends without blocking, or put each device's sends and receives in one order"
    where = f"schedule {player.schedule.name!r}:"
    return message(where, "no runnable action.", *lines, fix=fix)
