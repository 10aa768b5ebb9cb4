"""Elementwise ops with broadcasting: every dim passes through; the linear ones keep partial sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

import pfx.random  # noqa: F401 - defines the ops in the table
from pfx.compiler.rule import Call, Dims, Local, Rule, named, operand_nodes, shape_of

aten = torch.ops.aten

# Groups of operands that may be partial together. An op not listed reduces its operands first.
_ADDITIVE = {aten.add: ((0, 1),), aten.sub: ((0, 1),)}
_LINEAR: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.neg: ((0,),),
    aten.clone: ((0,),),
    aten.detach: ((0,),),
    aten.alias: ((0,),),
    aten.lift_fresh: ((0,),),
    aten.mul: ((0,), (1,)),
    aten.div: ((0,),),
}


def is_pointwise(target: Any) -> bool:
    """Tell whether torch tags this op as elementwise."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def broadcast(shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Dims:
    """The factors of an operand broadcast to `out_shape`, whose factors are d0, d1, …"""
    lead = len(out_shape) - len(shape)
    return tuple(
        () if size == 1 and out_shape[lead + i] != 1 else (f"d{lead + i}",)
        for i, size in enumerate(shape)
    )


def rule(node: torch.fx.Node) -> Rule:
    """The rule of any elementwise node."""
    out_shape = shape_of(node)
    operands = operand_nodes(node)
    dims = tuple(broadcast(shape_of(n), out_shape) for n in operands)
    sizes = {f"d{i}": n for i, n in enumerate(out_shape)}
    return Rule(dims, (named("d", len(out_shape)),), sizes, linear=_linear(node, len(operands)))


def _linear(node: torch.fx.Node, num_operands: int) -> tuple[tuple[int, ...], ...]:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _ADDITIVE:
        return _ADDITIVE[packet] if num_operands == 2 else ()  # partial + number reduces first
    if packet is aten.div and node.kwargs.get("rounding_mode") is not None:
        return ()
    groups = _LINEAR.get(packet, ())
    return tuple(group for group in groups if max(group) < num_operands)


def _where(node: torch.fx.Node) -> Rule:
    base = rule(node)
    both = len(base.operands) == 3
    return Rule(base.operands, base.results, base.sizes, linear=((1, 2),) if both else ())


def _to_copy(node: torch.fx.Node) -> Rule:
    base = rule(node)
    source, to = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    widens = torch.promote_types(source, to) == to and source != torch.bool
    return Rule(base.operands, base.results, base.sizes, linear=((0,),) if widens else ())


def _view_dtype(node: torch.fx.Node) -> Rule:
    base = rule(node)
    same = shape_of(node.args[0]) == shape_of(node)  # type: ignore[arg-type]
    assert same, "view(dtype) to another item size"
    return base


def _key_dims(node: torch.fx.Node) -> tuple[Dims, Dims, dict[str, int]]:
    """The dims of a key operand, its batch dims, and their sizes."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    batch = named("b", len(shape) - 1)
    return (*batch, ("k",)), batch, {f"b{i}": n for i, n in enumerate(shape[:-1])} | {"k": 2}


def _threefry(node: torch.fx.Node) -> Rule:
    """Both words of one counter each: a batch of keys broadcasts against the counters."""
    out = shape_of(node)
    keys, counts = (shape_of(n) for n in operand_nodes(node))
    dims = named("d", len(out) - 1)
    sizes = {f"d{i}": n for i, n in enumerate(out[:-1])} | {"w": 2, "k": 2}
    operands = ((*broadcast(keys[:-1], out[:-1]), ("k",)), broadcast(counts, out[:-1]))
    return Rule(operands, ((*dims, ("w",)),), sizes, frozenset({"w", "k"}))


def _random_bits(node: torch.fx.Node) -> Rule:
    """Bits are addressed by global index, so a device draws exactly its own part."""
    key, batch, sizes = _key_dims(node)
    shape = shape_of(node)[len(batch) :]
    dims = named("d", len(shape))
    sizes |= {f"d{i}": n for i, n in enumerate(shape)}
    return Rule((key,), ((*batch, *dims),), sizes, frozenset({"k"}), localize=_local_bits)


def _local_bits(local: Local) -> Call:
    key, _, start, whole, *width = local.node.args
    count = len(start)  # type: ignore[arg-type]
    shape = local.result_shape()
    args = (key, shape[len(shape) - count :], tuple(start), whole, *width)  # type: ignore[arg-type]
    return Call(_bits_at, args, {}, tuple(local.place(f"d{i}") for i in range(count)))


def _bits_at(
    key: torch.Tensor,
    shape: list[int],
    start: tuple[int, ...],
    whole: list[int],
    *width: int,
    offset: tuple[int, ...],
) -> torch.Tensor:
    begin = [a + b for a, b in zip(start, offset, strict=True)]
    return torch.ops.pfx.random_bits(key, shape, begin, whole, *width)


# Elementwise ops that torch does not tag as such, and those with a rule of their own.
TABLE: dict[Any, Any] = {
    aten.where.self: _where,
    aten._to_copy: _to_copy,
    aten.view.dtype: _view_dtype,
    torch.ops.pfx.random_bits: _random_bits,
    torch.ops.pfx.threefry: _threefry,
    **dict.fromkeys(
        (
            aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten.where,
            aten.masked_fill, aten.native_dropout_backward, aten.fmod, aten.floor_divide,
            aten.softplus_backward, aten.leaky_relu_backward, aten.hardtanh_backward,
        ),
        rule,
    ),
}  # fmt: skip
