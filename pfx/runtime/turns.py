"""One device's turns in a pipeline: its actions in order, and the messages around each of them.

All devices know the whole schedule, so they know all messages. The messages from one device to
another are received in the order in which they are sent, whatever order they are needed in: receives
are posted in that order, ahead of need, and waited for when needed. So no device waits for another
to take something, and no schedule that can run at all deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pfx.schedules.action import Action, Schedule

AHEAD = 2  # messages that a device may receive before it needs them, from each of the others


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage needs from its neighbour for a microbatch: an activation (F), or its gradient (B)."""

    kind: str
    stage: int
    microbatch: int
    source: int
    to: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One action, with the messages around it.

    Attributes:
        posts: whose receives are to be posted first.
        takes: what the action then waits for.
        arrived: messages sent from here that must have arrived, since what is taken was sent later.
        sends: what the action makes for another device, or for another stage of this one.
    """

    action: Action
    posts: tuple[Message, ...]
    takes: Message | None
    arrived: tuple[Message, ...]
    sends: Message | None


def messages(schedule: Schedule) -> Iterator[Message]:
    """Everything that is sent from one device to another, each device's in order."""
    for row in schedule.computations().devices:
        for action in row:
            message = _sent(action, schedule)
            if message and message.source != message.to:
                yield message


def turns(schedule: Schedule, device: int, ahead: int = AHEAD) -> list[Turn]:
    """The turns of a device.

    Args:
        ahead: how many messages of each other device may be received before they are needed.

    >>> from pfx.schedules import build
    >>> last = turns(build("gpipe", stages=2, microbatches=3), 1)
    >>> print(*(f"{turn.action} posts {len(turn.posts)}" for turn in last[:3]), sep=", ")
    1F0 posts 3, 1F1 posts 0, 1F2 posts 0
    """
    schedule = schedule.computations()
    row = schedule.devices[device]
    queues: dict[int, list[Message]] = {}
    for message in messages(schedule):
        if message.to == device:
            queues.setdefault(message.source, []).append(message)
    places = {message: k for queue in queues.values() for k, message in enumerate(queue)}
    proofs = {source: _proofs(schedule, device, source) for source in queues}
    posted, taken = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)
    out = []
    for action in row:
        takes, sends = _taken(action, schedule), _sent(action, schedule)
        if takes and takes.source == device:
            takes = None  # handed over by the action that makes it
        least = dict.fromkeys(queues, 0)
        arrived: tuple[Message, ...] = ()
        if takes:
            taken[takes.source] += 1
            least[takes.source] = places[takes] + 1
            arrived = proofs[takes.source].get(takes, ())
        posts: list[Message] = []
        for source, queue in queues.items():
            until = max(posted[source], least[source], taken[source] + ahead)
            posts += queue[posted[source] : until]
            posted[source] = min(until, len(queue))
        out.append(Turn(action, tuple(posts), takes, arrived, sends))
    return out


def _proofs(schedule: Schedule, device: int, source: int) -> dict[Message, tuple[Message, ...]]:
    """For each message from `source`, those of ours that it had taken before, but not told before."""
    found: dict[Message, tuple[Message, ...]] = {}
    since: list[Message] = []
    for action in schedule.devices[source]:
        takes, sends = _taken(action, schedule), _sent(action, schedule)
        if takes and takes.source == device:
            since.append(takes)
        if sends and sends.to == device:
            found[sends], since = tuple(since), []
    return found


def _taken(action: Action, schedule: Schedule) -> Message | None:
    """What an action needs from the stage before it, or in a backward pass from the one after."""
    if action.kind == "W":
        return None
    kind, other = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
    if not 0 <= other < schedule.stages:
        return None
    return _message(kind, action.stage, action.microbatch, other, schedule)


def _sent(action: Action, schedule: Schedule) -> Message | None:
    """What an action makes for the stage after it, or in a backward pass for the one before."""
    if action.kind == "W":
        return None
    kind, other = ("F", action.stage + 1) if action.kind == "F" else ("B", action.stage - 1)
    if not 0 <= other < schedule.stages:
        return None
    return _message(kind, other, action.microbatch, action.stage, schedule)


def _message(kind: str, stage: int, microbatch: int, maker: int, schedule: Schedule) -> Message:
    return Message(kind, stage, microbatch, schedule.place[maker], schedule.place[stage])
