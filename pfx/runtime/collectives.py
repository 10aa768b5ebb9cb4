"""What each collective computes, as plain functions of a group's parts in group order.

The simulated runtime calls them on all parts at once. They fix the order of sums, and so the bits:
the process runtime's deterministic mode adds in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx.compiler.reshard import Move

Parts = Sequence[torch.Tensor]


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
    """The function that reduces a group's parts to one value."""
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


# For each kind: what the group makes together, and what one rank takes of it.
JOINT: dict[str, Callable[[Move], Callable[[Any], Any]]] = {
    "all_reduce": lambda move: combine(move.reduce),
    "reduce_scatter": lambda move: combine(move.reduce),
    "all_gather": lambda move: lambda parts: torch.cat(list(parts), move.dim),
    "all_to_all": lambda move: list,
}
PICK: dict[str, Callable[[Move, int], Callable[[Any, int], torch.Tensor]]] = {
    "all_reduce": lambda move, size: lambda whole, rank: whole,
    # Contiguous, as on a real device: a sum over a strided view adds in another order.
    "reduce_scatter": lambda move, size: (
        lambda whole, rank: take(whole, move.dim, rank, size).contiguous()
    ),
    "all_gather": lambda move, size: lambda whole, rank: whole,
    "all_to_all": lambda move, size: (
        lambda parts, rank: torch.cat(
            [take(part, move.to_dim, rank, size) for part in parts], move.dim
        )
    ),
}
