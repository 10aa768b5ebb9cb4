"""Keep the batch dims of matrix products apart.

torch computes a product of tensors with several batch dims by merging those into one. Merged, a batch
split over one mesh axis and heads split over another are no longer blocks of one dim, and would be
gathered; so ``reshape → bmm → reshape`` becomes one product again that names each dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from pfx import _torch
from pfx.compiler.loops import erase_dead
from pfx.lax.body import Body
from pfx.lax.scan import Loop

aten = torch.ops.aten
Node = torch.fx.Node


def unmerge_batches(graph: torch.fx.Graph) -> None:
    """Rewrite the batched products of a graph, and of its loops' bodies, in place."""
    for node in list(graph.nodes):
        if isinstance(node.target, Loop):
            body: Body = node.target.body
            unmerge_batches(body.module.graph)
        elif node.target is aten.bmm.default:
            _unmerge(graph, node)
    erase_dead(graph)


def _unmerge(graph: torch.fx.Graph, product: Node) -> None:
    operands = [_apart(graph, arg, product) for arg in product.args]  # type: ignore[arg-type]
    if any(x is None for x in operands):
        return
    left, right = operands
    lead = _shape(left)[:-2]
    if lead != _shape(right)[:-2]:
        return
    with graph.inserting_before(product):
        whole = _call(graph, aten.matmul.default, left, right, like=product)
    for user in list(product.users):
        if _reshapes(user):
            with graph.inserting_before(user):
                user.replace_all_uses_with(_shaped(graph, whole, _shape(user), user))
            graph.erase_node(user)
    if product.users:
        with graph.inserting_before(product):
            product.replace_all_uses_with(_shaped(graph, whole, _shape(product), product))
    graph.erase_node(product)


def _apart(graph: torch.fx.Graph, node: Node, product: Node) -> Node | None:
    """The tensor with several batch dims that `node` is with one, or None."""
    if _reshapes(node):
        source: Node = node.args[0]  # type: ignore[assignment]
        shape, size = _shape(source), _shape(node)[0]
        lead = next((shape[:i] for i in range(len(shape)) if math.prod(shape[:i]) == size), ())
        if sum(n > 1 for n in lead) < 2:
            return None
        with graph.inserting_before(product):
            return _shaped(graph, source, (*lead, *_shape(node)[1:]), node)
    if node.target is aten.transpose.int and {d % 3 for d in node.args[1:]} == {1, 2}:  # type: ignore[operator]
        inner = _apart(graph, node.args[0], product)  # type: ignore[arg-type]
        if inner is None:
            return None
        with graph.inserting_before(product):
            return _call(graph, aten.transpose.int, inner, -2, -1, like=node)
    return None


def _reshapes(node: Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in (aten.view, aten.reshape, aten._unsafe_view)


def _shaped(graph: torch.fx.Graph, node: Node, shape: tuple[int, ...], like: Node) -> Node:
    if _shape(node) == shape:
        return node
    return _call(graph, aten.reshape.default, node, list(shape), like=like)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _call(graph: torch.fx.Graph, op: Any, *args: Any, like: Node) -> Node:
    """Add a call where the graph inserts now, with the line and the variance of another node."""
    new = graph.call_function(op, args)
    fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
    new.meta = {**like.meta, "val": _torch.fake_call(op, fakes, {}, _torch.mode_of(fakes[0]))}
    return new
