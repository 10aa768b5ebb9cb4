"""Ops that only rearrange: reshape, permute, expand, select, cat, … A partial sum flows through."""

from __future__ import annotations

from collections.abc import Sequence
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
    result_values,
    shape_of,
)

aten = torch.ops.aten
_PASS = ((0,),)


def factorize(
    source: Sequence[int], target: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Find the common factors of two shapes with the same number of elements.

    Returns the factors of both, their sizes, and the factors that must stay whole: those of a group
    of dims that a reshape cuts through.

    >>> factorize((6, 4), (2, 3, 4))[:2]
    ((('a', 'b'), ('c',)), (('a',), ('b',), ('c',)))
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for lows, highs in _groups(source, target):
        pieces = _pieces([source[i] for i in lows], [target[j] for j in highs])
        if pieces is None:
            for dims, index, shape in ((left, lows, source), (right, highs, target)):
                for i in index:
                    name = _letter(len(sizes))
                    sizes[name], dims[i] = shape[i], [name]
                    whole.add(name)
            continue
        for size, i, j in pieces:
            name = _letter(len(sizes))
            sizes[name] = size
            left[lows[i]].append(name)
            right[highs[j]].append(name)
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset(whole)


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else f"f{i}"


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair runs of dims with equal products; dims of size 1 belong to no run."""
    a = [i for i, n in enumerate(source) if n != 1]
    b = [j for j, n in enumerate(target) if n != 1]
    if 0 in source or 0 in target:
        return [(a, b)]
    groups = []
    while a:
        lows, highs = [a.pop(0)], [b.pop(0)]
        x, y = source[lows[0]], target[highs[0]]
        while x != y:
            if x < y:
                lows.append(a.pop(0))
                x *= source[lows[-1]]
            else:
                highs.append(b.pop(0))
                y *= target[highs[-1]]
        groups.append((lows, highs))
    return groups


def _pieces(low: list[int], high: list[int]) -> list[tuple[int, int, int]] | None:
    """Cut two runs into common factors (size, index in low, index in high); None if they cross."""
    if 0 in low or 0 in high:
        return None
    out = []
    i = j = 0
    x, y = low[0], high[0]
    while True:
        small = min(x, y)
        if max(x, y) % small:
            return None
        out.append((small, i, j))
        x, y = x // small, y // small
        if x == 1:
            i += 1
        if y == 1:
            j += 1
        if i == len(low) or j == len(high):
            return out
        x = low[i] if x == 1 else x
        y = high[j] if y == 1 else y


def _reshape(node: torch.fx.Node) -> Rule:
    source, target, sizes, whole = factorize(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]
    return Rule((source,), (target,), sizes, whole, linear=_PASS, localize=_local_reshape)


def _local_reshape(local: Local) -> Call:
    return Call(aten.reshape.default, (local.node.args[0], local.result_shape()))


def _reordered(node: torch.fx.Node, order: Sequence[int]) -> Rule:
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    dims = named("d", len(shape))
    sizes = bind_sizes([dims], [shape])
    return Rule((dims,), (tuple(dims[i] for i in order),), sizes, linear=_PASS)


def _permute(node: torch.fx.Node) -> Rule:
    ndim = len(shape_of(node))
    return _reordered(node, [d % ndim for d in node.args[1]])  # type: ignore[union-attr]


def _transpose(node: torch.fx.Node) -> Rule:
    ndim = len(shape_of(node))
    order = list(range(ndim))
    if ndim:
        i, j = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
        order[i], order[j] = j, i
    return _reordered(node, order)


def _t(node: torch.fx.Node) -> Rule:
    return _reordered(node, list(reversed(range(len(shape_of(node))))))


def _expand(node: torch.fx.Node) -> Rule:
    source, target = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    lead = len(target) - len(source)
    dims = named("d", len(target))
    operand = tuple(dims[lead + i] if n == target[lead + i] else () for i, n in enumerate(source))
    sizes = bind_sizes([dims], [target])
    return Rule((operand,), (dims,), sizes, linear=_PASS, localize=_local_expand)


def _local_expand(local: Local) -> Call:
    return Call(aten.expand.default, (local.node.args[0], local.result_shape()))


def _drop_dims(node: torch.fx.Node, gone: Sequence[int]) -> Rule:
    """The rule of an op that takes whole dims away: select, squeeze, unbind."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    dims = named("d", len(shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in gone)
    results = tuple(kept for _ in result_values(node))
    whole = frozenset(f"d{i}" for i in gone)
    return Rule((dims,), results, bind_sizes([dims], [shape]), whole, linear=_PASS)


def _select(node: torch.fx.Node) -> Rule:
    return _drop_dims(node, [int(node.args[1]) % len(shape_of(node.args[0]))])  # type: ignore[arg-type]


def _unbind(node: torch.fx.Node) -> Rule:
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return _drop_dims(node, [dim % len(shape_of(node.args[0]))])  # type: ignore[arg-type]


def _unsqueeze(node: torch.fx.Node) -> Rule:
    dim = int(node.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    dims = named("d", len(shape))
    result: Dims = (*dims[:dim], (), *dims[dim:])
    return Rule((dims,), (result,), bind_sizes([dims], [shape]), linear=_PASS)


def _squeeze(node: torch.fx.Node) -> Rule:
    return Rule(*_same_order(node), linear=_PASS, localize=_local_reshape)


def _same_order(node: torch.fx.Node) -> tuple[tuple[Dims], tuple[Dims], dict[str, int]]:
    source, target, sizes, _ = factorize(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]
    return (source,), (target,), sizes


def _paired(node: torch.fx.Node) -> Rule:
    """A complex tensor seen as pairs of reals, or the other way round."""
    shapes = [shape_of(node.args[0]), shape_of(node)]  # type: ignore[arg-type]
    dims = named("d", min(map(len, shapes)))
    both = [(*dims, ("pair",)) if len(shape) > len(dims) else dims for shape in shapes]
    sizes = bind_sizes(both, shapes)
    return Rule((both[0],), (both[1],), sizes, frozenset({"pair"}), linear=_PASS,
                localize=in_order)  # fmt: skip


def in_order(local: Local) -> Call:
    """Call an op that reads memory as it lies on a tensor that lies as it was traced."""
    operand = local.node.args[0]
    order = memory_order(operand.meta["val"])  # type: ignore[union-attr]
    return Call(_in_order, (local.node.target, order, *local.node.args), local.node.kwargs)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dims of a tensor from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=lambda i: (-tensor.stride(i), i))


def _in_order(op: Any, order: list[int], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    inverse = sorted(range(x.ndim), key=lambda i: order[i])
    return op(x.permute(order).contiguous().permute(inverse), *args, **kwargs)


TABLE: dict[Any, Any] = {
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias), _reshape
    ),
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.expand: _expand,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.view_as_real: _paired,
    aten.view_as_complex: _paired,
}
