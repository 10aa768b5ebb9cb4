"""`pcast`: say what a value is along an axis of a manual region; nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pfx import tree
from pfx.errors import ShardingError, message, user_line
from pfx.lax.manual.collective import cast
from pfx.lax.manual.local import variance_of
from pfx.lax.region import bound


def pcast(x: Any, axis: str | Sequence[str], to: str) -> Any:
    """Say that a value is varying, reduced or unreduced along an axis; moves nothing.

    What a value is decides what its gradient is. With respect to an invarying value, a gradient taken
    inside a region is the sum over the devices, and costs a psum each time. With respect to the same
    value cast to "varying" first it is each device's own; cast to "reduced" it stays unreduced until
    the cast is transposed, and so is summed once however often the value was used.

    Args:
        to: "varying" (from invarying or reduced), "reduced" (from invarying), or "unreduced" (from
            varying: what the devices hold are addends from now on).

    Raises:
        ShardingError: for a cast that would need communication, with the collective that does it.

    >>> from pfx import P, grad, make_mesh, shard_map
    >>> local = lambda w, x: grad(lambda w: (pcast(w, "dp", to="varying") * x).sum())(w)
    >>> shard_map(local, mesh=make_mesh(dp=2), in_specs=(P(), P("dp")), out_specs=P())(
    ...     torch.ones(1), torch.tensor([2., 3.]))
    tensor([5.])
    """
    region, axes = bound("pcast", axis)
    allowed = {"varying": ("invarying", "reduced"), "reduced": ("invarying",),
               "unreduced": ("varying",)}  # fmt: skip
    if to not in allowed:
        way = 'psum, or all_gather(…, to="invarying"), makes a value the same everywhere'
        raise ShardingError(message("pcast:", f"to={to!r} is no cast.", fix=way))

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        for a in axes:
            state = variance_of(leaf).state(a)
            if state != to and state not in allowed[to]:
                raise _no_cast(a, state, to)
        return cast(leaf, region.mesh, axes, to)

    return tree.map(one, x)


def _no_cast(axis: str, state: str, to: str) -> ShardingError:
    fixes = {
        ("unreduced", "varying"): "pfx.lax.psum_scatter, or psum and then pcast",
        ("invarying", "unreduced"): 'pcast(x, …, to="varying") first, and mean its sum',
    }
    fix = fixes.get((state, to), f"x = pfx.lax.psum(x, {axis!r}) first")
    return ShardingError(
        message(f"pcast at {user_line()}:", f"the value is {state} over {axis!r}.",
                f"{state} → {to} is not a cast.", fix=fix)
    )  # fmt: skip
