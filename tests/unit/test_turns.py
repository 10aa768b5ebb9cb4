"""The messages around a device's actions: posted in the order they are sent, taken when needed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pfx.compiler.ir import Value
from pfx.mesh import make_mesh
from pfx.runtime.pipeline_device import Form
from pfx.runtime.turns import Message, Turn, messages, turns
from pfx.schedules import Schedule, build
from pfx.spec import Layout

CASES = [
    build(name, stages=devices, microbatches=microbatches, virtual=virtual)
    for name, virtuals in (
        *((name, (1,)) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
        *((name, (2,)) for name in ("zb-v", "dualpipe-v")),
        *((name, (1, 2, 3)) for name in ("interleaved", "forward")),
    )
    for virtual in virtuals
    for devices in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 8)
]


def named(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.stages}/{schedule.num_devices}-{schedule.microbatches}"


class Play:
    """All devices, with connections that carry each message as soon as its receive is posted."""

    def __init__(self, schedule: Schedule, ahead: int) -> None:
        self.turns = [turns(schedule, d, ahead) for d in range(schedule.num_devices)]
        self.at = [0] * schedule.num_devices
        self.posted: dict[tuple[int, int], list[Message]] = {}
        self.sent: dict[tuple[int, int], list[Message]] = {}
        self.taken: set[Message] = set()
        self.made: set[tuple[int, str, int]] = set()
        self.most: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        """Let each device run as far as it can, until none can."""
        while any(self.step(d) for d in range(len(self.turns))):
            pass
        assert self.at == [len(row) for row in self.turns], "no device can go on"
        assert self.posted == self.sent
        assert self.taken == {m for queue in self.sent.values() for m in queue}

    def step(self, device: int) -> bool:
        if self.at[device] == len(self.turns[device]):
            return False
        turn = self.turns[device][self.at[device]]
        sent = self.sent.get((turn.takes.source, device), []) if turn.takes else []
        if turn.takes and turn.takes not in sent:
            return False
        self.at[device] += 1
        self.play(device, turn)
        return True

    def play(self, device: int, turn: Turn) -> None:
        action = turn.action
        for message in turn.posts:
            assert message.to == device
            self.posted.setdefault((message.source, device), []).append(message)
        if turn.takes:
            assert turn.takes.stage == action.stage
            assert turn.takes in self.posted[turn.takes.source, device]
            self.taken.add(turn.takes)
            waiting = set(self.posted[turn.takes.source, device]) - self.taken
            place = turn.takes.source, device
            self.most[place] = max(self.most[place], len(waiting))
        for message in turn.arrived:
            assert message.source == device
            assert message in self.taken, "waits for what has not arrived"
        if turn.sends and turn.sends.to != device:
            self.sent.setdefault((device, turn.sends.to), []).append(turn.sends)
        self.made.add((action.stage, action.kind, action.microbatch))


@pytest.mark.parametrize("schedule", CASES, ids=named)
def test_all_devices_play_to_the_end(schedule: Schedule) -> None:
    """Receives are in the order of the sends, all actions run, and nothing is waited for too soon."""
    play = Play(schedule, 2)
    play.run()
    assert play.made == {(a.stage, a.kind, a.microbatch) for _, a in schedule.actions()}
    for (source, to), queue in play.posted.items():
        assert queue == [m for m in messages(schedule) if (m.source, m.to) == (source, to)]


def test_receives_are_posted_ahead_but_not_all_at_once() -> None:
    """A device of 1F1B holds two messages for later, however many microbatches there are."""
    for ahead in (0, 1, 2):
        play = Play(build("1f1b", stages=4, microbatches=16), ahead)
        play.run()
        assert set(play.most.values()) == {ahead}


def test_what_has_arrived_is_let_go_of_in_time() -> None:
    """Of 16 activations that a stage of 1F1B sends, at most two more than are in use are held."""
    for device, use in ((0, 4), (1, 3), (2, 2)):
        held, most = 0, 0
        for turn in turns(build("1f1b", stages=4, microbatches=16), device):
            held -= sum(message.kind == "F" for message in turn.arrived)
            held += turn.action.kind == "F"
            most = max(most, held)
        assert most <= use


def test_several_tensors_are_one_message() -> None:
    """Whatever their dtypes and shapes; a single tensor is sent as it is."""
    mesh = make_mesh("simulated", a=2)
    shapes = [
        ((4, 3), torch.bool),
        ((), torch.float64),
        ((0, 2), torch.int64),
        ((2, 5), torch.bfloat16),
    ]
    values = [
        Value(i, shape, dtype, Layout(((),) * len(shape)))
        for i, (shape, dtype) in enumerate(shapes)
    ]
    form = Form(values, mesh)
    tensors = [
        torch.arange(16)[: max(1, v.shape[0] if v.shape else 1)].sum().expand(v.shape).to(v.dtype)
        for v in values
    ]
    buffer = form.pack(tensors)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == form.buffer(torch.device("cpu")).shape
    for got, want in zip(form.unpack(buffer.clone()), tensors, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    alone = Form([Value(0, (4, 3), torch.float32, Layout((("a",), ())))], mesh)
    part = torch.randn(2, 3)
    assert alone.pack([part]) is part
    assert alone.buffer(part.device).shape == part.shape
    assert alone.unpack(part) == [part]
