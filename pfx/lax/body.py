"""A traced function as a value: its graph, its vjp cut into a forward and a backward part.

`scan` and `remat` differentiate a body by tracing its vjp once. The joint graph is then cut: what
does not depend on a cotangent is the forward part, the rest is the backward part, and the values
that cross the cut are the residuals. A view, a constant or a constraint is recomputed rather than
saved: saving the view of a weight would copy the weight once per iteration, and saving a gathered
weight would undo ZeRO-3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx

from pfx import _torch
from pfx._torch import GraphModule, OpOverload
from pfx.lax.manual.local import variance_of
from pfx.lax.manual.variance import node_variance
from pfx.lax.ops.functionalize import functionalize
from pfx.lax.region import inside
from pfx.meta import TensorMeta


@dataclass(frozen=True, eq=False)
class Body:
    """A pure function of tensors as a graph; `captured` are its trailing inputs."""

    module: torch.fx.GraphModule
    in_metas: tuple[TensorMeta, ...]
    out_metas: tuple[TensorMeta, ...]

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        if _torch.is_tracing():
            return _replay(self.module, args)  # keeps the source line of every node
        with inside(None):
            return self.module(*args)

    @cached_property
    def split(self) -> Split:
        """The vjp of this body cut in two, with every needed value saved."""
        return _split(self)


@dataclass(frozen=True, eq=False)
class Split:
    """Forward: inputs -> outputs + residuals. Backward: inputs + residuals + cotangents -> inputs'."""

    forward: Body
    backward: Body
    num_residuals: int


def is_differentiable(meta: Any) -> bool:
    """Tell whether a tensor of this dtype can carry a gradient."""
    return meta.dtype.is_floating_point or meta.dtype.is_complex


def owned(
    outs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Clone what an autograd.Function may not return: an operand, or what overlaps itself.

    torch lays a tangent out as its primal is, which fails where an expanded primal overlaps itself.
    """
    return tuple(
        out.clone() if any(out is x for x in operands) or _overlaps(out) else out for out in outs
    )


def _overlaps(x: torch.Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


def trace_body(
    fn: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Any]
) -> tuple[Body, list[torch.Tensor]]:
    """Trace `fn`; returns its body and the closed-over tensors that became trailing inputs."""
    traced = _torch.trace(fn, [meta_of(value) for value in inputs], variance_of)
    return _body(functionalize(traced, "the body of a scan or remat")), traced.captured


def meta_of(value: Any) -> TensorMeta:
    """The form of a value, with what it is along the axes of a manual region."""
    if isinstance(value, TensorMeta):
        return value
    return replace(TensorMeta.of(value), variance=variance_of(value))


def _body(module: torch.fx.GraphModule) -> Body:
    """Wrap a graph, with every op in the form that can be run on slices and differentiated again.

    A view becomes a reshape, since a slice of a stack has strides of its own. Forward mode leaves
    zeros that hold no memory, and dead ops on the meta device that nothing differentiates.
    """
    for node in reversed(module.graph.nodes):
        node.target = _REPLAYABLE.get(node.target, node.target)
        if isinstance(node.target, OpOverload) and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    ins = [node for node in module.graph.nodes if node.op == "placeholder"]
    return Body(module, _metas(ins), _metas(_outputs(module.graph)))


_REPLAYABLE: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default,
}


def _metas(nodes: Sequence[torch.fx.Node]) -> tuple[TensorMeta, ...]:
    return tuple(
        replace(TensorMeta.of(node.meta["val"]), variance=node_variance(node)) for node in nodes
    )


def cotangent_meta(meta: TensorMeta) -> TensorMeta:
    """The form of a value's cotangent."""
    return replace(meta, variance=meta.variance and meta.variance.dual)


def _outputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])


def _with(
    inputs: Sequence[torch.Tensor], places: Sequence[int], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The inputs with other values in some places."""
    new = dict(zip(places, values, strict=True))
    return [new.get(i, value) for i, value in enumerate(inputs)]


def vjp_of(body: Body) -> Callable[..., list[torch.Tensor]]:
    """Return ``(inputs, cotangents of float outputs) -> outputs + cotangents of float inputs``."""
    num = len(body.in_metas)
    wanted = [i for i, meta in enumerate(body.in_metas) if is_differentiable(meta)]
    given = [i for i, meta in enumerate(body.out_metas) if is_differentiable(meta)]

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        inputs, cotangents = args[:num], args[num:]

        def of_wanted(*values: torch.Tensor) -> Any:
            outs = _replay(body.module, _with(inputs, wanted, values))
            return tuple(outs[i] for i in given), tuple(outs)

        primals = [inputs[i] for i in wanted]
        _, pull, outs = torch.func.vjp(of_wanted, *primals, has_aux=True)  # type: ignore[misc]
        return [*outs, *pull(tuple(cotangents))]

    return run


def jvp_of(body: Body, moving: Sequence[int]) -> Callable[..., list[torch.Tensor]]:
    """Return ``(inputs, tangents of the inputs moving) -> tangents of the float outputs``."""
    num = len(body.in_metas)
    given = [i for i, meta in enumerate(body.out_metas) if is_differentiable(meta)]

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        inputs, tangents = args[:num], args[num:]

        def of_moving(*values: torch.Tensor) -> Any:
            outs = _replay(body.module, _with(inputs, moving, values))
            return tuple(outs[i] for i in given)

        return list(torch.func.jvp(of_moving, tuple(inputs[i] for i in moving), tangents)[1])

    return run


def _replay(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph node by node, keeping the source line of each node in the enclosing trace."""
    env: dict[torch.fx.Node, Any] = {}
    feed = iter(inputs)
    with inside(None):  # the graph has its casts already
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
            elif node.op == "output":
                return list(torch.fx.map_arg(node.args[0], lambda n: env[n]))
            else:
                args = torch.fx.map_arg(node.args, lambda n: env[n])
                kwargs = torch.fx.map_arg(node.kwargs, lambda n: env[n])
                with _torch.source_line(node.meta.get("source", "")):
                    env[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without an output")


def joint(body: Body) -> Body:
    """Trace the vjp of a body: inputs + cotangents -> outputs + input cotangents."""
    cotangents = [cotangent_meta(meta) for meta in body.out_metas if is_differentiable(meta)]
    traced = _torch.trace(vjp_of(body), [*body.in_metas, *cotangents])
    assert not traced.captured
    return _body(functionalize(traced, "the gradient of a body"))


def _split(body: Body) -> Split:
    whole = joint(body)
    graph = whole.module.graph
    num_in, num_out = len(body.in_metas), len(body.out_metas)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    outs = _outputs(graph)
    late = _depends_on(graph, places[num_in:])
    residuals: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set(places[:num_in])

    def need(node: torch.fx.Node) -> None:
        if node in seen or node in late:
            return
        seen.add(node)
        if _cheap(node):
            for arg in node.all_input_nodes:
                need(arg)
        else:
            residuals.append(node)

    for node in graph.nodes:
        if node in late:
            for arg in node.all_input_nodes:
                need(arg)
    for node in outs[num_out:]:
        need(node)
    forward = _extract(whole.module, places[:num_in], [*outs[:num_out], *residuals])
    backward = _extract(
        whole.module, [*places[:num_in], *residuals, *places[num_in:]], outs[num_out:]
    )
    return Split(forward, backward, len(residuals))


def _depends_on(graph: torch.fx.Graph, roots: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    marked = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and (
            node.meta.get("late") or any(arg in marked for arg in node.all_input_nodes)
        ):
            marked.add(node)
    return marked


def _cheap(node: torch.fx.Node) -> bool:
    """Tell whether recomputing a value in the backward part costs nothing worth saving it for."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return node.op == "get_attr" or _cheap(node.args[0])  # type: ignore[arg-type]
    if getattr(node.target, "recompute", False):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None for r in returns)
    return is_view or not node.all_input_nodes or node.target.overloadpacket in _REDOABLE


_REDOABLE = frozenset(
    {torch.ops.aten.reshape, torch.ops.aten._unsafe_view, torch.ops.aten.full_like}
)


def _extract(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
) -> Body:
    """Cut the part of a graph that computes `outputs` from `inputs` into a body of its own."""
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for i, node in enumerate(inputs):
        node_variance(node)
        env[node] = graph.placeholder(f"in_{i}")
        env[node].meta = dict(node.meta)
    needed = _ancestors(outputs, set(inputs))
    for node in module.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output([env[node] for node in outputs])
    return _body(GraphModule(module, graph))


def _ancestors(outputs: Sequence[torch.fx.Node], stop: set[torch.fx.Node]) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    stack = [node for node in outputs if node not in stop]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(arg for arg in node.all_input_nodes if arg not in stop)
    return found
