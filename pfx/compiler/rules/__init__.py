"""The table of sharding rules: one small function per op, in files by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import Rule, operand_nodes, pattern_rule, replicated_rule
from pfx.compiler.rules import (
    along,
    creation,
    extents,
    indexing,
    manual,
    matmul,
    nn,
    pointwise,
    reductions,
    scattering,
    spatial,
    views,
)

RuleFn = Callable[[torch.fx.Node], Rule | None]

TABLE: dict[Any, RuleFn] = {
    **views.TABLE,
    **extents.TABLE,
    **along.TABLE,
    **matmul.TABLE,
    **reductions.TABLE,
    **indexing.TABLE,
    **scattering.TABLE,
    **nn.TABLE,
    **spatial.TABLE,
    **creation.TABLE,
    **pointwise.TABLE,
}


def find_rule(node: torch.fx.Node, extra: dict[Any, str] | None = None) -> tuple[Rule, bool]:
    """Return a node's rule, and whether it is its own rather than the safe default.

    `extra` maps ops to patterns that a user registered.
    """
    rule = _own_rule(node, extra or {})
    if rule is None:
        return _whole(node), False
    return replace(rule, linear=_sound(node, rule.linear)), True


def _own_rule(node: torch.fx.Node, extra: dict[Any, str]) -> Rule | None:
    packet = getattr(node.target, "overloadpacket", node.target)
    for key in (node.target, packet):
        if key in extra:
            return pattern_rule(node, extra[key])
        if key in TABLE:
            return TABLE[key](node)
    found = manual.rule(node)
    if found is not None:
        return found
    return pointwise.rule(node) if pointwise.is_pointwise(node.target) else None


def _whole(node: torch.fx.Node) -> Rule:
    """The safe default; an op that depends on strides gets those that were traced."""
    rule = replicated_rule(node)
    packet = getattr(node.target, "overloadpacket", None)
    strided = packet in (torch.ops.aten.as_strided, torch.ops.aten.view)
    return replace(rule, localize=views.in_order) if strided else rule


def _sound(node: torch.fx.Node, groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Drop what no partial sum may flow through: bools do not add, and several results are read apart."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return ()
    dtypes = [n.meta["val"].dtype for n in operand_nodes(node)]
    return tuple(group for group in groups if all(dtypes[i] != torch.bool for i in group))
