"""Rewrite a traced graph into ops that have precise sharding rules.

Aliases vanish, ``*_like`` constructors lose their operand, and composite ops (means, norms, losses,
log-softmax) are decomposed, so that a mean over a split dim divides by the global count and a
logsumexp is shifted by the global maximum. Loop bodies are rewritten too.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx import _torch
from pfx.lax.body import Body
from pfx.lax.constrain import Constraint
from pfx.lax.label import Label
from pfx.lax.scan import Loop

aten = torch.ops.aten

_ALIASES = frozenset(
    {aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten.contiguous}
)
_LIKES: dict[Any, Any] = {
    aten.zeros_like: 0, aten.ones_like: 1, aten.empty_like: 0, aten.new_zeros: 0,
    aten.new_ones: 1, aten.new_empty: 0, aten.zeros: 0, aten.ones: 1, aten.empty: 0,
    aten.full_like: None, aten.new_full: None, aten.scalar_tensor: None,
}  # fmt: skip
_TORCH_DECOMPOSED = (
    aten._log_softmax, aten._log_softmax_backward_data, aten.nll_loss_forward,
    aten.nll_loss_backward, aten.mse_loss, aten.mse_loss_backward, aten.huber_loss,
    aten.huber_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
)  # fmt: skip


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    low = x.dtype in (torch.bfloat16, torch.float16)
    total = torch.sum(x, dims, keepdim, dtype=torch.float32 if low else None) if dims else x
    return (total / count).to(x.dtype)


def _var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    spread = x - _mean(x, dims, True)
    freedom = count - (1 if correction is None else correction)
    total = torch.sum(spread * spread, dims, keepdim)
    return total / max(freedom, 0) if freedom > 0 else total * math.inf


def _var_unbiased(x: torch.Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return _var(x, dim, correction=int(unbiased), keepdim=keepdim)


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    dims = _dims(x, dim)
    top = torch.amax(x, dims, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0)
    out = torch.log(torch.sum(torch.exp(x - top), dims, keepdim=True)) + top
    return out if keepdim else torch.squeeze(out, dims)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    if ord == math.inf:
        return torch.amax(torch.abs(x), dims, keepdim)
    if ord == -math.inf:
        return torch.amin(torch.abs(x), dims, keepdim)
    if ord == 0:
        return torch.sum((x != 0).to(x.dtype), dims, keepdim)
    if ord == 2:
        return torch.sqrt(torch.sum(x * x, dims, keepdim))
    return torch.pow(torch.sum(torch.pow(torch.abs(x), ord), dims, keepdim), 1 / ord)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:  # fmt: skip
    product = a @ b
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.mean: _mean,
    aten.var.correction: _var,
    aten.var: _var_unbiased,
    aten.std.correction: lambda *a, **k: torch.sqrt(_var(*a, **k)),
    aten.std: lambda *a, **k: torch.sqrt(_var_unbiased(*a, **k)),
    aten.logsumexp: _logsumexp,
    aten.linalg_vector_norm: _vector_norm,
    aten.addmm: _addmm,
    aten.addmv: _addmm,
    aten.baddbmm: _addmm,
}


@functools.lru_cache(maxsize=1)
def _torch_decompositions() -> dict[Any, Callable[..., Any]]:
    return _torch.decompositions(_TORCH_DECOMPOSED)


def _decomposition(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    own = _DECOMPOSED.get(target) or _DECOMPOSED.get(packet)
    return own or (_torch_decompositions().get(target) if packet in _TORCH_DECOMPOSED else None)


def simplify(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return an equivalent graph over simpler ops; the given one is left as it is."""
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    _copy_into(graph, module, env, None)
    return torch.fx.GraphModule(module, graph)


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
    if packet in _ALIASES or (packet is aten._to_copy and _is_identity(node)):
        return env[node.args[0]]
    if packet in _LIKES:
        return _filled(graph, node)
    decomposition = _decomposition(target) if node.op == "call_function" else None
    if decomposition is not None:
        return _inline(graph, node, env, decomposition)
    if node.target is operator.getitem and isinstance(env.get(node.args[0]), (list, tuple)):
        return env[node.args[0]][node.args[1]]  # type: ignore[index]
    if node.target is operator.getitem and isinstance(node.args[0].target, (Constraint, Label)):  # type: ignore[union-attr]
        return env[node.args[0]]
    if isinstance(target, Label):
        env[node.args[0]].meta["role"] = target.role
        return env[node.args[0]]
    new = graph.node_copy(node, lambda n: env[n])
    if isinstance(target, Constraint):
        new.meta["val"] = node.meta["val"][0]  # from here on a constraint has one value, no tuple
    if isinstance(target, Loop):
        new.target = replace(target, body=simplified_body(target.body), backward=None)
    return new


def _is_identity(node: torch.fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return before.dtype == after.dtype and before.device == after.device


def _filled(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    fill: Any = _LIKES[packet]
    if fill is None:
        position = {aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}[packet]
        fill = node.args[position] if len(node.args) > position else node.kwargs["fill_value"]
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    new = graph.call_function(aten.full.default, (list(value.shape), fill), options)
    new.meta = dict(node.meta)
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
