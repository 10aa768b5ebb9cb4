"""Lookups by global index. A split indexed dim is looked up where it lives.

Each device shifts the global indices by its own offset, answers those that fall into its part, gives
zero for the rest, and owes the sum: vocabulary parallelism (Shoeybi et al. 2019, arXiv:1909.08053,
section 3) for every gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    shape_of,
)
from pfx.compiler.rules.pointwise import broadcast

aten = torch.ops.aten
_V = frozenset({"v"})  # the indexed dim, of which the local call shifts the global indices


def shifted(
    index: torch.Tensor, offset: int, size: int, whole: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local positions of global indices (0 where they are elsewhere), and which are here.

    A negative index counts from the end of the whole dim.
    """
    local = torch.where(index < 0, index + whole, index) - offset
    here = (local >= 0) & (local < size)
    return torch.where(here, local, 0), here


def is_zero(node: Any) -> bool:
    """Tell whether a node is all zeros, so that each device may add its own part to zeros."""
    is_full = getattr(node, "target", None) is aten.full.default
    return is_full and node.args[1] == 0


def unsplit(local: Local) -> Call:
    """The op itself, on local tensors."""
    return Call(local.node.target, local.node.args, local.node.kwargs)  # type: ignore[arg-type]


def when_split(factor: str, target: Callable[..., Any]) -> Callable[[Local], Call]:
    """Use ``target(*args, whole=…, offset=…)`` where `factor` is split, the op itself elsewhere."""

    def localize(local: Local) -> Call:
        if not local.split(factor):
            return unsplit(local)
        kwargs = {**local.node.kwargs, "whole": local.rule.sizes[factor]}
        return Call(target, local.node.args, kwargs, (local.place(factor),))

    return localize


def tied(base: Dims, shape: tuple[int, ...], other: tuple[int, ...], dim: int) -> Dims:
    """Dims of an index-shaped operand: those of `base` where the sizes agree, its own elsewhere."""
    return tuple(
        base[i] if i != dim and other[i] == shape[i] else (f"i{i}",) for i in range(len(other))
    )


def _gather(node: torch.fx.Node) -> Rule | None:
    """``gather(x, dim, index)``: the split indexed dim is contracted."""
    x, index = shape_of(node.args[0]), shape_of(node.args[2])  # type: ignore[arg-type]
    if not x or len(x) != len(index):
        return None
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    index_dims = tied(source, x, index, dim)
    sizes = bind_sizes([source, index_dims], [x, index])
    loose = {i for i in range(len(x)) if i != dim and f"i{i}" in sizes}
    whole = frozenset(f"{mark}{i}" for i in loose for mark in "id")
    return Rule((source, index_dims), (index_dims,), sizes, whole, linear=((0,),),
                localize=when_split("v", _gather_at), placed=_V)  # fmt: skip


def _gather_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, whole: int, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = shifted(index, offset[0], x.shape[dim], whole)
    return torch.gather(x, dim, position).masked_fill(~here, 0)


def _embedding(node: torch.fx.Node) -> Rule:
    index = named("b", len(shape_of(node.args[1])))  # type: ignore[arg-type]
    weight: Dims = (("v",), ("e",))
    shapes = [shape_of(n) for n in operand_nodes(node)]
    sizes = bind_sizes([weight, index], shapes)
    return Rule((weight, index), ((*index, ("e",)),), sizes, linear=((0,),),
                localize=when_split("v", _embedding_at), placed=_V)  # fmt: skip


def _embedding_at(
    weight: torch.Tensor, index: torch.Tensor, *_: Any, whole: int, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = shifted(index, offset[0], weight.shape[0], whole)
    rows = torch.nn.functional.embedding(position, weight)
    return torch.where(here.unsqueeze(-1), rows, 0)


def _embedding_backward(node: torch.fx.Node) -> Rule | None:
    """``embedding_dense_backward(grad, index, rows, padding_idx, scale_by_freq)``."""
    grad, index = (shape_of(n) for n in operand_nodes(node))
    if node.args[4]:
        return None
    dims = named("b", len(index))
    operand: Dims = (*dims, ("e",))
    sizes = bind_sizes([operand], [grad]) | {"v": shape_of(node)[0]}
    return Rule((operand, dims), ((("v",), ("e",)),), sizes, linear=((0,),),
                localize=_local_embedding_backward, placed=_V)  # fmt: skip


def _local_embedding_backward(local: Local) -> Call:
    if not local.split("v"):
        return unsplit(local)
    grad, index, whole, padding_idx, _ = local.node.args
    rows = local.result_shape()[0]
    args = (grad, index, rows, padding_idx)
    return Call(_embedding_backward_at, args, {"whole": whole}, (local.place("v"),))


def _embedding_backward_at(
    grad: torch.Tensor,
    index: torch.Tensor,
    rows: int,
    padding_idx: int,
    *,
    whole: int,
    offset: tuple[int, ...],
) -> torch.Tensor:
    position, here = shifted(index, offset[0], rows, whole)
    here = here & (index != padding_idx)  # a global row: -1 stands for none
    grad = torch.where(here.unsqueeze(-1), grad, 0)
    return aten.embedding_dense_backward(grad, position, rows, -1, False)


def _index_select(node: torch.fx.Node) -> Rule | None:
    x, index = (shape_of(n) for n in operand_nodes(node))
    if not x or not index:
        return None
    dim = int(node.args[1]) % len(x)  # type: ignore[arg-type]
    source = tuple(("v",) if i == dim else (f"d{i}",) for i in range(len(x)))
    result = tuple(("k",) if i == dim else d for i, d in enumerate(source))
    sizes = bind_sizes([source, result], [x, shape_of(node)])
    return Rule((source, (("k",),)), (result,), sizes, linear=((0,),),
                localize=when_split("v", _index_select_at), placed=_V)  # fmt: skip


def _index_select_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, *, whole: int, offset: tuple[int, ...]
) -> torch.Tensor:
    position, here = shifted(index, offset[0], x.shape[dim], whole)
    shape = [1] * x.ndim
    shape[dim] = -1
    return x.index_select(dim, position).masked_fill(~here.view(shape), 0)


def indexed_dims(node: torch.fx.Node) -> tuple[Dims, list[Dims], Dims] | None:
    """The factors of ``x[indices]``: of x (``v`` where indexed), of each index, and of the result.

    None for a mask, or where an index selects nothing in particular (no dims given).
    """
    x, entries = shape_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    given = [i for i, entry in enumerate(entries) if entry is not None]
    tensors = [entries[i] for i in given]
    if not given or any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in tensors):
        return None
    joint = tuple(torch.broadcast_shapes(*(shape_of(n) for n in tensors)))
    index = [_renamed(broadcast(shape_of(n), joint)) for n in tensors]
    source = tuple((f"v{i}",) if i in given else (f"d{i}",) for i in range(len(x)))
    rest = [d for i, d in enumerate(source) if i not in given]
    adjacent = given == list(range(given[0], given[-1] + 1))
    place = given[0] if adjacent else 0
    return source, index, (*rest[:place], *named("k", len(joint)), *rest[place:])


def looked_up(source: Dims) -> frozenset[str]:
    """The factors of `indexed_dims` that are indexed."""
    return frozenset(f for dim in source for f in dim if f.startswith("v"))


def _renamed(dims: Dims) -> Dims:
    """The factors of an index: ``k`` for the ``d`` of a broadcast."""
    return tuple(tuple(f"k{f[1:]}" for f in dim) for dim in dims)


def _index(node: torch.fx.Node) -> Rule | None:
    """``x[i, j]``: any indexed dim may be split; what is elsewhere is zero here."""
    found = indexed_dims(node)
    if found is None:
        return None
    source, index, result = found
    shapes = [shape_of(n) for n in operand_nodes(node)]
    sizes = bind_sizes([source, *index, result], [*shapes, shape_of(node)])
    return Rule((source, *index), (result,), sizes, linear=((0,),), localize=_local_index,
                placed=looked_up(source))  # fmt: skip


def _local_index(local: Local) -> Call:
    factors = [dim[0] for dim in local.rule.operands[0] if dim[0].startswith("v")]
    if not any(map(local.split, factors)):
        return unsplit(local)
    ks = [i for i, dim in enumerate(local.rule.results[0]) if dim[0].startswith("k")]
    options = {"whole": [local.rule.sizes[f] for f in factors], "place": ks[0] if ks else 0}
    return Call(_index_at, local.node.args, options, tuple(map(local.place, factors)))


def all_shifted(
    x: torch.Tensor, indices: Sequence[Any], whole: Sequence[int], offset: Sequence[int]
) -> tuple[list[Any], torch.Tensor]:
    """Every index as a local position, and where all of them are here."""
    spans = iter(zip(whole, offset, strict=True))
    local: list[Any] = []
    inside: list[torch.Tensor] = []
    for dim, index in enumerate(indices):
        if index is None:
            local.append(None)
            continue
        size, start = next(spans)
        position, here = shifted(index, start, x.shape[dim], size)
        local.append(position)
        inside.append(here)
    here = inside[0]
    for other in inside[1:]:
        here = here & other
    return local, here


def _index_at(
    x: torch.Tensor,
    indices: Sequence[Any],
    *,
    whole: Sequence[int],
    place: int,
    offset: tuple[int, ...],
) -> torch.Tensor:
    local, here = all_shifted(x, indices, whole, offset)
    rows = aten.index(x, local)
    after = rows.ndim - place - here.ndim
    return rows.masked_fill(~here.reshape(*here.shape, *[1] * after), 0)


TABLE: dict[Any, Any] = {
    aten.gather: _gather,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_select: _index_select,
    aten.index: _index,
    aten._unsafe_index: _index,
}
