"""Rewrite a traced graph into ops that have precise sharding rules.

Aliases vanish, ``*_like`` constructors lose their operand, and composite ops (means, norms, losses,
log-softmax) are decomposed, so that a mean over a split dim divides by the global count and a
logsumexp is shifted by the global maximum. Loop bodies are rewritten too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx import _torch
from pfx._torch import GraphModule
from pfx.compiler.decompositions import decomposition_of
from pfx.compiler.views import tidy_views
from pfx.lax.body import Body
from pfx.lax.constrain import Constraint
from pfx.lax.label import Label
from pfx.lax.manual.axis_index import AxisIndex
from pfx.lax.manual.boundary import Boundary
from pfx.lax.manual.collective import Collective
from pfx.lax.manual.variance import node_variance
from pfx.lax.manual.zeros import Zeros
from pfx.lax.scan import Loop

aten = torch.ops.aten

_ALIASES = frozenset(
    {aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten.contiguous}
)
_LIKES: dict[Any, Any] = {
    aten.zeros_like: 0, aten.ones_like: 1, aten.empty_like: 0, aten.new_zeros: 0,
    aten.new_ones: 1, aten.new_empty: 0, aten.zeros: 0, aten.ones: 1, aten.empty: 0, aten.zero: 0,
    aten.empty_strided: 0, aten.new_empty_strided: 0, aten.empty_permuted: 0,
    aten._efficientzerotensor: 0, aten.full_like: None, aten.new_full: None,
    aten.scalar_tensor: None, aten.fill.Scalar: None,
}  # fmt: skip
# Primitives with one result: from here on their nodes have that value, no tuple of it.
_SINGLE = (Constraint, Label, Collective, Boundary, AxisIndex, Zeros)
_FILL_POSITION = {aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0, aten.fill: 1}


def simplify(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return an equivalent graph over simpler ops; the given one is left as it is."""
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    _copy_into(graph, module, env, None)
    tidy_views(graph)
    return GraphModule(module, graph)


def _copy_into(
    graph: torch.fx.Graph,
    module: torch.fx.GraphModule,
    env: dict[torch.fx.Node, torch.fx.Node],
    inlined: torch.fx.Node | None,
) -> Any:
    """Copy nodes, rewriting each; returns what the source graph returns.

    `inlined` is the node whose decomposition is being copied: its nodes inherit its line.
    """
    for node in module.graph.nodes:
        if node.op == "output":
            result = torch.fx.map_arg(node.args[0], lambda n: env[n])
            if inlined is None:
                graph.output(result)
            return result
        if node in env:
            continue
        env[node] = _rewrite(graph, node, env)
        if inlined is not None and isinstance(env[node], torch.fx.Node):
            env[node].meta["source"] = inlined.meta.get("source", "")
    raise AssertionError("a graph without an output")


def _rewrite(graph: torch.fx.Graph, node: torch.fx.Node, env: dict[Any, Any]) -> Any:
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is aten._to_copy and not isinstance(node.args[0], torch.fx.Node):
        return _number(graph, node)  # a Python number that vmap made a tensor of
    if packet in _ALIASES or (_adds_nothing(node) and _is_identity(node)):
        return env[node.args[0]]
    if packet in _LIKES or target in _LIKES:
        return _filled(graph, node)
    if isinstance(target, Zeros):
        return _zeros(graph, node)
    decomposition = decomposition_of(target) if node.op == "call_function" else None
    if decomposition is not None:
        return _inline(graph, node, env, decomposition)
    if node.target is operator.getitem and isinstance(env.get(node.args[0]), (list, tuple)):
        return env[node.args[0]][node.args[1]]  # type: ignore[index]
    if node.target is operator.getitem and isinstance(node.args[0].target, _SINGLE):  # type: ignore[union-attr]
        return env[node.args[0]]
    if isinstance(target, Label):
        env[node.args[0]].meta["role"] = target.role
        return env[node.args[0]]
    new = graph.node_copy(node, lambda n: env[n])
    if isinstance(target, _SINGLE):
        new.meta |= {"val": node.meta["val"][0], "variance": None}
    if isinstance(target, Loop):
        new.target = replace(target, body=simplified_body(target.body), backward=None)
    return new


def _adds_nothing(node: torch.fx.Node) -> bool:
    """Tell a cast, and the addition of zero with which Python's ``sum`` begins."""
    zero = len(node.args) > 1 and type(node.args[1]) is int and node.args[1] == 0
    return node.target is aten._to_copy.default or (node.target is aten.add.Tensor and zero)


def _is_identity(node: torch.fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return before.dtype == after.dtype and before.device == after.device


def _filled(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    target: Any = node.target
    fill: Any = _LIKES.get(target, _LIKES.get(target.overloadpacket))
    if fill is None:
        position = _FILL_POSITION[target.overloadpacket]
        fill = node.args[position] if len(node.args) > position else node.kwargs["fill_value"]
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    new = graph.call_function(aten.full.default, (list(value.shape), fill), options)
    node_variance(node)  # no longer to be read off an operand
    new.meta = dict(node.meta)
    return new


def _number(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    new = graph.call_function(aten.full.default, ([], node.args[0]), options)
    new.meta = dict(node.meta)
    return new


def _zeros(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    (value,) = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    new = graph.call_function(aten.full.default, (list(value.shape), 0), options)
    new.meta = {**node.meta, "val": value, "variance": node_variance(node)[0]}
    return new


def _inline(
    graph: torch.fx.Graph, node: torch.fx.Node, env: dict[Any, Any], fn: Callable[..., Any]
) -> Any:
    """Trace a decomposition on the metas of the operands and copy its nodes here."""
    operands: list[torch.fx.Node] = list(node.all_input_nodes)

    def run(*values: torch.Tensor) -> list[Any]:
        feed = dict(zip(operands, values, strict=True))
        args = torch.fx.map_arg(node.args, lambda n: feed[n])
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: feed[n])
        out = fn(*args, **kwargs)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    traced = _torch.trace(run, [n.meta["val"] for n in operands])
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    inner = {place: env[n] for place, n in zip(places, operands, strict=True)}
    result = _copy_into(graph, traced.module, inner, node)
    return result if isinstance(node.meta["val"], (list, tuple)) else result[0]


def simplified_body(body: Body) -> Body:
    """The same body over simpler ops."""
    return replace(body, module=simplify(body.module))
