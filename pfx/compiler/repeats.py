"""Updated parameters that are computed twice: one that looks ahead at them, and the one that moves them.

An average of parameters adds the update to see what it averages, and the step adds it again. Merging
equal calls in general would undo rematerialization, whose point is to compute twice; a parameter plus
a scaled direction is only found where parameters are updated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


def merge_repeated_updates(graph: torch.fx.Graph) -> None:
    """Keep the first of equal sums ``input + direction · rate``, in place."""
    known: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if _is_update(node):
            first = known.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_update(node: torch.fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    start, update = node.args
    return (
        isinstance(start, torch.fx.Node)
        and start.op == "placeholder"
        and isinstance(update, torch.fx.Node)
        and update.target is aten.mul.Tensor
        and isinstance(update.args[1], torch.fx.Node)
        and update.args[1].meta["val"].ndim == 0
    )
