"""Elementwise ops with broadcasting: every dim passes through; the linear ones keep partial sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx

import pfx.random  # noqa: F401 - defines the ops in the table
from pfx.compiler.rule import (
    Call,
    Dims,
    Local,
    Rule,
    argument,
    named,
    operand_nodes,
    result_values,
    shape_of,
)
from pfx.compiler.rules.views import in_order
from pfx.mesh import Rows, runs

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
    results = result_values(node)
    out_shape = tuple(results[0].shape)
    operands = operand_nodes(node)
    dims = tuple(broadcast(shape_of(n), out_shape) for n in operands)
    sizes = {f"d{i}": n for i, n in enumerate(out_shape)}
    out = named("d", len(out_shape))
    return Rule(dims, (out,) * len(results), sizes, linear=_linear(node, len(operands)))


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
    return replace(base, linear=((1, 2),) if len(base.operands) == 3 else ())


def _to_copy(node: torch.fx.Node) -> Rule:
    base = rule(node)
    source, to = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    widens = torch.promote_types(source, to) == to and source != torch.bool
    return replace(base, linear=((0,),) if widens else ())


def _masked_fill(node: torch.fx.Node) -> Rule:
    base = rule(node)
    clears = argument(node, "value") == 0 and len(base.operands) == 2
    return replace(base, linear=((0,),) if clears else ())


def _view_dtype(node: torch.fx.Node) -> Rule | None:
    """Bits seen as another dtype; to another item size the last dim changes."""
    same = shape_of(node.args[0]) == shape_of(node)  # type: ignore[arg-type]
    return replace(rule(node), localize=in_order) if same else None


def _bucketize(node: torch.fx.Node) -> Rule:
    """``bucketize(x, boundaries)``: the boundaries are whole."""
    out = shape_of(node)
    boundaries = shape_of(operand_nodes(node)[1])
    dims = named("d", len(out))
    sizes = {f"d{i}": n for i, n in enumerate(out)} | {"k": boundaries[0]}
    return Rule((dims, (("k",),)), (dims,), sizes, frozenset({"k"}))


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
    dealt = {i: rows for i in range(count) if (rows := local.rows(f"d{i}")) is not None}
    at = tuple(
        (local.assignment[f"d{i}"], 1) if i in dealt else local.place(f"d{i}") for i in range(count)
    )
    if not dealt:
        return Call(_bits_at, args, {}, at)
    return Call(_bits_of_rows, args, {"dealt": tuple(dealt.items())}, at)


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


def _bits_of_rows(
    key: torch.Tensor,
    shape: list[int],
    start: tuple[int, ...],
    whole: list[int],
    *width: int,
    dealt: tuple[tuple[int, Rows], ...],
    offset: tuple[int, ...],
) -> torch.Tensor:
    """Draw the rows of dims that axes deal, run by run; `offset` has the device's number for those."""
    if not dealt:
        return _bits_at(key, shape, start, whole, *width, offset=offset)
    ((dim, rows), *rest), pieces = dealt, []
    for first, count in runs(rows[offset[dim]], shape[dim]):
        part, begin = list(shape), list(offset)
        part[dim], begin[dim] = count, first
        options = {"dealt": tuple(rest), "offset": tuple(begin)}
        pieces.append(_bits_of_rows(key, part, start, whole, *width, **options))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim - len(shape))


# Elementwise ops that torch does not tag as such, and those with a rule of their own.
TABLE: dict[Any, Any] = {
    aten.where.self: _where,
    aten.masked_fill: _masked_fill,
    aten.bucketize: _bucketize,
    aten._to_copy: _to_copy,
    aten.view.dtype: _view_dtype,
    torch.ops.pfx.random_bits: _random_bits,
    torch.ops.pfx.threefry: _threefry,
    **dict.fromkeys(
        (
            aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten.where, aten.fmod,
            aten.floor_divide, aten.rsub, aten.complex, aten.polar, aten._conj, aten.fill,
            aten.native_dropout_backward, aten.softplus_backward, aten.leaky_relu_backward,
            aten.hardtanh_backward, aten.hardswish, aten.hardswish_backward, aten.elu_backward,
            aten.hardsigmoid_backward, aten.hardshrink_backward, aten.softshrink_backward,
            aten._prelu_kernel, aten._prelu_kernel_backward, aten.log_sigmoid_backward,
        ),
        rule,
    ),
}  # fmt: skip
