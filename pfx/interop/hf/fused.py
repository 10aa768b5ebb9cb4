"""Fused weights over tensor-parallel ranks: which rows of which part each rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange

_RANK = "rank"


def merge(parts: Sequence[torch.Tensor], dims: str, *, over: str, **sizes: int) -> torch.Tensor:
    """Put the ranks' parts of a weight together.

    Where a dim is the product of several, the ranks split one of them, and a plain concatenation
    would mix the parts.

    Args:
        parts: of each rank.
        dims: of a part, ``"(gate_up mlp) embed"``.
        over: the dim that the ranks split.
        sizes: of the dims that do not follow: ``gate_up=2``.

    >>> merge([torch.tensor([0, 10]), torch.tensor([1, 11])], "(gate_up mlp)", over="mlp", gate_up=2)
    tensor([ 0,  1, 10, 11])
    """
    pattern = f"{_RANK} {dims} -> {_with_ranks(dims, over)}"
    return rearrange(torch.stack(list(parts)), pattern, **sizes)


def split(
    whole: torch.Tensor, dims: str, *, over: str, count: int, **sizes: int
) -> list[torch.Tensor]:
    """Cut a weight into the parts of `count` ranks; the inverse of `merge`.

    >>> split(torch.tensor([0, 1, 10, 11]), "(gate_up mlp)", over="mlp", count=2, gate_up=2)
    [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    pattern = f"{_with_ranks(dims, over)} -> {_RANK} {dims}"
    return list(rearrange(whole, pattern, **sizes, **{_RANK: count}))


def _with_ranks(dims: str, over: str) -> str:
    """The dims of the whole: the ranks come right before the dim that they split."""
    spaced = dims.replace("(", " ( ").replace(")", " ) ").split()
    assert over in spaced, f"{dims!r} has no dim {over!r}"
    inside = spaced[: spaced.index(over)].count("(") > spaced[: spaced.index(over)].count(")")
    ranked = f"{_RANK} {over}" if inside else f"({_RANK} {over})"
    return " ".join(ranked if token == over else token for token in spaced)
