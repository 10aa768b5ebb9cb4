"""Views as values: how to take one again, and how to put a changed one back where it came from.

Every view op has an inverse that writes: ``select`` has ``select_scatter``, ``permute`` the inverse
permutation, a reshape the reshape back. torch's own functionalization keeps the same table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from pfx._torch import OpOverload
from pfx.lax.constrain import Constraint
from pfx.lax.label import Label

aten = torch.ops.aten
Emit = Callable[..., Node]  # emit(op, *args, **kwargs) adds a node to the graph being written


@dataclass(frozen=True)
class View:
    """A view op with its arguments after the tensor; `item` picks one of several results."""

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    item: int | None = None

    @property
    def inverse(self) -> Callable[..., Node] | None:
        """What puts a changed view back; None for a view whose elements may repeat."""
        if isinstance(self.op, (Constraint, Label)):
            return _identity
        return _INVERSES.get(self.op)

    @property
    def is_strided(self) -> bool:
        """Tell a view given by strides from one given by dims."""
        return self.op is aten.as_strided.default

    @property
    def is_one_op(self) -> bool:
        """Tell whether taking it adds one node and no more."""
        return self.item is None and not self.is_strided

    @property
    def name(self) -> str:
        """What errors call it."""
        return str(getattr(self.op, "overloadpacket", self.op)).removeprefix("aten.")

    def take(self, emit: Emit, base: Node) -> Node:
        """Emit the view of `base`; never by strides, which a computed value has of its own."""
        if self.is_strided:
            return emit(aten.index.Tensor, base, [_positions(emit, base, *self.args)])
        op = aten.reshape.default if self.op is aten.view.default else self.op
        out = emit(op, base, *self.args, **dict(self.kwargs))
        return out if self.item is None else emit(operator.getitem, out, self.item)

    def put(self, emit: Emit, base: Callable[[], Node], like: torch.Tensor, value: Node) -> Node:
        """Emit `base()`, which has the form of `like`, with `value` in the place of the view."""
        assert self.inverse is not None
        put = _Put(emit, base, like, value, self.item or 0)
        return self.inverse(put, *self.args, **dict(self.kwargs))


@dataclass(frozen=True)
class _Put:
    """A value on its way back into `base`."""

    emit: Emit
    base: Callable[[], Node]
    like: torch.Tensor
    value: Node
    item: int


def _identity(p: _Put) -> Node:
    return p.value


def _reshaped(p: _Put, *_: Any, **__: Any) -> Node:
    return p.emit(aten.reshape.default, p.value, list(p.like.shape))


def _again(op: Any) -> Callable[..., Node]:
    """The inverse of an op that undoes itself."""
    return lambda p, *args: p.emit(op, p.value, *args)


def _permute(p: _Put, dims: Sequence[int]) -> Node:
    order = [d % len(dims) for d in dims]
    return p.emit(aten.permute.default, p.value, [order.index(i) for i in range(len(order))])


def _select(p: _Put, dim: int, index: int) -> Node:
    return p.emit(aten.select_scatter.default, p.base(), p.value, dim, index)


def _slice(p: _Put, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Node:
    if p.value.meta["val"].shape == p.like.shape:
        return p.value
    return p.emit(aten.slice_scatter.default, p.base(), p.value, dim, start, end, step)


def _split(p: _Put, size: int, dim: int = 0) -> Node:
    return _slice(p, dim, p.item * size, min((p.item + 1) * size, p.like.shape[dim]))


def _split_with_sizes(p: _Put, sizes: Sequence[int], dim: int = 0) -> Node:
    start = sum(sizes[: p.item])
    return _slice(p, dim, start, start + sizes[p.item])


def _unbind(p: _Put, dim: int = 0) -> Node:
    return _select(p, dim, p.item)


def _diagonal(p: _Put, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    return p.emit(aten.diagonal_scatter.default, p.base(), p.value, offset, dim1, dim2)


def _view_dtype(p: _Put, _: torch.dtype) -> Node:
    return p.emit(aten.view.dtype, p.value, p.like.dtype)


def _as_strided(p: _Put, size: Any, stride: Any, offset: int) -> Node:
    base = p.base()
    return p.emit(
        aten.index_put.default, base, [_positions(p.emit, base, size, stride, offset)], p.value
    )


def _positions(emit: Emit, base: Node, size: Any, stride: Any, offset: int) -> Node:
    """Emit the index into a flat tensor of every element of a strided view of it."""
    device = base.meta["val"].device
    total = emit(aten.full.default, [1] * len(size), offset, dtype=torch.int64, device=device)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        steps = emit(aten.mul.Tensor, emit(aten.arange.default, n, device=device), step)
        shape = [n if i == dim else 1 for i in range(len(size))]
        total = emit(aten.add.Tensor, total, emit(aten.reshape.default, steps, shape))
    return total


_INVERSES: dict[Any, Callable[..., Node]] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.expand.default: _reshaped,  # one that repeats nothing: the caller sees to that
    aten.permute.default: _permute,
    aten.transpose.int: _again(aten.transpose.int),
    aten.t.default: _again(aten.t.default),
    aten._conj.default: _again(aten._conj.default),
    aten._neg_view.default: _again(aten._neg_view.default),
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.diagonal.default: _diagonal,
    aten.view_as_real.default: _again(aten.view_as_complex.default),
    aten.view_as_complex.default: _again(aten.view_as_real.default),
    aten.view.dtype: _view_dtype,
    aten.as_strided.default: _as_strided,
}


def is_view(target: Any) -> bool:
    """Tell whether every result of a call shares the memory of its first operand.

    >>> is_view(aten.select.int), is_view(aten.add.Tensor), is_view(aten.add_.Tensor)
    (True, False, False)
    """
    if isinstance(target, (Constraint, Label)):
        return True
    if not isinstance(target, OpOverload) or target in _FRESH:
        return False
    returns = target._schema.returns
    if target._schema.is_mutable or not returns:
        return False
    return all(r.alias_info is not None for r in returns)


# A tensor literal: its schema calls it a view of the constant, which no one else can reach.
_FRESH = frozenset({aten.lift_fresh.default})


def may_overlap(value: torch.Tensor, *, strict: bool) -> bool:
    """Tell whether elements of a tensor share memory: an expanded one, or (strict) any in doubt."""
    pairs = sorted((s, n) for n, s in zip(value.shape, value.stride(), strict=True) if n > 1)
    if not strict:
        return any(s == 0 for s, _ in pairs)
    reach = 0
    for stride, n in pairs:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The order of dims in which a tensor fills its memory from the start; None if it does not."""
    order = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
    size = 1
    for dim in reversed(order):
        if value.shape[dim] > 1 and value.stride(dim) != size:
            return None
        size *= value.shape[dim]
    return order if value.storage_offset() == 0 else None
