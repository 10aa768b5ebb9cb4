"""Tidy the rearrangements of a graph: drop those that change nothing, share equal ones.

Two reshapes of one activation are one value; otherwise a gather of the activation would be done once
for each of them. Only views are shared: sharing computed values would undo rematerialization.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx._torch import OpOverload

aten = torch.ops.aten

_SAME_SHAPE_IS_IDENTITY = frozenset(
    {aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.slice, aten.squeeze}
)


def tidy_views(graph: torch.fx.Graph) -> None:
    """Remove identity rearrangements and merge equal views, in place."""
    seen: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if not isinstance(node.meta.get("val"), torch.Tensor) or not rearranges(node.target):
            continue
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def rearranges(target: Any) -> bool:
    """Tell an op that only moves or reinterprets the elements of its first operand."""
    if not isinstance(target, OpOverload):
        return False
    if target.overloadpacket in (aten.reshape, aten._unsafe_view):
        return True
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not target._schema.is_mutable


def _changes_nothing(node: torch.fx.Node) -> bool:
    source, result = node.args[0], node.meta["val"]
    assert isinstance(source, torch.fx.Node)
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if source.meta["val"].dtype != result.dtype:
        return False  # view(dtype)
    if packet is aten.permute:
        return [d % result.ndim for d in node.args[1]] == list(range(result.ndim))  # type: ignore[union-attr]
    return packet in _SAME_SHAPE_IS_IDENTITY and source.meta["val"].shape == result.shape


def _frozen(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(item) for item in arg)
    if isinstance(arg, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in arg.items()))
    return arg
