"""Reassociate sums so that what may be partial is added first, and reduced once.

The gradient of a value with several readers is a chain of adds, ``((w + p) + q) + r``. Where p, q and
r are results of contractions, as when one activation feeds three projections, they are partial sums on
a mesh and w may not be: each would be reduced before it is added. ``w + ((p + q) + r)`` is reduced once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.loops import outputs_of
from pfx.compiler.views import rearranges
from pfx.lax.scan import Loop

aten = torch.ops.aten
Node = torch.fx.Node

_CONTRACTIONS = frozenset({
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.sum, aten.convolution,
    aten.embedding_dense_backward,
})  # fmt: skip


def reassociate_sums(graph: torch.fx.Graph) -> None:
    """Reorder the chains of adds of a graph, and of its loops' bodies, in place."""
    outs = set(outputs_of(graph))
    for node in list(graph.nodes):
        if isinstance(node.target, Loop):
            reassociate_sums(node.target.body.module.graph)
        elif _is_add(node) and not _continues(node, outs):
            _reorder(graph, node, outs)


def _is_add(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    form = lambda n: (n.meta["val"].shape, n.meta["val"].dtype)
    return all(isinstance(arg, Node) and form(arg) == form(node) for arg in node.args)


def _continues(node: Node, outs: set[Node]) -> bool:
    """Tell whether a sum is only a term of the next one."""
    return len(node.users) == 1 and node not in outs and _is_add(next(iter(node.users)))


def _reorder(graph: torch.fx.Graph, last: Node, outs: set[Node]) -> None:
    """Rewrite the chain that ends at `last` and runs through first operands."""
    chain = [last]
    while True:
        first: Any = chain[-1].args[0]
        if not (_is_add(first) and _continues(first, outs)):
            break
        chain.append(first)
    chain.reverse()
    terms: list[Any] = [chain[0].args[0], *(node.args[1] for node in chain)]
    partial = [term for term in terms if _may_be_partial(term)]
    if len(partial) < 2 or len(partial) == len(terms):
        return
    total = _sum(graph, partial, chain, last)
    whole = _sum(graph, [t for t in terms if t not in partial], chain, last)
    with graph.inserting_before(last):
        result = graph.call_function(aten.add.Tensor, (whole, total))
    result.meta = dict(last.meta)
    last.replace_all_uses_with(result)
    for node in reversed(chain):
        graph.erase_node(node)


def _sum(graph: torch.fx.Graph, terms: list[Node], chain: list[Node], last: Node) -> Node:
    """Add some terms, each as soon as the chain had it."""
    total = terms[0]
    for term in terms[1:]:
        at = next((node for node in chain if term in node.args), last)
        with graph.inserting_before(at):
            new = graph.call_function(aten.add.Tensor, (total, term))
        new.meta = dict(at.meta)
        total = new
    return total


def _may_be_partial(node: Node) -> bool:
    """Tell a contraction, or what only reshapes one that nobody else reads."""
    while rearranges(node.target) and len(node.args[0].users) == 1:  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    return getattr(node.target, "overloadpacket", None) in _CONTRACTIONS
