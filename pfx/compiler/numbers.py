"""Make each number of a step once: a norm that a guard, a clip and a metric ask for is one reduction.

Only 0-d values are shared. Sharing larger ones would keep them alive, and undo rematerialization; what
a shared number was reduced from is not shared, and goes if nobody else reads it.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.compiler.loops import erase_dead

Node = torch.fx.Node


def share_numbers(graph: torch.fx.Graph) -> None:
    """Replace every 0-d value that is computed again by its first computation, in place."""
    fresh = itertools.count()
    classes: dict[Node, int] = {}  # nodes of one class are one computation of one input
    known: dict[Any, int] = {}
    first: dict[int, Node] = {}
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) or node.target is operator.getitem:
            key = (node.target, _frozen(node.args, classes), _frozen(node.kwargs, classes))
            if key not in known:
                known[key] = next(fresh)
            classes[node] = known[key]
        else:
            classes[node] = next(fresh)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            made = first.setdefault(classes[node], node)
            if made is not node:
                node.replace_all_uses_with(made)
    erase_dead(graph)


def _frozen(arg: Any, classes: dict[Node, int]) -> Any:
    """An argument as a key: 0, 0.0, −0.0 and False are four."""
    if isinstance(arg, Node):
        return Node, classes[arg]
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(item, classes) for item in arg)
    if isinstance(arg, dict):
        return tuple(sorted((key, _frozen(item, classes)) for key, item in arg.items()))
    return type(arg), repr(arg)
