"""How a group of devices adds: by its backend, or by carrying every part and adding here.

Adding here fixes the order (that of the group, as on a simulated mesh), knows every dtype, and
propagates NaN through max and min, which gloo and NCCL do not. On gloo it is also the faster way,
but for large sums.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pfx.lax.manual import transport
from pfx.lax.manual.transport import Perm

# What every backend can sum. Sums of integers are the same in any order.
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Gathering so many bytes and adding them is faster than exchanging pieces, adding and gathering.
SMALL = 1 << 20


class Group(Protocol):
    """The devices that communicate in a move, in its order: row-major over its axes, or as grouped.

    A buffer of shape (members, n) holds one row per member, in that order.
    """

    size: int
    rank: int  # this device's place among them
    native_sum_from: int  # bytes from which `sum` beats adding here
    native_scatter: bool  # whether `scatter_sum` beats adding here

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """(n,) of each member -> (members, n)."""
        ...

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """(members, n): row i is for member i -> (members, n): row i is from member i."""
        ...

    def permute(self, mine: torch.Tensor, perm: Perm) -> torch.Tensor:
        """(n,) of each member -> (n,): that of our source in `perm`, or zeros."""
        ...

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """(n,) of each member -> their sum, in any order and in place."""
        ...

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """(members, n): row i is for member i -> (n,): the sum, in any order, of what is for us."""
        ...


class Reduction:
    """One way to reduce buffers of one dtype: `whole` for all members, `scattered` for each its row."""

    def __init__(
        self, group: Group, dtype: torch.dtype, reduce: str, *, deterministic: bool
    ) -> None:
        self.group = group
        self.combine = transport.combine(reduce)
        inexact_order = deterministic and group.size > 2  # a + b is b + a
        summable = INTEGERS if inexact_order else INTEGERS + FLOATS
        self.native = reduce == "sum" and dtype in summable

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All-reduce a buffer of shape (n,), which is consumed."""
        group, count = self.group, flat.numel()
        size = count * flat.itemsize
        if self.native and size >= group.native_sum_from:
            return group.sum(flat)
        if size * group.size <= SMALL:
            return self.combine(group.gather(flat).unbind())
        rest = -count % group.size
        if rest:
            flat = torch.cat([flat, flat.new_zeros(rest)])
        mine = self.scattered(flat.view(group.size, -1))
        return group.gather(mine).view(-1)[:count]

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter a buffer of shape (members, n)."""
        if self.native and self.group.native_scatter:
            return self.group.scatter_sum(rows)
        return self.combine(self.group.exchange(rows).unbind())
