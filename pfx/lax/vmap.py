"""`vmap` over a mesh axis: which levels of vmap have their batch split over an axis of the mesh."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pfx import _torch, tree

# For each running vmap with a spmd axis, where it runs (`_torch.level`) and the axis.
_SPMD: contextvars.ContextVar[Mapping[Any, str]] = contextvars.ContextVar(
    "spmd", default=MappingProxyType({})
)


def vmap(
    fn: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    spmd_axis_name: str | None = None,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Map a function over a dim of its arguments; torch.func.vmap, with JAX's `spmd_axis_name`.

    Args:
        spmd_axis_name: the mesh axis that the mapped dim is split over: every `shard_map` and
            `constrain` inside gets that dim, split so, in front of its specs.

    >>> vmap(torch.dot)(torch.ones(2, 3), torch.ones(2, 3))
    tensor([3., 3.])
    """
    options: dict[str, Any] = {"randomness": randomness, "chunk_size": chunk_size}

    def mapped(*args: Any, **named: Any) -> Any:
        with contextlib.nullcontext() if spmd_axis_name is None else _over(spmd_axis_name):
            return fn(*args, **named)

    if not isinstance(out_dims, int) or out_dims == 0:
        return torch.func.vmap(mapped, in_dims, out_dims, **options)
    leading = torch.func.vmap(mapped, in_dims, 0, **options)
    # torch's own way with a result that does not depend on the batch reads past its sizes.
    return lambda *args, **named: tree.map(
        lambda x: x.movedim(0, out_dims), leading(*args, **named)
    )


@contextlib.contextmanager
def _over(axis: str) -> Iterator[None]:
    token = _SPMD.set({**_SPMD.get(), _torch.level(): axis})
    try:
        yield
    finally:
        _SPMD.reset(token)


def spmd_axes() -> set[str]:
    """The axes that running vmaps have split their batch over."""
    return set(_SPMD.get().values())


def spmd_axis() -> str | None:
    """The axis of the vmap whose rule is running, if it has one."""
    trace, level = _torch.level()
    return _SPMD.get().get((trace, level + 1))  # the rule runs one level below
