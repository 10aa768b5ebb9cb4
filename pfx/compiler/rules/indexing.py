"""Lookups and scatters by global index. A split indexed dim is looked up where it lives.

Each device shifts the global indices by its own offset, answers those that fall into its part, gives
zero for the rest, and owes the sum: vocabulary parallelism (Shoeybi et al. 2019, arXiv:1909.08053,
section 3) for every gather and scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Call,
    Dims,
    Local,
    Rule,
    bind_sizes,
    named,
    operand_nodes,
    replicated_rule,
    shape_of,
)

aten = torch.ops.aten


def _tied(base: Dims, shape: tuple[int, ...], other: tuple[int, ...], dim: int, mark: str) -> Dims:
    """Dims of an index-shaped operand: those of `base` where the sizes agree, its own elsewhere."""
    return tuple(
        base[i] if i != dim and other[i] == shape[i] else (f"{mark}{i}",)
        for i in range(len(other))
    )


def _own(dims: Dims, mark: str) -> set[str]:
    return {d[0] for d in dims if d and d[0].startswith(mark)}


def _inside(index: torch.Tensor, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Local positions of global indices (0 where they are elsewhere), and which are here."""
    local = index - offset
    here = (local >= 0) & (local < size)
    return torch.where(here, local, 0), here


def _unsplit(local: Local) -> Call:
    return Call(local.node.target, local.node.args, local.node.kwargs)  # type: ignore[arg-type]


def _when_split(factor: str, target: Callable[..., Any]) -> Callable[[Local], Call]:
    """Use `target(*args, offset=…)` on a device when `factor` is split, the op itself otherwise."""

    def localize(local: Local) -> Call:
        if not local.split(factor):
            return _unsplit(local)
        return Call(target, local.node.args, {}, (local.place(factor),))

    return localize


def _gather(node: torch.fx.Node) -> Rule:
    x, index = shape_of(node.args[0]), shape_of(node.args[2])  # type: ignore[arg-type]
    if not x or not index:
        return replicated_rule(node)
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    index_dims = _tied(source, x, index, dim, "i")
    sizes = bind_sizes([source, index_dims], [x, index])
    loose = {f"i{i}" for i in range(len(x)) if i != dim}
    whole = {f for f in sizes if f in loose} | {f"d{i}" for i in range(len(x)) if f"i{i}" in sizes}
    return Rule((source, index_dims), (index_dims,), sizes, frozenset(whole), linear=((0,),),
                localize=_when_split("v", _gather_at))  # fmt: skip


def _gather_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = _inside(index, offset[0], x.shape[dim])
    return torch.where(here, torch.gather(x, dim, position), 0)


def _scatter(node: torch.fx.Node) -> Rule:
    """scatter, scatter_add and scatter_reduce: ``op(x, dim, index, src or value)``."""
    nodes = operand_nodes(node)
    x, index = shape_of(nodes[0]), shape_of(nodes[1])
    if not x or not index or len(nodes) == 3 and shape_of(nodes[2]) != index:
        return replicated_rule(node)
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    index_dims = _tied(source, x, index, dim, "i")
    sizes = bind_sizes([source, index_dims], [x, index])
    whole = {f for f in sizes if f[0] == "i"}
    whole |= {f"d{f[1:]}" for f in whole if f != f"i{dim}"}
    operands = (source, *([index_dims] * (len(nodes) - 1)))
    return Rule(operands, (source,), sizes, frozenset(whole),
                localize=_when_split("v", _scatter_at(node.target)))  # fmt: skip


def _scatter_at(op: Any) -> Callable[..., torch.Tensor]:
    """Scatter into a part with one spare row that takes what belongs elsewhere."""

    def scatter(
        x: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        *rest: Any,
        offset: tuple[int, ...],
    ) -> torch.Tensor:
        size = x.shape[dim]
        local = index - offset[0]
        local = torch.where((local >= 0) & (local < size), local, size)
        spare = torch.zeros_like(x.narrow(dim, 0, 1))
        return op(torch.cat([x, spare], dim), dim, local, *rest).narrow(dim, 0, size)

    return scatter


def _scatter_add(node: torch.fx.Node) -> Rule:
    base = _scatter(node)
    dim = int(node.args[1])  # type: ignore[arg-type]
    thin = bool(shape_of(operand_nodes(node)[1])) and shape_of(operand_nodes(node)[1])[dim] == 1
    if base.localize is None or not thin:
        return base
    return Rule(base.operands, base.results, base.sizes, base.whole,
                localize=_when_split("v", _scatter_add_at))  # fmt: skip


def _scatter_add_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = _inside(index, offset[0], x.shape[dim])
    return torch.scatter_add(x, dim, position, torch.where(here, src, 0))


def _embedding(node: torch.fx.Node) -> Rule:
    index = named("b", len(shape_of(node.args[1])))  # type: ignore[arg-type]
    weight: Dims = (("v",), ("e",))
    shapes = [shape_of(n) for n in operand_nodes(node)]
    sizes = bind_sizes([weight, index], shapes)
    return Rule((weight, index), ((*index, ("e",)),), sizes, linear=((0,),),
                localize=_when_split("v", _embedding_at))  # fmt: skip


def _embedding_at(
    weight: torch.Tensor, index: torch.Tensor, *_: Any, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = _inside(index, offset[0], weight.shape[0])
    rows = torch.nn.functional.embedding(position, weight)
    return torch.where(here.unsqueeze(-1), rows, 0)


def _embedding_backward(node: torch.fx.Node) -> Rule:
    """``embedding_dense_backward(grad, index, rows, padding_idx, scale_by_freq)``."""
    grad, index = (shape_of(n) for n in operand_nodes(node))
    if node.args[4]:
        return replicated_rule(node)
    dims = named("b", len(index))
    operand: Dims = (*dims, ("e",))
    sizes = bind_sizes([operand], [grad]) | {"v": shape_of(node)[0]}
    return Rule((operand, dims), ((("v",), ("e",)),), sizes, linear=((0,),),
                localize=_local_embedding_backward)  # fmt: skip


def _local_embedding_backward(local: Local) -> Call:
    if not local.split("v"):
        return _unsplit(local)
    grad, index, _, padding_idx, _ = local.node.args
    rows = local.result_shape()[0]
    return Call(_embedding_backward_at, (grad, index, rows, padding_idx), {}, (local.place("v"),))


def _embedding_backward_at(
    grad: torch.Tensor,
    index: torch.Tensor,
    rows: int,
    padding_idx: int,
    *,
    offset: tuple[int, ...],
) -> torch.Tensor:
    position, here = _inside(index, offset[0], rows)
    here = here & (index != padding_idx)
    grad = torch.where(here.unsqueeze(-1), grad, 0)
    return aten.embedding_dense_backward(grad, position, rows, -1, False)


def _index_select(node: torch.fx.Node) -> Rule:
    x = shape_of(node.args[0])  # type: ignore[arg-type]
    dim = int(node.args[1]) % max(len(x), 1)  # type: ignore[arg-type]
    if not x:
        return replicated_rule(node)
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    result = tuple(("k",) if i == dim else d for i, d in enumerate(source))
    sizes = bind_sizes([source, result], [x, shape_of(node)])
    return Rule((source, (("k",),)), (result,), sizes, linear=((0,),),
                localize=_when_split("v", _index_select_at))  # fmt: skip


def _index_select_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, *, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = _inside(index, offset[0], x.shape[dim])
    shape = [1] * x.ndim
    shape[dim] = -1
    return torch.where(here.view(shape), x.index_select(dim, position), 0)


def _index(node: torch.fx.Node) -> Rule:
    """``x[:, idx]`` with one integer index tensor; several indices fall to the safe default."""
    x, entries = shape_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    given = [i for i, entry in enumerate(entries) if entry is not None]
    if len(given) != 1 or entries[given[0]].meta["val"].dtype == torch.bool:
        return replicated_rule(node)
    dim = given[0]
    index = named("k", len(shape_of(entries[dim])))
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    result = (*source[:dim], *index, *source[dim + 1 :])
    sizes = bind_sizes([source, index], [x, shape_of(entries[dim])])
    return Rule((source, index), (result,), sizes, frozenset({"v"}), linear=((0,),))


def _index_put(node: torch.fx.Node) -> Rule:
    """``x[idx] = values`` along dim 0: the other dims pass through, the indexed one is whole."""
    x, entries = shape_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    values = shape_of(node.args[2])  # type: ignore[arg-type]
    given = [i for i, entry in enumerate(entries) if entry is not None]
    if given != [0] or entries[0].meta["val"].dtype == torch.bool:
        return replicated_rule(node)
    index = named("k", len(shape_of(entries[0])))
    rest = tuple((f"d{i}",) for i in range(1, len(x)))
    full = (*shape_of(entries[0]), *x[1:])
    value_dims = tuple(
        () if n == 1 and full[len(full) - len(values) + i] != 1
        else (*index, *rest)[len(full) - len(values) + i]
        for i, n in enumerate(values)
    )  # fmt: skip
    source: Dims = (("v",), *rest)
    sizes = bind_sizes([source, index], [x, shape_of(entries[0])])
    whole = frozenset({"v"} | {d[0] for d in index})
    return Rule((source, index, value_dims), (source,), sizes, whole)


TABLE: dict[Any, Any] = {
    aten.gather: _gather,
    aten.scatter: _scatter,
    aten.scatter_add: _scatter_add,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_select: _index_select,
    aten.index: _index,
    aten.index_put: _index_put,
}
