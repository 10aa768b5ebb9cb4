"""Operands of one op must agree on what they are along each axis; where they do not, they are cast.

An invarying value beside a varying one is cast to varying. The cast moves nothing, but its transpose is
a psum: that is how the gradient of a shared weight becomes the sum over the devices that used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pfx import _torch
from pfx._torch import OpOverload
from pfx.errors import ShardingError, message, user_line
from pfx.lax.collective import cast
from pfx.lax.local import variance_of, writes_varying
from pfx.lax.picking import picked
from pfx.lax.region import Region, current_region, shown
from pfx.lax.variance import Variance

Common = dict[str, tuple[str, ...]]


class Mixing(TorchFunctionMode):
    """Casts the operands of every torch function called in a region so that they agree."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        region = current_region()
        # A graph that is run again, and a backward part, have their casts already.
        replayed = isinstance(func, OpOverload) or func is torch.autograd.grad
        if region is None or replayed or _is_ours(args) or _torch.reads_meta(func):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            one = picked(*args)  # its ops come back here
            if one is not None:
                return one
        tensors = [*_tensors(args), *_tensors(kwargs)]
        if len(tensors) < 2:
            return func(*args, **kwargs)
        found = [variance_of(x) for x in tensors]
        if all(v == found[0] for v in found):
            return func(*args, **kwargs)
        common = _common(found, region)
        _check_writes(func, args, kwargs, common)
        one = lambda x: _agreeing(x, common, region, func)
        return func(*_mapped(one, args), **_mapped(one, kwargs))


def _is_ours(args: Any) -> bool:
    """Tell a primitive, which knows the variance of its operands, from a user's autograd.Function."""
    function = args[0] if args else None
    return (
        isinstance(function, type)
        and issubclass(function, torch.autograd.Function)
        and function.__module__.startswith("pfx.")
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [x for item in tree for x in _tensors(item)]
    if isinstance(tree, dict):
        return [x for item in tree.values() for x in _tensors(item)]
    return []


def _common(found: Sequence[Variance], region: Region) -> Common:
    """For varying and reduced, the axes along which other operands are to become so."""
    common: Common = {"varying": (), "reduced": ()}
    for axis in region.axes:
        states = {v.state(axis) for v in found}
        for state in common:
            if state in states and "unreduced" not in states and len(states) > 1:
                common[state] += (axis,)
                break
    return common


def _mapped(one: Any, value: Any) -> Any:
    """Apply `one` to every tensor in an argument."""
    if isinstance(value, torch.Tensor):
        return one(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_mapped(one, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(one, item) for key, item in value.items()}
    return value


def _agreeing(x: torch.Tensor, common: Common, region: Region, func: Any) -> torch.Tensor:
    variance = variance_of(x)
    for state, axes in common.items():
        moving = tuple(a for a in axes if variance.state(a) != state)
        if moving:
            _check_strict(func, variance, moving, state, region)
            if x.is_floating_point() or x.is_complex():
                x = cast(x, region.mesh, moving, state)
    return x


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


def _check_writes(func: Any, args: Any, kwargs: Any, common: Common) -> None:
    name = _name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    if name.startswith("__i") or name == "__setitem__" or in_place:
        written = [args[0]] if args and isinstance(args[0], torch.Tensor) else []
    else:
        written = _tensors(kwargs.get("out"))
    for x in written:
        axes = [a for a in common["varying"] if variance_of(x).state(a) != "varying"]
        if axes:
            raise writes_varying(name, axes)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
