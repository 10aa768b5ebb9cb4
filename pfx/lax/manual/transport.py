"""What each collective computes, as plain functions of a group's parts in group order.

Every way to run a collective in one process uses them: eagerly, or for all devices of a simulated
mesh. They fix the order of sums, and so the bits: the process runtime's deterministic mode adds in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Parts = Sequence[torch.Tensor]
Groups = tuple[tuple[int, ...], ...]
Perm = tuple[tuple[int, int], ...]


def joint(kind: str, *, dim: int = -1, reduce: str = "sum") -> Callable[[Parts], Any]:
    """What the members of a group make together of their parts, given in group order.

    Args:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all or permute.
        dim: of an all_gather, the dim along which the parts lie one after the other.
        reduce: of an all_reduce or reduce_scatter: sum, max or min.
    """
    if kind in ("all_reduce", "reduce_scatter"):
        return combine(reduce)
    if kind == "all_gather":
        return lambda parts: torch.cat(list(parts), dim)
    assert kind in ("all_to_all", "permute"), kind
    return list


def pick(
    kind: str, *, dim: int = -1, to_dim: int = -1, size: int = 1, perm: Perm = ()
) -> Callable[[Any, int], torch.Tensor]:
    """What the member `rank` takes of what `joint` made: a function of that and the rank.

    Args:
        dim: the dim that a reduce_scatter splits, or along which an all_to_all concatenates.
        to_dim: the dim that an all_to_all splits.
        size: the number of members.
        perm: of a permute, (source, destination) pairs of ranks.
    """
    if kind in ("all_reduce", "all_gather"):
        return lambda whole, rank: whole
    if kind == "reduce_scatter":
        # Contiguous, as on a real device: a sum over a strided view adds in another order.
        return lambda whole, rank: take(whole, dim, rank, size).contiguous()
    if kind == "all_to_all":
        return lambda parts, rank: torch.cat([take(p, to_dim, rank, size) for p in parts], dim)
    assert kind == "permute", kind
    source = {to: start for start, to in perm}
    return lambda parts, rank: (
        parts[source[rank]] if rank in source else torch.zeros_like(parts[rank])
    )


def alone(kind: str, *, dim: int = -1, size: int = 1) -> Callable[[torch.Tensor, int], Any]:
    """What a device makes of its part in a move without communication, given its rank.

    Args:
        kind: slice (its block along `dim`), own (zeros but on the first) or cast (the part itself).
    """
    if kind == "slice":
        return lambda part, rank: take(part, dim, rank, size)
    if kind == "own":
        return lambda part, rank: part if rank == 0 else torch.zeros_like(part)
    assert kind == "cast", kind
    return lambda part, rank: part


def team(groups: Groups, rank: int, size: int) -> tuple[tuple[int, ...], int]:
    """The members of a rank's group, in the order it lists them, and the rank's place among them.

    Without groups, the `size` ranks are one.

    >>> team(((0, 2), (3, 1)), 1, 4)
    ((3, 1), 1)
    """
    members = next((group for group in groups if rank in group), tuple(range(size)))
    return members, members.index(rank)


def take(part: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """The `rank`-th of `size` equal blocks along `dim`."""
    width = part.shape[dim] // size
    return part.narrow(dim, rank * width, width)


def ordered_sum(parts: Parts) -> torch.Tensor:
    """Add in group order, first to last."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


def combine(reduce: str) -> Callable[[Parts], torch.Tensor]:
    """The function that reduces a group's parts to one value: sum, max or min."""
    if reduce == "sum":
        return _sum
    pairwise = {"max": torch.maximum, "min": torch.minimum}[reduce]

    def fold(parts: Parts) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = pairwise(total, part)
        return total

    return fold


def _sum(parts: Parts) -> torch.Tensor:
    if parts[0].dtype == torch.bool:
        return torch.stack(list(parts)).any(0)
    return ordered_sum(parts)
