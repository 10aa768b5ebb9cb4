"""Ops that change the extent of dims, join tensors or cut them: the changed dims stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Call,
    Dim,
    Dims,
    Local,
    Rule,
    argument,
    bind_sizes,
    named,
    operand_nodes,
    result_values,
    shape_of,
)

aten = torch.ops.aten
_PASS = ((0,),)


def _dim(node: torch.fx.Node, ndim: int) -> int:
    return int(argument(node, "dim")) % max(ndim, 1)


def _resized(node: torch.fx.Node, touched: Iterable[int] = (), *, linear: bool = True) -> Rule:
    """The rule of an op whose results differ from its operand in the extent of some dims."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    outs = [tuple(v.shape) for v in result_values(node)]
    changed = {i for out in outs for i, n in enumerate(out) if n != shape[i]} | set(touched)
    operand = named("d", len(shape))
    sizes = bind_sizes([operand], [shape])
    results: list[tuple[Dim, ...]] = []
    for k, out in enumerate(outs):
        dims = [(f"o{k}_{i}",) if i in changed else operand[i] for i in range(len(out))]
        results.append(tuple(dims))
        sizes |= bind_sizes([results[-1]], [out])
    whole = {f for f in sizes if f.startswith("o")} | {f"d{i}" for i in changed}
    group = _PASS if linear and len(outs) == 1 else ()
    return Rule((operand,), tuple(results), sizes, frozenset(whole), linear=group)


def _split(node: torch.fx.Node) -> Rule:
    return _resized(node, [_dim(node, len(shape_of(node.args[0])))])  # type: ignore[arg-type]


def _pad(node: torch.fx.Node) -> Rule:
    pads, ndim = argument(node, "pad"), len(shape_of(node))
    padded = {ndim - 1 - i // 2 for i, n in enumerate(pads) if n}
    return _resized(node, padded, linear=argument(node, "value") == 0)


def _cat(node: torch.fx.Node) -> Rule | None:
    out, operands = shape_of(node), operand_nodes(node)
    shapes = [shape_of(n) for n in operands]
    if any(len(shape) != len(out) for shape in shapes):
        return None  # torch.cat skips empty tensors of one dim
    dim = _dim(node, len(out))
    dims = named("d", len(out))
    tensors = [
        tuple((f"c{k}",) if i == dim else d for i, d in enumerate(dims)) for k in range(len(shapes))
    ]
    sizes = bind_sizes([dims, *tensors], [out, *shapes])
    whole = frozenset({f"d{dim}"} | {f"c{k}" for k in range(len(shapes))})
    return Rule(tuple(tensors), (dims,), sizes, whole, linear=(tuple(range(len(shapes))),))


def _stack(node: torch.fx.Node) -> Rule:
    out = shape_of(node)
    dim = _dim(node, len(out))
    dims = named("d", len(out))
    operand = tuple(d for i, d in enumerate(dims) if i != dim)
    count = len(operand_nodes(node))
    sizes = bind_sizes([dims], [out])
    return Rule((operand,) * count, (dims,), sizes, frozenset({f"d{dim}"}),
                linear=(tuple(range(count)),))  # fmt: skip


def _slot(*, slices: bool, backward: bool) -> Callable[[torch.fx.Node], Rule]:
    """Write a slice into one dim: of a tensor (``scatter``), or of zeros (``backward``)."""

    def rule(node: torch.fx.Node) -> Rule:
        out = shape_of(node)
        dim = _dim(node, len(out))
        dims = named("d", len(out))
        piece = tuple(("s",) if i == dim else d for i, d in enumerate(dims) if i != dim or slices)
        operands: tuple[Dims, ...] = (piece,) if backward else (dims, piece)
        sizes = bind_sizes([dims, *operands], [out, *map(shape_of, operand_nodes(node))])
        whole = frozenset({f"d{dim}", "s"} & set(sizes))
        return Rule(operands, (dims,), sizes, whole, linear=(tuple(range(len(operands))),),
                    localize=_local_slot if backward else None)  # fmt: skip

    return rule


def _local_slot(local: Local) -> Call:
    grad, _, *rest = local.node.args
    return Call(local.node.target, (grad, local.result_shape(), *rest))  # type: ignore[arg-type]


def _diagonal_scatter(node: torch.fx.Node) -> Rule:
    """``diagonal_scatter(x, piece, offset, dim1, dim2)``: the matrix dims are whole."""
    out = shape_of(node)
    matrix = {int(argument(node, name)) % len(out) for name in ("dim1", "dim2")}
    dims = named("d", len(out))
    piece = (*(d for i, d in enumerate(dims) if i not in matrix), ("s",))
    sizes = bind_sizes([dims, piece], [out, shape_of(node.args[1])])  # type: ignore[arg-type]
    whole = frozenset({f"d{i}" for i in matrix} | {"s"})
    return Rule((dims, piece), (dims,), sizes, whole, linear=((0, 1),))


def _triangle(node: torch.fx.Node) -> Rule:
    """Tril and triu: a part of the matrix has its own diagonal."""
    shape = shape_of(node)
    dims = named("d", len(shape))
    placed = frozenset(f for (f,) in dims[-2:])
    return Rule(
        (dims,), (dims,), bind_sizes([dims], [shape]), linear=_PASS, localize=_local_triangle,
        placed=placed,
    )  # fmt: skip


def _local_triangle(local: Local) -> Call:
    n = len(local.rule.results[0])
    args = (local.node.target, local.node.args[0], argument(local.node, "diagonal"))
    return Call(_triangle_at, args, {}, (local.place(f"d{n - 2}"), local.place(f"d{n - 1}")))


def _triangle_at(op: Any, x: torch.Tensor, diagonal: int, *, offset: tuple[int, ...]) -> Any:
    return op(x, diagonal + offset[0] - offset[1])


TABLE: dict[Any, Any] = {
    aten.slice: _resized,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.unsafe_split: _split,
    aten.constant_pad_nd: _pad,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.select_backward: _slot(slices=False, backward=True),
    aten.slice_backward: _slot(slices=True, backward=True),
    aten.select_scatter: _slot(slices=False, backward=False),
    aten.slice_scatter: _slot(slices=True, backward=False),
    aten.diagonal_scatter: _diagonal_scatter,
    aten.tril: _triangle,
    aten.triu: _triangle,
}
