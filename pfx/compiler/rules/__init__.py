"""The table of sharding rules: one small function per op, in files by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import Rule, pattern_rule, replicated_rule
from pfx.compiler.rules import creation, indexing, matmul, nn, pointwise, reductions, views

RuleFn = Callable[[torch.fx.Node], Rule]

TABLE: dict[Any, RuleFn] = {
    **views.TABLE,
    **matmul.TABLE,
    **reductions.TABLE,
    **indexing.TABLE,
    **nn.TABLE,
    **creation.TABLE,
    **pointwise.TABLE,
}


def find_rule(node: torch.fx.Node, extra: dict[Any, str] | None = None) -> tuple[Rule, bool]:
    """Return a node's rule, and whether it is its own rather than the safe default.

    `extra` maps ops to patterns that a user registered.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    for key in (node.target, packet):
        if extra and key in extra:
            return pattern_rule(node, extra[key]), True
        if key in TABLE:
            return TABLE[key](node), True
    if pointwise.is_pointwise(node.target):
        return pointwise.rule(node), True
    return replicated_rule(node), False
