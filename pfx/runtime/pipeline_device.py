"""Play one device's part of a pipeline: its stages' actions, and the messages between devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from pfx.compiler.ir import Block, PipelineInstr, Value
from pfx.mesh import Mesh
from pfx.runtime.pipeline import Run, StageRunner, Sums
from pfx.runtime.timed import Record, Watch
from pfx.runtime.turns import Message, messages, turns

Pairs = Collection[tuple[int, int]]
_ALIGNED = 16  # bytes: where a tensor of any dtype may begin


class UnderWay(Protocol):
    """A message being sent or received."""

    def wait(self) -> None:
        """Return when it has arrived."""
        ...


class Channels(Protocol):
    """How a device along an axis reaches the others; messages of one to another stay in order."""

    def send(self, tensor: torch.Tensor, to: int) -> UnderWay:
        """Begin to send a contiguous tensor."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> UnderWay:
        """Begin to receive into a contiguous tensor."""
        ...


class Form:
    """How several tensors travel as one: a single one as it is, more packed as bytes."""

    def __init__(self, values: Sequence[Value], mesh: Mesh) -> None:
        self.shapes = [value.local_shape(mesh) for value in values]
        self.dtypes = [value.dtype for value in values]
        self.slices: list[slice] = []
        self.size = 0
        for value in values:
            stop = self.size + value.local_bytes(mesh)
            self.slices.append(slice(self.size, stop))
            self.size = -(-stop // _ALIGNED) * _ALIGNED
        self.alone = len(values) == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (self.shapes, self.dtypes) == (
            other.shapes,
            other.dtypes,
        )

    __hash__ = None  # type: ignore[assignment]

    def buffer(self, device: torch.device) -> torch.Tensor:
        """Memory to receive into."""
        if self.alone:
            return torch.empty(self.shapes[0], dtype=self.dtypes[0], device=device)
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One contiguous tensor that holds all."""
        if self.alone:
            return tensors[0].contiguous()
        buffer = self.buffer(tensors[0].device)
        for place, tensor in zip(self.unpack(buffer), tensors, strict=True):
            place.copy_(tensor)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, without a copy."""
        if self.alone:
            return [buffer]
        return [
            buffer[part].view(dtype).view(shape)
            for part, dtype, shape in zip(self.slices, self.dtypes, self.shapes, strict=True)
        ]


class PipelineDevice:
    """An executable part of a pipeline, called with this device's part of every operand.

    Args:
        here: the device's coordinate along the pipeline's axis.
        prepare: makes the block of a phase callable.
        channels: gives the device's channels along an axis, ready for messages from the first to the
            second of each pair of devices.
        record: is told when each action started, with what it needs at hand, and ended.
    """

    def __init__(
        self,
        instr: PipelineInstr,
        here: int,
        prepare: Callable[[Block], Run],
        channels: Callable[[str, Pairs], Channels],
        record: Record | None = None,
    ) -> None:
        assert instr.schedule is not None
        self.instr, self.made, self.mesh = instr, instr.made, instr.body.mesh
        self.turns = turns(instr.schedule, here)
        self.here = here
        self.watch = Watch(record, self.mesh.device) if record else None
        once = functools.cache(prepare)  # stages of one form share their blocks
        self.runners = {
            s: StageRunner(stage, once)
            for s, stage in enumerate(instr.stages)
            if stage.device == here
        }
        self.places = {value.number: k for k, value in enumerate(instr.body.inputs)}
        self.forms = {
            (s, kind): Form(values, self.mesh)
            for s, stage in enumerate(instr.stages)
            for kind, values in stage.receives.items()
        }
        pairs = {(message.source, message.to) for message in messages(instr.schedule)}
        self.channels = channels(self.made.axis, pairs)

    def __call__(self, ins: list[torch.Tensor]) -> list[torch.Tensor]:
        """Play one step."""
        sums = Sums(self.instr, (self.here,), lambda value: 1, ins[0].device)
        gives = {s: self.gives(ins, s) for s in self.runners}
        mail = _Mail(self.channels, self.forms, ins[0].device)
        for turn in self.turns:
            action = turn.action
            runner = self.runners[action.stage]
            mail.post(turn.posts)
            if turn.takes:
                runner.receive(action.kind, action.microbatch, mail.take(turn.takes))
                mail.forget(turn.arrived)
            total = lambda i, s=action.stage: sums.own(i, s)[0]
            if self.watch:
                self.watch.start()
            sends, makes = runner(action.kind, action.microbatch, gives[action.stage], total)
            if (to := turn.sends) is not None:
                if to.to == self.here:
                    self.runners[to.stage].receive(to.kind, to.microbatch, sends)
                else:
                    mail.send(to, sends)
            for i, part in makes:
                sums.put(i, action.stage, action.microbatch, [part])
            if self.watch:
                self.watch.stop(action)
            del sends, makes  # large; they would outlive the next action
        mail.close()
        return [sums.part(i, self.here, 0) for i in range(len(self.made.outputs))]

    def gives(self, ins: list[torch.Tensor], s: int) -> Callable[[int, int], torch.Tensor]:
        """The operands of a stage: its rows of stacks, other consts, and rows of a microbatch."""
        start, stop = self.instr.stages[s].rows
        places, num_xs = self.places, self.made.num_xs
        consts = [
            const[start:stop] if is_stack else const
            for const, is_stack in zip(ins[num_xs:], self.made.stacks, strict=True)
        ]

        def give(number: int, microbatch: int) -> torch.Tensor:
            k = places[number]
            return ins[k][microbatch] if k < num_xs else consts[k - num_xs]

        return give


class _Mail:
    """The messages of one step."""

    def __init__(
        self,
        channels: Channels,
        forms: Mapping[tuple[int, str], Form],
        device: torch.device,
    ) -> None:
        self.channels, self.forms, self.device = channels, forms, device
        self.coming: dict[Message, tuple[torch.Tensor, UnderWay]] = {}
        self.sent: dict[Message, UnderWay] = {}

    def post(self, posts: Sequence[Message]) -> None:
        """Begin to receive messages."""
        for message in posts:
            buffer = self.forms[message.stage, message.kind].buffer(self.device)
            self.coming[message] = buffer, self.channels.receive(buffer, message.source)

    def take(self, message: Message) -> list[torch.Tensor]:
        """Wait for a message."""
        buffer, under_way = self.coming.pop(message)
        under_way.wait()
        return self.forms[message.stage, message.kind].unpack(buffer)

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send a message."""
        packed = self.forms[message.stage, message.kind].pack(tensors)
        self.sent[message] = self.channels.send(packed, message.to)

    def forget(self, arrived: Sequence[Message]) -> None:
        """Let go of the memory of messages that have arrived."""
        for message in arrived:
            self.sent.pop(message).wait()

    def close(self) -> None:
        """Wait until all messages have arrived."""
        assert not self.coming
        self.forget(tuple(self.sent))
