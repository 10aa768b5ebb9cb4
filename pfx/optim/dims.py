"""What the dims of a parameter mean: which only count parameters, which are one dim of a layer.

An optimizer that looks at whole matrices or at the norm of a layer must see the layer, however it is
stored: stacked with the others of its kind, or with its heads as a dim of their own to be sharded.
The logical dim names of a model, ``axes(config)``, tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import TreeError, message

STACK = ("layers",)
FUSED = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("heads", "qkv", "head_dim"))


@dataclass(frozen=True)
class Dims:
    """The dims of a stored parameter by what they are to a layer.

    Attributes:
        names: of all stored dims; none where they are not known.
        stack: dims that count parameters.
        groups: the dims of the layer's parameter, in order, each a run of stored dims.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def layer(self) -> tuple[int, ...]:
        """All stored dims of the layer's parameter."""
        return tuple(dim for group in self.groups for dim in group)


def dims_of(
    names: Sequence[str],
    *,
    stack: Sequence[str] = STACK,
    apart: Sequence[str] = (),
    fused: Sequence[Sequence[str]] = FUSED,
) -> Dims:
    """Sort the dims of one parameter.

    Args:
        names: of its dims, in order.
        stack: names of dims that only count parameters where they lead.
        apart: names of dims that do so wherever they are.
        fused: runs of names that are one dim of the layer, split to be sharded.

    >>> dims = dims_of(["layers", "embed", "heads", "head_dim"])
    >>> dims.stack, dims.groups
    ((0,), ((1,), (2, 3)))
    """
    leading = 0
    while leading < len(names) and names[leading] in stack:
        leading += 1
    counts = [i for i, name in enumerate(names) if i < leading or name in apart]
    rest = [i for i in range(len(names)) if i not in counts]
    groups: list[tuple[int, ...]] = []
    while rest:
        here = [names[i] for i in rest]
        runs = (len(run) for run in fused if here[: len(run)] == list(run))
        size = max(runs, default=1)
        groups.append(tuple(rest[:size]))
        rest = rest[size:]
    return Dims(tuple(names), tuple(counts), tuple(groups))


def all_dims(where: str, axes: Any, values: Any, **options: Any) -> list[Dims]:
    """Sort the dims of every leaf of `values`, in the order of its leaves.

    Args:
        where: what errors call the caller.
        axes: a tree like the parameters whose leaves are strings of dim names; `values` may be a part
            of them. ``None``: nothing is stacked, and every dim is one of the layer.
        values: a tree of tensors.
        options: as in `dims_of`.

    Raises:
        TreeError: `axes` has no string for a leaf, or one with another number of dims.

    >>> all_dims("f", {"w": "layers embed", "b": "embed"}, {"w": torch.ones(2, 3), "b": None})
    [Dims(names=('layers', 'embed'), stack=(0,), groups=((1,),))]
    """
    pairs, _ = tree.flatten_with_path(values)
    if axes is None:
        return [Dims((), (), tuple((i,) for i in range(x.ndim))) for _, x in pairs]
    known = dict(tree.flatten_with_path(axes)[0])
    return [dims_of(_names(where, known, path, x.ndim), **options) for path, x in pairs]


def _names(where: str, known: dict[tree.Path, Any], path: tree.Path, ndim: int) -> list[str]:
    text = known.get(path)
    if isinstance(text, str) and len(text.split()) == ndim:
        return text.split()
    what = "has no string of dim names." if text is None else f"does not name {ndim} dims."
    raise TreeError(
        message(
            f"{where}: {tree.path_string(path, 'axes')}",
            what,
            "" if text is None else f"axes: {text!r}",
            fix="axes=model.axes(config), a tree like the parameters; None where nothing is stacked",
        )
    )


def total(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum over some dims, kept with size 1; no dims sum nothing (torch would sum over all).

    >>> total(torch.ones(2, 3), (1,)), total(torch.ones(2), ())
    (tensor([[3.],
            [3.]]), tensor([1., 1.]))
    """
    return torch.sum(x, dims, keepdim=True) if dims else x


def mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean over some dims, kept with size 1; over no dims, `x` itself.

    >>> mean(torch.tensor([3.0, 4.0]), (0,))
    tensor([3.5000])
    """
    return total(x, dims) / math.prod(x.shape[dim] for dim in dims) if dims else x


def mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean of the squares over some dims, kept with size 1.

    >>> mean_square(torch.tensor([3.0, 4.0]), (0,))
    tensor([12.5000])
    """
    return mean(x * x, dims)
