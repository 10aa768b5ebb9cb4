"""The state of a run under the magnifying glass: norms, what is not finite, copies that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.api import jit
from pfx.array import Array
from pfx.mesh import Mesh
from pfx.spec import P


class Leaf(NamedTuple):
    """One tensor in numbers.

    Attributes:
        norm: of its finite values.
        largest: their largest magnitude.
        lowest: their lowest value.
        nonfinite: how many values are NaN or infinite.
    """

    norm: float
    largest: float
    lowest: float
    nonfinite: int


def leaves_of(value: Any, mesh: Mesh) -> dict[str, Leaf]:
    """Summarize every floating-point leaf of a tree of Arrays, by path."""
    pairs = [
        (tree.path_string(path), leaf)
        for path, leaf in tree.flatten_with_path(value)[0]
        if isinstance(leaf, Array) and leaf.dtype.is_floating_point
    ]
    summaries = jit(lambda *leaves: [_summary(x) for x in leaves], mesh=mesh, out_specs=P())
    rows = [row.full_tensor().tolist() for row in summaries(*(leaf for _, leaf in pairs))]
    return {
        path: Leaf(row[0], row[1], row[2], int(row[3]))
        for (path, _), row in zip(pairs, rows, strict=True)
    }


def _summary(x: Tensor) -> Tensor:
    x = x.double()
    finite = torch.isfinite(x)
    kept = torch.where(finite, x, 0.0)
    norm, count = kept.square().sum().sqrt(), (~finite).sum().double()
    return torch.stack([norm, kept.abs().amax(), kept.amin(), count])


def nonfinite(leaves: Mapping[str, Leaf]) -> list[str]:
    """Which leaves are not finite, and how much of them."""
    return [f"{name}: {leaf.nonfinite} values" for name, leaf in leaves.items() if leaf.nonfinite]


def broken_moments(leaves: Mapping[str, Leaf]) -> list[str]:
    """Second moments below zero: no optimizer makes them."""
    return [
        f"{name}: {leaf.lowest:.3g}"
        for name, leaf in leaves.items()
        if leaf.lowest < 0 and any(part in name for part in (".nu", '["nu"]'))
    ]


def fingerprints(value: Any) -> dict[str, str]:
    """A hash of each part that this process holds, by path and place in the global tensor."""
    found = {}
    for path, leaf in tree.flatten_with_path(value)[0]:
        for shard in leaf.shards if isinstance(leaf, Array) else ():
            place = f"{tree.path_string(path)} {shard.index}"
            found[place] = _hash(shard.data)
    return found


def _hash(x: Tensor) -> str:
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()


def disagreeing(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """The places of which ranks hold different copies.

    Args:
        everyone: the fingerprints of each rank.

    >>> disagreeing([{"w": "a", "b": "c"}, {"w": "a"}, {"w": "d"}])
    ['w: rank 2 differs from rank 0']
    """
    first: dict[str, tuple[int, str]] = {}
    found = []
    for rank, prints in enumerate(everyone):
        for place, text in prints.items():
            holder, expected = first.setdefault(place, (rank, text))
            if text != expected:
                found.append(f"{place}: rank {rank} differs from rank {holder}")
    return found
