"""Ops that make a value from nothing: any device makes the part it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import Call, Local, Rule, bind_sizes, named, operand_nodes, shape_of

aten = torch.ops.aten


def _filled(node: torch.fx.Node) -> Rule:
    shape = shape_of(node)
    dims = named("d", len(shape))
    operands = tuple(named(f"i{k}_", len(shape_of(n))) for k, n in enumerate(operand_nodes(node)))
    shapes = [shape_of(n) for n in operand_nodes(node)]
    sizes = bind_sizes([dims, *operands], [shape, *shapes])
    zero = _fill_value(node) == 0
    return Rule(operands, (dims,), sizes, localize=_local_full, free=True, zero=zero)


def _fill_value(node: torch.fx.Node) -> Any:
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros, aten.empty, aten.empty_like,
                  aten.new_empty):  # fmt: skip
        return 0  # an uninitialized value may be anything, so zeros are right too
    if packet in (aten.ones, aten.ones_like, aten.new_ones):
        return 1
    position = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}[packet]
    return node.args[position] if len(node.args) > position else node.kwargs["fill_value"]


def _local_full(local: Local) -> Call:
    value = local.node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    return Call(aten.full.default, (local.result_shape(), _fill_value(local.node)), options)


def _arange(node: torch.fx.Node) -> Rule:
    dims = (("d0",),)
    sizes = bind_sizes([dims], [shape_of(node)])
    return Rule((), (dims,), sizes, localize=_local_arange, free=True)


def _local_arange(local: Local) -> Call:
    value = local.node.meta["val"]
    packet = local.node.target.overloadpacket  # type: ignore[union-attr]
    assert packet is aten.arange
    numbers = [arg for arg in local.node.args if isinstance(arg, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    options = {"dtype": value.dtype, "device": value.device}
    args = (local.result_shape()[0], start, step)
    return Call(_arange_at, args, options, (local.place("d0"),))


def _arange_at(
    size: int, start: Any, step: Any, *, dtype: Any, device: Any, offset: tuple[int, ...]
) -> torch.Tensor:
    """The part of ``start + step * arange(n)`` that begins at the global index `offset`."""
    index = torch.arange(offset[0], offset[0] + size, device=device)
    if not (start == 0 and step == 1):
        index = index * step + start
    return index.to(dtype)


TABLE: dict[Any, Any] = {
    aten.arange: _arange,
    **dict.fromkeys(
        (
            aten.zeros, aten.zeros_like, aten.new_zeros, aten.ones, aten.ones_like, aten.new_ones,
            aten.full, aten.full_like, aten.new_full, aten.scalar_tensor, aten.empty,
            aten.empty_like, aten.new_empty,
        ),
        _filled,
    ),
}  # fmt: skip
