"""Ops that only rearrange: reshape, permute, expand, select, cat, … A partial sum flows through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Call,
    Dim,
    Dims,
    Local,
    Rule,
    bind_sizes,
    named,
    operand_nodes,
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
    operand = tuple(
        dims[lead + i] if n == target[lead + i] else () for i, n in enumerate(source)
    )
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


def _cut(node: torch.fx.Node) -> Rule:
    """Ops that change the extent of some dims (slice, pad, split): those dims must be whole."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    outs = [tuple(v.shape) for v in result_values(node)]
    changed = {i for out in outs for i, n in enumerate(out) if n != shape[i]}
    operand = named("d", len(shape))
    sizes = bind_sizes([operand], [shape])
    results: list[tuple[Dim, ...]] = []
    for k, out in enumerate(outs):
        dims = [(f"o{k}_{i}",) if i in changed else operand[i] for i in range(len(out))]
        results.append(tuple(dims))
        sizes |= bind_sizes([results[-1]], [out])
    whole = {f for f in sizes if f.startswith("o")} | {f"d{i}" for i in changed}
    return Rule((operand,), tuple(results), sizes, frozenset(whole), linear=_PASS)


def _whole_dims(position: int) -> Any:
    """A rule for ops that move elements along the dims in args[position]: flip, roll, cumsum."""

    def rule(node: torch.fx.Node) -> Rule:
        shape = shape_of(node.args[0])  # type: ignore[arg-type]
        arg = node.args[position] if len(node.args) > position else list(range(len(shape)))
        touched = {int(d) % max(len(shape), 1) for d in (arg if isinstance(arg, (list, tuple)) else [arg])}  # type: ignore[arg-type]  # fmt: skip
        dims = named("d", len(shape))
        sizes = bind_sizes([dims], [shape])
        whole = frozenset(f"d{i}" for i in touched if i < len(shape))
        results = tuple(dims for _ in result_values(node))
        return Rule((dims,), results, sizes, whole, linear=_PASS if len(results) == 1 else ())

    return rule


def _cat(node: torch.fx.Node) -> Rule:
    out = shape_of(node)
    dim = (int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))) % len(out)  # type: ignore[arg-type]
    operands = operand_nodes(node)
    dims = named("d", len(out))
    tensors = [tuple((f"c{k}",) if i == dim else d for i, d in enumerate(dims)) for k in range(len(operands))]  # fmt: skip
    sizes = bind_sizes([dims, *tensors], [out, *(shape_of(n) for n in operands)])
    whole = frozenset({f"d{dim}"} | {f"c{k}" for k in range(len(operands))})
    return Rule(tuple(tensors), (dims,), sizes, whole, linear=(tuple(range(len(operands))),))


def _stack(node: torch.fx.Node) -> Rule:
    out = shape_of(node)
    dim = (int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))) % len(out)  # type: ignore[arg-type]
    dims = named("d", len(out))
    operand = tuple(d for i, d in enumerate(dims) if i != dim)
    count = len(operand_nodes(node))
    sizes = bind_sizes([dims], [out])
    return Rule((operand,) * count, (dims,), sizes, frozenset({f"d{dim}"}),
                linear=(tuple(range(count)),))  # fmt: skip


def _select_backward(node: torch.fx.Node) -> Rule:
    """``select_backward(grad, sizes, dim, index)``: zeros with one slice filled."""
    out = shape_of(node)
    dim = int(node.args[2]) % len(out)  # type: ignore[arg-type]
    dims = named("d", len(out))
    operand = tuple(d for i, d in enumerate(dims) if i != dim)
    sizes = bind_sizes([dims], [out])
    return Rule((operand,), (dims,), sizes, frozenset({f"d{dim}"}), linear=_PASS,
                localize=_local_select_backward)  # fmt: skip


def _local_select_backward(local: Local) -> Call:
    grad, _, *rest = local.node.args
    return Call(aten.select_backward.default, (grad, local.result_shape(), *rest))


def _slice_backward(node: torch.fx.Node) -> Rule:
    """``slice_backward(grad, sizes, dim, start, end, step)``: zeros with a range filled."""
    grad, out = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    dim = int(node.args[2]) % len(out)  # type: ignore[arg-type]
    dims = named("d", len(out))
    operand = tuple(("g",) if i == dim else d for i, d in enumerate(dims))
    sizes = bind_sizes([dims, operand], [out, grad])
    return Rule((operand,), (dims,), sizes, frozenset({f"d{dim}", "g"}), linear=_PASS,
                localize=_local_slice_backward)  # fmt: skip


def _local_slice_backward(local: Local) -> Call:
    grad, _, *rest = local.node.args
    return Call(aten.slice_backward.default, (grad, local.result_shape(), *rest))


TABLE: dict[Any, Any] = {
    aten.view: _reshape,
    aten._unsafe_view: _reshape,
    aten.reshape: _reshape,
    aten._reshape_alias: _reshape,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.expand: _expand,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.slice: _cut,
    aten.narrow: _cut,
    aten.split: _cut,
    aten.split_with_sizes: _cut,
    aten.constant_pad_nd: _cut,
    aten.flip: _whole_dims(1),
    aten.roll: _whole_dims(2),
    aten.cumsum: _whole_dims(1),
    aten.cumprod: _whole_dims(1),
    aten.sort: _whole_dims(1),
    aten.cat: _cat,
    aten.stack: _stack,
    aten.select_backward: _select_backward,
    aten.slice_backward: _slice_backward,
}
