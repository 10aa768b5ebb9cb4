"""The manual region that is running: its mesh and the axes whose devices it is written for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pfx.errors import ShardingError, message, user_line
from pfx.lax.vmap import spmd_axes
from pfx.mesh import Mesh
from pfx.spec import Axes


@dataclass(frozen=True)
class Region:
    """What `shard_map` binds while its function runs."""

    mesh: Mesh
    axes: Axes  # in the mesh's order
    strict: bool = False


# Set by `shard_map` while its function runs, never by users.
_REGION: contextvars.ContextVar[Region | None] = contextvars.ContextVar("region", default=None)


class UnboundAxisError(ShardingError, NameError):
    """A collective over an axis that no enclosing `shard_map` binds."""


def current_region() -> Region | None:
    """The innermost running region."""
    return _REGION.get()


@contextlib.contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Run in a region; None leaves all of them."""
    token = _REGION.set(region)
    try:
        yield
    finally:
        _REGION.reset(token)


def bound(name: str, axis: str | Sequence[str]) -> tuple[Region, Axes]:
    """The running region and the named axes in the order given.

    Args:
        name: of the collective, for errors.

    Raises:
        UnboundAxisError: a NameError, for an axis that no enclosing `shard_map` binds.
        ShardingError: for an axis named twice, or none.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    region = _REGION.get()
    where = f"{name} at {user_line()}: axis"
    free = [a for a in axes if region is None or a not in region.axes]
    if free:
        known = (
            ", ".join(map(repr, region.axes)) if region else "none: it is not inside a shard_map"
        )
        raise UnboundAxisError(
            message(
                where,
                f"{free[0]!r} is not bound.",
                f"bound axes: {known}.",
                fix=f"use one of {known}"
                if region and region.axes
                else f"call it inside pfx.shard_map(fn, mesh=make_mesh({free[0]}=…), …)",
            )
        )
    taken = [a for a in axes if a in spmd_axes()]
    if taken:
        what = f"{taken[0]!r} splits the batch of an enclosing vmap."
        raise ShardingError(message(where, what, fix="another spmd_axis_name"))
    if len(set(axes)) != len(axes) or not axes:
        raise ShardingError(message(where, f"{axis!r} must name each axis once, and one at least."))
    assert region is not None
    return region, axes


def shown(axes: Sequence[str]) -> Any:
    """Axes as a user writes them: a name, or a tuple of names."""
    return axes[0] if len(axes) == 1 else tuple(axes)
