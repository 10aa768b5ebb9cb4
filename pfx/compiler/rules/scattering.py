"""Writes by global index. Each device writes what falls into its part of a split dim.

An op that adds into zeros may also be split over what is added: each device adds its share, and the
result is a partial sum. That is the gradient of a lookup with a split batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import Call, Dims, Local, Rule, argument, bind_sizes, operand_nodes, shape_of
from pfx.compiler.rules.indexing import (
    all_shifted,
    indexed_dims,
    is_zero,
    looked_up,
    shifted,
    tied,
    unsplit,
    when_split,
)

aten = torch.ops.aten


def _scatter(node: torch.fx.Node) -> Rule | None:
    """scatter, scatter_reduce: ``op(x, dim, index, src or value, …)``."""
    nodes = operand_nodes(node)
    x, index = shape_of(nodes[0]), shape_of(nodes[1])
    if not x or len(x) != len(index) or any(shape_of(n) not in (index, ()) for n in nodes[2:]):
        return None
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    index_dims = tied(source, x, index, dim)
    sizes = bind_sizes([source, index_dims], [x, index])
    whole = {f for f in sizes if f[0] == "i"}
    whole |= {f"d{f[1:]}" for f in whole if f != f"i{dim}"}
    rest = [index_dims if shape_of(n) else () for n in nodes[2:]]
    return Rule((source, index_dims, *rest), (source,), sizes, frozenset(whole),
                localize=when_split("v", _spare(node.target)), placed=frozenset({"v"}))  # fmt: skip


def _spare(op: Any) -> Callable[..., torch.Tensor]:
    """Scatter into a part with one spare row that takes what belongs elsewhere."""

    def scatter(
        x: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        *rest: Any,
        whole: int,
        offset: tuple[int, ...],
        **options: Any,
    ) -> torch.Tensor:
        size = x.shape[dim]
        position, here = shifted(index, offset[0], size, whole)
        position = torch.where(here, position, size)
        spare = torch.zeros_like(x.narrow(dim, 0, 1))
        return op(torch.cat([x, spare], dim), dim, position, *rest, **options).narrow(dim, 0, size)

    return scatter


def _scatter_add(node: torch.fx.Node) -> Rule | None:
    """``scatter_add(x, dim, index, src)``, the gradient of gather."""
    base = _scatter(node)
    if base is None or len(base.operands[2]) != len(base.operands[1]):
        return base
    dim = int(node.args[1]) % len(base.operands[0])  # type: ignore[arg-type]
    added = base.operands[1][dim][0]
    whole = base.whole - {added} if is_zero(node.args[0]) else base.whole
    thin = base.sizes[added] == 1  # then masking is cheaper than a spare row
    localize = when_split("v", _scatter_add_at) if thin else base.localize
    return replace(base, whole=whole, linear=((0, 2),), localize=localize)


def _scatter_add_at(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    *,
    whole: int,
    offset: tuple[int, ...],
) -> torch.Tensor:
    position, here = shifted(index, offset[0], x.shape[dim], whole)
    return torch.scatter_add(x, dim, position, src.masked_fill(~here, 0))


def _index_add(node: torch.fx.Node) -> Rule | None:
    """``index_add(x, dim, index, source)``, the gradient of index_select."""
    x, index, source = (shape_of(n) for n in operand_nodes(node))
    if not x or len(index) != 1:
        return None
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    base: Dims = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    added: Dims = tuple(("k",) if i == dim else d for i, d in enumerate(base))
    sizes = bind_sizes([base, (("k",),), added], [x, index, source])
    whole = frozenset() if is_zero(node.args[0]) else frozenset({"k"})
    return Rule((base, (("k",),), added), (base,), sizes, whole, linear=((0, 2),),
                localize=when_split("v", _index_add_at), placed=frozenset({"v"}))  # fmt: skip


def _index_add_at(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    whole: int,
    offset: tuple[int, ...],
    **options: Any,
) -> torch.Tensor:
    position, here = shifted(index, offset[0], x.shape[dim], whole)
    mask = here.view([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)])
    return torch.index_add(x, dim, position, source.masked_fill(~mask, 0), **options)


def _index_put(node: torch.fx.Node) -> Rule | None:
    """``index_put(x, indices, values, accumulate)``, the gradient of ``x[indices]``."""
    found = indexed_dims(node)
    if found is None:
        return None
    source, index, full = found
    nodes = operand_nodes(node)
    shapes = [shape_of(n) for n in nodes]
    sizes = bind_sizes([source, *index], shapes[:-1])
    widths = [sizes.get(d[0], 1) for d in full]
    lead = len(full) - len(shapes[-1])
    values = tuple(
        () if n == 1 and widths[lead + i] != 1 else full[lead + i] for i, n in enumerate(shapes[-1])
    )
    adds = bool(argument(node, "accumulate"))
    points = {d[0] for d in full if d[0].startswith("k")}
    every = all(d[0] in {f for dim in values for f in dim} for d in full if d[0] in points)
    split = adds and is_zero(nodes[0]) and every
    return Rule((source, *index, values), (source,), sizes,
                frozenset() if split else frozenset(points & set(sizes)),
                linear=((0, len(nodes) - 1),), localize=_local_index_put,
                placed=looked_up(source))  # fmt: skip


def _local_index_put(local: Local) -> Call:
    factors = [dim[0] for dim in local.rule.operands[0] if dim[0].startswith("v")]
    if not any(map(local.split, factors)):
        return unsplit(local)
    options = {"whole": [local.rule.sizes[f] for f in factors]}
    return Call(_index_put_at, local.node.args, options, tuple(map(local.place, factors)))


def _index_put_at(
    x: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool = False,  # noqa: FBT001, FBT002 - the op's own signature
    *_: Any,
    whole: Sequence[int],
    offset: tuple[int, ...],
) -> torch.Tensor:
    """Write into a part with one spare row along the first indexed dim."""
    local, here = all_shifted(x, indices, whole, offset)
    dim = next(i for i, index in enumerate(indices) if index is not None)
    size = x.shape[dim]
    local[dim] = torch.where(here, local[dim], size)
    spare = torch.zeros_like(x.narrow(dim, 0, 1))
    return aten.index_put(torch.cat([x, spare], dim), local, values, accumulate).narrow(
        dim, 0, size
    )


TABLE: dict[Any, Any] = {
    aten.scatter: _scatter,
    aten.scatter_reduce: _scatter,
    aten.scatter_add: _scatter_add,
    aten.index_add: _index_add,
    aten.index_put: _index_put,
    aten._unsafe_index_put: _index_put,
}
