"""Applying a transformation to a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pfx import tree
from pfx.errors import TreeError, message
from pfx.optim.base import GradientTransformation, update_with


class MaskedState(NamedTuple):
    """The state of the inner transformation, with no leaves where the mask is false."""

    inner: Any


def masked(
    inner: GradientTransformation, mask: Any | Callable[[Any], Any]
) -> GradientTransformation:
    """Apply `inner` where the mask is true; other leaves pass through untouched and have no state.

    Args:
        inner: the transformation.
        mask: a tree of bools like the parameters, in which one bool may stand for a whole subtree;
            or a function that makes such a tree from the parameters (in `update`: the gradients).

    Raises:
        TreeError: the mask does not fit the parameters; names the key path.
        TypeError: a leaf of the mask is not a bool.

    >>> import torch
    >>> from pfx import optim
    >>> double = masked(optim.scale(2.0), {"w": True, "b": False})
    >>> grads = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> double.update(grads, double.init(grads))[0]
    {'b': tensor([1.]), 'w': tensor([2.])}
    """

    def flags_for(values: Any) -> list[bool]:
        return _flags(mask(values) if callable(mask) else mask, values)

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(select(params, flags_for(params))))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        flags = flags_for(grads)
        chosen_params = None if params is None else select(params, flags)
        chosen_grads = select(grads, flags)
        chosen, state = update_with(inner, chosen_grads, state.inner, chosen_params, **extra)
        return merge(grads, flags, chosen), MaskedState(state)

    return GradientTransformation(init, update)


def _flags(mask: Any, values: Any) -> list[bool]:
    """Return one bool for each leaf of `values`."""
    try:
        flags = tree.broadcast_prefix(mask, values)
    except TreeError as error:
        raise TreeError(
            message(
                "masked: the mask",
                "does not match the parameters.",
                str(error),
                fix="give the mask the parameters' keys, or one bool for a whole subtree",
            )
        ) from error
    for (path, _), flag in zip(tree.flatten_with_path(values)[0], flags, strict=True):
        if not isinstance(flag, bool):
            raise TypeError(
                message(
                    f"masked: the mask at {tree.path_string(path, 'params')}",
                    "is not a bool.",
                    f"got a {type(flag).__name__}; a mask is fixed before any value is known.",
                    fix="True or False",
                )
            )
    return flags


def select(values: Any, flags: Sequence[bool]) -> Any:
    """Empty the leaves that are masked out: `None` is a subtree without leaves.

    >>> select({"a": 1, "b": 2}, [True, False])
    {'a': 1, 'b': None}
    """
    found, treedef = tree.flatten(values)
    kept = [value if flag else None for value, flag in zip(found, flags, strict=True)]
    return tree.unflatten(treedef, kept)


def merge(values: Any, flags: Sequence[bool], chosen: Any) -> Any:
    """Put the leaves of `chosen` in the place of those that `select` took them from.

    >>> merge({"a": 1, "b": 2}, [True, False], {"a": 10, "b": None})
    {'a': 10, 'b': 2}
    """
    found, treedef = tree.flatten(values)
    changed = iter(tree.leaves(chosen))
    merged = [next(changed) if flag else value for value, flag in zip(found, flags, strict=True)]
    return tree.unflatten(treedef, merged)
