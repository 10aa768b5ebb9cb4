"""`master_weights`: parameters in 16 bits that are rounded, each step, from copies in 32.

An update smaller than half a unit in the last place of a 16-bit parameter would be rounded away,
every time (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1); the copies add it up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim import GradientTransformation, NewValue, apply_updates, find_state, update_with


class MasterWeightsState(NamedTuple):
    """The copies, with no leaf where a parameter is wide enough itself, and the wrapped state."""

    masters: Any
    inner: Any


def master_weights(
    inner: GradientTransformation, *, dtype: torch.dtype = torch.float32
) -> GradientTransformation:
    """Let `inner` optimize wide copies of narrow parameters, which are rounded from them.

    Law: after every step each parameter is exactly its master in the parameter's dtype, and the masters
    are what `inner` would have made of wide parameters from the same gradients.

    Args:
        inner: the optimizer; its weight decay and its moments are those of the masters.
        dtype: of the masters, float32 or float64; parameters as wide as that have none.

    Raises:
        ValueError: `dtype` is no dtype for masters, or `update` was given no ``params``.

    >>> from pfx import optim
    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> optimizer = master_weights(optim.sgd(0.001))
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     updates, state = optimizer.update({"w": torch.full((1,), -1.0)}, state, params)
    ...     params = optim.apply_updates(params, updates)
    >>> params["w"], state.masters["w"]
    (tensor([1.0078], dtype=torch.bfloat16), tensor([1.0040]))
    """
    check_dtype("master_weights", dtype)

    def init(params: Any) -> MasterWeightsState:
        masters = _masters(params, dtype)
        return MasterWeightsState(masters, inner.init(_over(params, masters)))

    def update(
        grads: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        if params is None:
            raise ValueError(
                message(
                    "master_weights: params",
                    "is None.",
                    "the new parameters are rounded to the dtype of the old ones.",
                    fix="optimizer.update(grads, state, params)",
                )
            )
        wide = _over(params, state.masters)
        updates, inner_state = update_with(inner, grads, state.inner, wide, **extra)
        kept, narrow = _split(params, state.masters, apply_updates(wide, updates), updates)
        return narrow, MasterWeightsState(kept, inner_state)

    return GradientTransformation(init, update)


def refresh_masters(opt_state: Any, params: Any) -> Any:
    """Make the masters anew from parameters that were loaded without their optimizer state.

    Without it the next step would go back to what the masters were.

    Args:
        opt_state: an optimizer state with or without masters in it; moments and counts are kept.
        params: the loaded parameters.

    Raises:
        TreeError: the parameters are not those that the masters were made of.

    >>> from pfx import optim
    >>> optimizer = master_weights(optim.sgd(0.1))
    >>> state = optimizer.init({"w": torch.zeros(1, dtype=torch.bfloat16)})
    >>> refresh_masters(state, {"w": torch.ones(1, dtype=torch.bfloat16)}).masters
    {'w': tensor([1.])}
    """
    if isinstance(opt_state, MasterWeightsState):
        pairs, treedef = tree.flatten_with_path(params)
        old = tree.match(treedef, opt_state.masters, [path for path, _ in pairs])
        new = [None if m is None else p.to(m.dtype) for (_, p), m in zip(pairs, old, strict=True)]
        return opt_state._replace(masters=tree.unflatten(treedef, new))
    if find_state(opt_state, MasterWeightsState) is None:
        return opt_state
    if isinstance(opt_state, dict):
        return {key: refresh_masters(child, params) for key, child in opt_state.items()}
    children = [refresh_masters(child, params) for child in opt_state]
    return (
        type(opt_state)(*children) if hasattr(opt_state, "_fields") else type(opt_state)(children)
    )


def check_dtype(where: str, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless masters can have this dtype.

    >>> check_dtype("master_weights", torch.float32)
    """
    if dtype in (torch.float32, torch.float64):
        return
    what, why = "is no dtype for masters.", "they hold what 16 bits round away."
    raise ValueError(message(f"{where}: master {dtype}", what, why, fix="torch.float32"))


def _masters(params: Any, dtype: torch.dtype) -> Any:
    def master(p: Tensor) -> Tensor | None:
        narrow = torch.promote_types(p.dtype, dtype) != p.dtype
        return p.to(dtype) if narrow else None

    return tree.map(master, params)


def _over(params: Any, masters: Any) -> Any:
    """The parameters, masters in the place of those that have one."""
    pairs, treedef = tree.flatten_with_path(params)
    found = tree.match(treedef, masters, [path for path, _ in pairs])
    wide = [p if m is None else m for (_, p), m in zip(pairs, found, strict=True)]
    return tree.unflatten(treedef, wide)


def _split(params: Any, masters: Any, new: Any, updates: Any) -> tuple[Any, Any]:
    """The new masters, and the updates of the parameters."""
    pairs, treedef = tree.flatten_with_path(params)
    paths = [path for path, _ in pairs]
    columns = [tree.match(treedef, other, paths) for other in (masters, new, updates)]
    rows = list(zip(*columns, strict=True))
    kept = [None if m is None else n for m, n, _ in rows]
    narrow = [u if m is None else NewValue(n) for m, n, u in rows]
    return tree.unflatten(treedef, kept), tree.unflatten(treedef, narrow)
