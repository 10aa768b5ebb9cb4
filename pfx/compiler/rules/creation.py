"""Ops that make a value from nothing: any device makes the part it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Call,
    Local,
    Rule,
    argument,
    bind_sizes,
    named,
    operand_nodes,
    shape_of,
)

aten = torch.ops.aten


def _full(node: torch.fx.Node) -> Rule:
    """`simplify` writes every constant as ``full``."""
    shape = shape_of(node)
    dims = named("d", len(shape))
    zero = bool(node.args[1] == 0)
    return Rule(
        (), (dims,), bind_sizes([dims], [shape]), localize=_local_full, free=True, zero=zero
    )


def _local_full(local: Local) -> Call:
    value = local.node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    return Call(aten.full.default, (local.result_shape(), local.node.args[1]), options)


def _arange(node: torch.fx.Node) -> Rule:
    dims = (("d0",),)
    sizes = bind_sizes([dims], [shape_of(node)])
    placed = frozenset({"d0"})
    return Rule((), (dims,), sizes, localize=_local_arange, free=True, placed=placed)


def _local_arange(local: Local) -> Call:
    value = local.node.meta["val"]
    start, step = argument(local.node, "start") or 0, argument(local.node, "step") or 1
    options = {"dtype": value.dtype, "device": value.device}
    args = (local.result_shape()[0], start, step)
    return Call(_arange_at, args, options, (local.place("d0"),))


def _arange_at(
    size: int, start: Any, step: Any, *, dtype: Any, device: Any, offset: tuple[int, ...]
) -> torch.Tensor:
    """The part of ``start + step * arange(n)`` that begins at the global index `offset`."""
    index = torch.arange(offset[0], offset[0] + size, device=device)
    if not (isinstance(start, int) and isinstance(step, int)):
        index = index.double()  # as torch computes it
    return (index if start == 0 and step == 1 else index * step + start).to(dtype)


def _cut(node: torch.fx.Node) -> Rule | None:
    """Small values that a device makes whole, to keep its part: a linspace, the indices of a tril."""
    if operand_nodes(node):
        return None  # a linspace between tensors
    shape = shape_of(node)
    dims = named("d", len(shape))
    sizes = bind_sizes([dims], [shape])
    return Rule((), (dims,), sizes, localize=_local_cut, free=True, placed=frozenset(sizes))


def _local_cut(local: Local) -> Call:
    args = (local.node.target, *local.node.args)
    places = [local.place(dim[0]) for dim in local.rule.results[0]]
    options = {**local.node.kwargs, "sizes": local.result_shape()}
    return Call(_cut_at, args, options, tuple(places))


def _cut_at(op: Any, *args: Any, sizes: list[int], offset: tuple[int, ...], **options: Any) -> Any:
    whole = op(*args, **options)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


TABLE: dict[Any, Any] = {
    aten.arange: _arange,
    **dict.fromkeys((aten.linspace, aten.logspace, aten.tril_indices, aten.triu_indices), _cut),
    aten.full: _full,
}
