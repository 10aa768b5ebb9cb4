"""Which values of a graph are stacks of layers: dim 0 counts the layers, row by row through every op."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.compiler.rule import operand_nodes
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop

Node = torch.fx.Node
aten = torch.ops.aten

_ROW_BY_ROW = {aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default}


def stacks_of(graph: torch.fx.Graph, known: Mapping[Node, Any]) -> dict[Node, Any]:
    """Follow stacks through a graph: casts, elementwise ops and constraints keep them.

    Args:
        known: the stacks to start from, each with what to say of those that come from it.

    Returns:
        Every stack, those that a loop over one emits included, with what is said of its origin.
    """
    found = dict(known)
    for node in graph.nodes:
        if node.op != "call_function" or node in found:
            continue
        if node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source.target, Loop) and node.args[1] >= source.target.num_carry:
                origin = scanned(source, found)
                if origin is not None:
                    found[node] = origin
        elif keeps_rows(node):
            origins = [found[n] for n in operand_nodes(node) if n in found]
            if origins and all(origin == origins[0] for origin in origins):
                found[node] = origins[0]
    return found


def scanned(node: Node, stacks: Mapping[Node, Any]) -> Any | None:
    """Of what a loop runs over, the origin of the first stack."""
    loop: Loop = node.target  # type: ignore[assignment]
    xs = node.args[loop.num_carry : loop.num_carry + loop.num_xs]
    return next((stacks[x] for x in xs if x in stacks), None)  # type: ignore[index]


def keeps_rows(node: Node) -> bool:
    """Tell whether row i of the result depends on no row but i of an operand of the same length."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    if not _row_by_row(node.target):
        return False
    shapes = [n.meta["val"].shape for n in operand_nodes(node)]
    return all(len(shape) < value.ndim or shape[0] in (1, value.shape[0]) for shape in shapes)


def _row_by_row(target: Any) -> bool:
    if isinstance(target, Constraint):
        return target.sliced() is not None
    if not isinstance(target, OpOverload):
        return False
    return target in _ROW_BY_ROW or torch.Tag.pointwise in target.tags
