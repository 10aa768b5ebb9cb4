"""Groups of processes that move tensors, and how each backend does it best.

torch.distributed keeps the processes; what is cached here are handles to its groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pfx.errors import RuntimeMismatchError, message
from pfx.lax.manual.transport import Groups, Perm, team
from pfx.mesh import Coordinate, Mesh
from pfx.runtime.reduction import SMALL, Group
from pfx.spec import Axes

# The newer names replace deprecated ones of the same meaning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Up to so many bytes a part, gloo exchanges copies faster than it sends to each member in turn.
_SMALL_GATHER = 1 << 16


def group_of(
    mesh: Mesh,
    axes: Axes,
    coordinate: Coordinate,
    device: str,
    timeout: float,
    groups: Groups = (),
) -> Group:
    """This process's group along some axes: who differs from it only there, row-major in `axes`.

    With `groups` of those, its own. The first to ask for a group waits for its other members, so
    all must ask in the same order.
    """
    everyone = [mesh.index({**coordinate, **along}) for along in mesh.coordinates(axes)]
    ranks, place = team(groups, mesh.index(coordinate, axes), len(everyone))
    members = [everyone[rank] for rank in ranks]
    handle = handle_of(dist.group.WORLD, tuple(sorted(members)), timeout)
    kind = GlooGroup if device == "cpu" else NativeGroup
    return kind(handle, members, place, f"{','.join(axes)} of {mesh}")


@functools.lru_cache(maxsize=1024)
def handle_of(world: Any, members: tuple[int, ...], timeout: float, use: str = "") -> Any:
    """The process group of some ranks; `world` in the key forgets groups of an earlier start.

    Each `use` has connections of its own.
    """
    if not use and len(members) == dist.get_world_size(world):
        return world
    wait = timedelta(seconds=timeout)
    try:  # only members come: of thousands of ranks, most groups are the business of others
        return dist.new_group(list(members), timeout=wait, use_local_synchronization=True)
    except RuntimeError as error:
        raise RuntimeMismatchError(
            message(
                f"process mesh: ranks {', '.join(map(str, members))}",
                "could not connect.",
                str(error).splitlines()[0],
                fix="read what the other ranks printed: one of them failed first, or is late",
            )
        ) from error


class NativeGroup:
    """Collectives as the backend has them; rows are put in group order where ranks are not."""

    native_sum_from, native_scatter = 0, True

    def __init__(self, handle: Any, members: Sequence[int], rank: int, name: str) -> None:
        self.handle, self.size, self.rank, self.name = handle, len(members), rank, name
        ranks = sorted(members)  # torch numbers the members of a group by rank
        self.numbers = [ranks.index(member) for member in members]
        ours = list(range(self.size))
        self.to_ours = None if self.numbers == ours else self.numbers
        self.to_torch = None if self.numbers == ours else [self.numbers.index(i) for i in ours]

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """(n,) of each member -> (members, n), as bytes: a gather only carries."""
        rows = mine.new_empty((self.size, mine.numel()))
        self.call(_all_gather, _bytes(rows).view(-1), _bytes(mine))
        return _ordered(rows, self.to_ours)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """(members, n): row i is for member i -> (members, n): row i is from member i."""
        rows = _ordered(rows, self.to_torch)
        got = torch.empty_like(rows)
        self.call(dist.all_to_all_single, _bytes(got).view(-1), _bytes(rows).view(-1))
        return _ordered(got, self.to_ours)

    def permute(self, mine: torch.Tensor, perm: Perm) -> torch.Tensor:
        """(n,) of each member -> (n,): that of our source in `perm`, or zeros.

        An exchange whose rows are mostly empty: all members take part, as NCCL wants it of the first
        communication in a group, and a failure is one of all.
        """
        sends, gets = [0] * self.size, [0] * self.size  # bytes for and from each, in torch's order
        for source, to in perm:
            if source == self.rank:
                sends[self.numbers[to]] = mine.nbytes
            if to == self.rank:
                gets[self.numbers[source]] = mine.nbytes
        got = torch.empty_like(mine) if any(gets) else torch.zeros_like(mine)
        if mine.numel():
            exchange = functools.partial(
                dist.all_to_all_single, output_split_sizes=gets, input_split_sizes=sends
            )
            self.run(exchange, _bytes(got)[: sum(gets)], _bytes(mine)[: sum(sends)])
        return got

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over members, in place."""
        self.call(dist.all_reduce, mine)
        return mine

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what is for us."""
        mine = rows.new_empty(rows.shape[1])
        self.call(_reduce_scatter, mine, _ordered(rows, self.to_torch).view(-1))
        return mine

    def call(self, collective: Any, *tensors: torch.Tensor) -> None:
        """Run one collective, unless there is nothing to move."""
        if tensors[-1].numel():
            self.run(collective, *tensors)

    def run(self, collective: Any, *tensors: torch.Tensor) -> None:
        """Run one collective; its failure names the group."""
        try:
            collective(*tensors, group=self.handle)
        except RuntimeError as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> RuntimeMismatchError:
        """Another member died, is elsewhere, or took longer than the timeout."""
        return failed(error, self.handle, f"a collective over {self.name}")


class GlooGroup(NativeGroup):
    """Gloo, measured: large gathers go point to point, and only large sums are its own."""

    native_sum_from, native_scatter = 0, False

    def __init__(self, handle: Any, members: Sequence[int], rank: int, name: str) -> None:
        super().__init__(handle, members, rank, name)
        self.native_sum_from = SMALL // self.size

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """(n,) of each member -> (members, n)."""
        if mine.nbytes <= _SMALL_GATHER:
            return self.exchange(mine.expand(self.size, -1).contiguous())
        rows = mine.new_empty((self.size, mine.numel()))
        rows[self.rank] = mine
        sent, got = _bytes(mine), _bytes(rows)
        try:
            works = []
            for step in range(1, self.size):
                source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
                group = self.handle
                works.append(dist.irecv(got[source], group=group, group_src=self.numbers[source]))
                works.append(dist.isend(sent, group=group, group_dst=self.numbers[to]))
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failed(error) from error
        return rows


def failed(error: Exception, handle: Any, what: str) -> RuntimeMismatchError:
    """The error of a communication in which another member died, is elsewhere, or was too late."""
    ranks = dist.get_process_group_ranks(handle)
    return RuntimeMismatchError(
        message(
            f"process mesh: {what}",
            "did not complete.",
            f"ranks {', '.join(map(str, ranks))} take part; this is rank {dist.get_rank()}.",
            str(error).splitlines()[0],
            fix="read what the other ranks printed: one of them failed first, or is late",
        )
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend carries."""
    return tensor.view(torch.uint8)


def _ordered(rows: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    return rows if order is None else rows[order]
