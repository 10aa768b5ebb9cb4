"""Messages between the devices along an axis, beside their collectives.

NCCL runs what goes over one connection in the order in which both ends ask for it, tags or not. So
messages up and down the axis have groups, that is connections, of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pfx.mesh import Coordinate, Mesh
from pfx.runtime.process_group import failed, handle_of


class ProcessMessage:
    """A message under way; its memory is held until it is waited for."""

    __slots__ = ("handle", "name", "tensor", "work")

    def __init__(self, work: Any, tensor: torch.Tensor, handle: Any, name: str) -> None:
        self.work, self.tensor, self.handle, self.name = work, tensor, handle, name

    def wait(self) -> None:
        """Return when it has arrived.

        Raises:
            RuntimeMismatchError: when the other end died or took longer than the timeout.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise failed(error, self.handle, f"a message {self.name}") from error


class ProcessChannels:
    """One device's channels to the others along an axis, which are numbered by their coordinate."""

    def __init__(self, here: int, handles: Sequence[Any], device: str, name: str) -> None:
        self.here, self.handles, self.device, self.name = here, handles, device, name

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Say hello from the first to the second of each pair; all devices name the same pairs.

        The first message between two NCCL processes waits for both. Here no device waits for one
        that waits for it, since all go through the pairs in one order.
        """
        hello = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, to in sorted(pairs):
            if source == self.here:
                self.send(hello, to).wait()
            elif to == self.here:
                self.receive(hello, source).wait()

    def send(self, tensor: torch.Tensor, to: int) -> ProcessMessage:
        """Begin to send a contiguous tensor, which must not change before it has arrived."""
        handle, flat = self._way(self.here, to), tensor.view(-1).view(torch.uint8)
        try:
            work = dist.isend(flat, group=handle, group_dst=to)
        except RuntimeError as error:
            raise failed(error, handle, f"a message {self._name(self.here, to)}") from error
        return ProcessMessage(work, tensor, handle, self._name(self.here, to))

    def receive(self, tensor: torch.Tensor, source: int) -> ProcessMessage:
        """Begin to receive into a contiguous tensor, after all that was asked for from there before."""
        handle, flat = self._way(source, self.here), tensor.view(-1).view(torch.uint8)
        try:
            work = dist.irecv(flat, group=handle, group_src=source)
        except RuntimeError as error:
            raise failed(error, handle, f"a message {self._name(source, self.here)}") from error
        return ProcessMessage(work, tensor, handle, self._name(source, self.here))

    def _way(self, source: int, to: int) -> Any:
        return self.handles[source > to]

    def _name(self, source: int, to: int) -> str:
        return f"from {source} to {to} of {self.name}"


def channels_of(
    mesh: Mesh,
    axis: str,
    coordinate: Coordinate,
    timeout: float,
    pairs: Collection[tuple[int, int]],
) -> ProcessChannels:
    """This process's channels along an axis; all devices along it must ask for them together.

    Args:
        timeout: seconds that a message may take.
        pairs: which device will send to which.
    """
    members = tuple(mesh.index({**coordinate, **along}) for along in mesh.coordinates((axis,)))
    uses = (f"{axis} up", f"{axis} down") if pairs else ()
    handles = [handle_of(dist.group.WORLD, members, timeout, use) for use in uses]
    made = ProcessChannels(coordinate[axis], handles, mesh.device, f"{axis} of {mesh}")
    made.connect(pairs)
    return made
