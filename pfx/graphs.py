"""Surgery on a graph that was just traced: what it found on the way becomes an input of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.fx

Outside = Callable[[], AbstractContextManager[None]]


def hoist_captured(
    graph: torch.fx.Graph, num_inputs: int, captured: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Move the inputs that were discovered on the way to the head; drop those that nothing uses."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    kept = []
    anchor = graph._root
    for i, node in enumerate(inputs):
        if i >= num_inputs and not node.users:
            graph.erase_node(node)
            continue
        anchor.append(node)
        anchor = node
        if i >= num_inputs:
            kept.append(captured[i - num_inputs])
    return kept


def lift_literals(module: torch.fx.GraphModule, outside: Outside) -> list[torch.Tensor]:
    """Make a tensor literal a number where it has no dims, else an input: bodies hold no data."""
    graph, lifted = module.graph, []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = getattr(module, node.target)
        if value.ndim:
            lifted.append(value)
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                new = graph.placeholder(f"literal_{len(lifted)}")
        else:
            with outside():
                number = value.item()
            options = {"dtype": value.dtype, "device": value.device}
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.aten.full.default, ([], number), options)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return lifted
