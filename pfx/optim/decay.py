"""Which parameters weight decay applies to, decided by what their dims mean.

Counting physical dims fails as soon as layers are stacked (a bias gains a dim) or shards are
flattened (a matrix loses one). The logical dim names of a model, ``axes(config)``, survive both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pfx import tree
from pfx.errors import message
from pfx.optim.dims import FUSED, STACK, dims_of


def role_mask(axes: Any, predicate: Callable[[tuple[str, ...]], bool]) -> Any:
    """Mark the leaves whose logical dim names satisfy `predicate`, for `masked`.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names.
        predicate: gets the tuple of names of one leaf.

    Raises:
        TypeError: a leaf of `axes` is not a string; names the key path.

    >>> role_mask({"wte": "vocab embed", "up": "embed mlp"}, lambda dims: "vocab" in dims)
    {'up': False, 'wte': True}
    """

    def mark(path: tree.Path, names: Any) -> bool:
        if not isinstance(names, str):
            raise TypeError(
                message(
                    f"role_mask: {tree.path_string(path, 'axes')}",
                    "is not a string of dim names.",
                    f"got a {type(names).__name__}.",
                    fix='"layers embed mlp"',
                )
            )
        return bool(predicate(tuple(names.split())))

    return tree.map_with_path(mark, axes)


def decay_mask(
    axes: Any,
    *,
    stack: Sequence[str] = STACK,
    fused: Sequence[Sequence[str]] = FUSED,
) -> Any:
    """Mark the matrices, so that norms and biases never decay whatever their physical shape.

    A leaf decays if it has at least two dims, not counting leading `stack` dims and counting a run
    of neighbours in `fused` once: a query bias ``"layers heads head_dim"`` is a vector.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names.
        stack: leading dims that only stack parameters; add ``"experts"`` for experts with biases.
        fused: runs of neighbours that are one dim of the layer, split to be sharded.

    Raises:
        TypeError: a leaf of `axes` is not a string; names the key path.

    >>> decay_mask({"w": "layers embed mlp", "bias": "layers mlp", "wte": "vocab embed"})
    {'bias': False, 'w': True, 'wte': True}
    """

    return role_mask(axes, lambda dims: len(dims_of(dims, stack=stack, fused=fused).groups) >= 2)
