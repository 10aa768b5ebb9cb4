"""Operands of one op must agree on what they are along each axis; where they do not, they are cast.

An invarying value beside a varying one is cast to varying. The cast moves nothing, but its transpose is
a psum: that is how the gradient of a shared weight becomes the sum over the devices that used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pfx import _torch
from pfx.errors import ShardingError, message, user_line
from pfx.lax.manual.collective import cast
from pfx.lax.manual.linearity import is_product
from pfx.lax.manual.local import variance_of, writes_varying
from pfx.lax.manual.scalar_index import picked
from pfx.lax.manual.variance import Variance
from pfx.lax.ops.arguments import map_tensors, tensors_in
from pfx.lax.ops.writes import written_by
from pfx.lax.region import Region, current_region, shown

Common = dict[str, tuple[str, ...]]


class Mixing(TorchFunctionMode):
    """Casts the operands of every torch function called in a region so that they agree.

    A value is cast once, however many ops read it: the transpose of each cast is a psum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[Any, tuple[Any, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        region = current_region()
        backward = func is torch.autograd.grad
        if region is None or backward or _is_ours(args) or _torch.reads_meta(func):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            with self:  # or the ops of this one would go unseen
                one = picked(*args)
            if one is not None:
                return one
        changed = written_by(func, args, kwargs)
        if changed:
            self.casts.clear()  # what was cast may have been an alias of what changes
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        if len(tensors) < 2:
            return func(*args, **kwargs)
        found = [variance_of(x) for x in tensors]
        if all(v == found[0] for v in found):
            return func(*args, **kwargs)
        common = _common(found, region, product=is_product(func))
        for x in changed:
            axes = [a for a in common["varying"] if variance_of(x).state(a) != "varying"]
            if axes:
                raise writes_varying(_name(func), axes)
        one = lambda x: self.agreeing(x, common, region, func)
        return func(*map_tensors(one, args), **map_tensors(one, kwargs))

    def agreeing(self, x: torch.Tensor, common: Common, region: Region, func: Any) -> torch.Tensor:
        """An operand, cast where it is not yet what the others are."""
        variance = variance_of(x)
        for state, axes in common.items():
            moving = tuple(a for a in axes if variance.state(a) not in (state, "unreduced"))
            if moving and (x.is_floating_point() or x.is_complex()):
                _check_strict(func, variance, moving, state, region)
                x = self.cast_once(x, moving, state, region)
        return x

    def cast_once(
        self, x: torch.Tensor, axes: tuple[str, ...], state: str, region: Region
    ) -> torch.Tensor:
        """Cast a value, or return the cast that an earlier op asked for.

        One of a transform that has ended since cannot be used again; so casts are remembered only of
        values that belong to the innermost transform.
        """
        if not _torch.is_innermost(x):
            return cast(x, region.mesh, axes, state)
        key = (id(x), axes, state)
        if key not in self.casts:
            forget = weakref.ref(x, lambda _: self.casts.pop(key, None))
            self.casts[key] = (forget, cast(x, region.mesh, axes, state))
        return self.casts[key][1]


def _is_ours(args: Any) -> bool:
    """Tell a primitive, which knows the variance of its operands, from a user's autograd.Function."""
    function = args[0] if args else None
    return (
        isinstance(function, type)
        and issubclass(function, torch.autograd.Function)
        and function.__module__.startswith("pfx.")
    )


def _common(found: Sequence[Variance], region: Region, *, product: bool) -> Common:
    """For varying and reduced, the axes along which other operands are to become so.

    A factor beside addends becomes reduced: its own cotangent, a product with addends, is addends.
    """
    common: Common = {"varying": (), "reduced": ()}
    for axis in region.axes:
        states = {v.state(axis) for v in found}
        for state in common:
            if state in states and "unreduced" not in states and len(states) > 1:
                common[state] += (axis,)
                break
        if product and states == {"unreduced", "invarying"}:
            common["reduced"] += (axis,)
    return common


def _check_strict(
    func: Any, variance: Variance, axes: Sequence[str], state: str, region: Region
) -> None:
    if not region.strict:
        return
    raise ShardingError(  # no TypeError: Python would take that for an operator that is not there
        message(
            f"{_name(func)} at {user_line()}: strict=True",
            f"has an operand that is {variance.state(axes[0])} over "
            f"{', '.join(map(repr, axes))} beside one that is {state}.",
            "without strict it is cast, and the transpose of that cast is a psum.",
            fix=f'x = pfx.lax.pcast(x, {shown(axes)!r}, to="{state}")',
        )
    )


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
