"""Graph passes around loops: constraints move into them, what nobody reads leaves them.

A constraint on the stacked operand or result of a scan whose leading dim it leaves whole says the
same of every slice, so it moves into the body. That is all ZeRO-3 needs: the gather of a layer's
parameters and the scatter of its gradient happen inside the loop. A cast between the loop and the
constraint on its result, to the dtype that gradients are reduced in, moves with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx._torch import GraphModule
from pfx.lax.body import Body
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop


def outputs_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes a graph returns."""
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])


def placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs of a graph."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def _body(body: Body, graph: torch.fx.Graph) -> Body:
    return replace(body, module=GraphModule(body.module, graph))


def _copied(body: Body) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    result = graph.graph_copy(body.module.graph, {})
    graph.output(result)
    return graph


def sink_constraints(graph: torch.fx.Graph) -> None:
    """Move constraints on stacked operands and results of scans into their bodies, all depths."""
    for node in list(graph.nodes):
        if isinstance(node.target, Loop):
            _sink_operands(node)
            _sink_results(node)
            body = _copied(node.target.body)
            sink_constraints(body)
            node.target = replace(node.target, body=_body(node.target.body, body))
    erase_dead(graph)


def _sliced_constraint(node: torch.fx.Node) -> Constraint | None:
    """The constraint of `node`, for a slice; None if it is no constraint or splits dim 0."""
    return node.target.sliced() if isinstance(node.target, Constraint) else None


def _sink_operands(node: torch.fx.Node) -> None:
    loop: Loop = node.target  # type: ignore[assignment]
    moved: dict[int, Constraint] = {}
    operands = list(node.args)
    for i in range(loop.num_carry, loop.num_carry + loop.num_xs):
        found: list[Constraint] = []
        while (constraint := _sliced_constraint(operands[i])) is not None:  # type: ignore[arg-type]
            found.append(constraint)
            operands[i] = operands[i].args[0]  # type: ignore[union-attr]
        if found:
            moved[i] = found[0]  # the last one written is what the body sees
    if not moved:
        return
    graph = _copied(loop.body)
    places = placeholders(graph)
    for i, constraint in moved.items():
        with graph.inserting_before(places[-1].next):
            item = _constrained(graph, places[i], constraint)
        places[i].replace_all_uses_with(item, lambda user, item=item: user is not item)
    node.args = tuple(operands)
    node.target = replace(loop, body=_body(loop.body, graph))


def _constrained(
    graph: torch.fx.Graph, value: torch.fx.Node, constraint: Constraint
) -> torch.fx.Node:
    node = graph.call_function(constraint, (value,))
    node.meta = dict(value.meta)
    return node


def _sink_results(node: torch.fx.Node) -> None:
    loop: Loop = node.target  # type: ignore[assignment]
    moved: dict[int, tuple[torch.dtype, Constraint]] = {}
    for item in list(node.users):
        i: int = item.args[1]  # type: ignore[assignment]
        call = _only_user(item)
        if call is not None and _widens(call):
            call = _only_user(call)
        sliced = None if call is None or i < loop.num_carry else _sliced_constraint(call)
        if call is None or sliced is None:
            continue
        moved[i] = call.meta["val"].dtype, sliced
        item.meta |= {"role": call.meta.get("role", ""), "val": call.meta["val"]}
        call.replace_all_uses_with(item)
    if not moved:
        return
    graph, metas, values = _copied(loop.body), list(loop.body.out_metas), list(node.meta["val"])
    end = next(n for n in reversed(graph.nodes) if n.op == "output")
    outs = list(end.args[0])
    for i, (dtype, constraint) in moved.items():
        with graph.inserting_before(end):
            outs[i] = _constrained(graph, _cast(graph, outs[i], dtype), constraint)
        metas[i], values[i] = replace(metas[i], dtype=dtype), values[i].to(dtype)
    end.args = (outs,)
    node.meta["val"] = tuple(values)
    node.target = replace(loop, body=replace(_body(loop.body, graph), out_metas=tuple(metas)))


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _widens(node: torch.fx.Node) -> bool:
    """Tell a cast that loses nothing, so that a sum may be cast before it is made."""
    if node.target is not torch.ops.aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return before.is_floating_point and torch.promote_types(before, after) == after


def _cast(graph: torch.fx.Graph, value: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    node = graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})
    node.meta = {**value.meta, "val": value.meta["val"].to(dtype)}
    return node


def erase_dead(graph: torch.fx.Graph) -> None:
    """Erase nodes nobody reads; every op in a functional graph is pure."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def prune_loops(graph: torch.fx.Graph) -> None:
    """Drop the carries, xs, consts and ys of scans that nothing needs, all depths."""
    erase_dead(graph)
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, Loop):
            _prune(graph, node)
        elif not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _prune(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    items: dict[Any, torch.fx.Node] = {item.args[1]: item for item in node.users}
    if not items:
        graph.erase_node(node)
        return
    loop: Loop = node.target  # type: ignore[assignment]
    body = _copied(loop.body)
    places, outs = placeholders(body), outputs_of(body)
    kept_outs = _needed_outputs(loop, places, outs, set(items))
    end = next(n for n in reversed(body.nodes) if n.op == "output")
    end.args = ([outs[i] for i in kept_outs],)
    prune_loops(body)
    carries = [i for i in kept_outs if i < loop.num_carry]
    kept_ins = [i for i, p in enumerate(places) if p.users or i in carries]
    for i, place in enumerate(places):
        if i not in kept_ins:
            body.erase_node(place)
    num_xs = sum(loop.num_carry <= i < loop.num_carry + loop.num_xs for i in kept_ins)
    metas = loop.body
    pruned = Body(
        GraphModule(metas.module, body),
        tuple(metas.in_metas[i] for i in kept_ins),
        tuple(metas.out_metas[i] for i in kept_outs),
    )
    node.target = replace(
        loop, body=pruned, num_carry=len(carries), num_xs=num_xs, num_residuals=0, backward=None
    )
    node.args = tuple(node.args[i] for i in kept_ins)
    node.meta["val"] = tuple(node.meta["val"][i] for i in kept_outs)
    for new, old in enumerate(kept_outs):
        if old in items:
            items[old].args = (node, new)


def _needed_outputs(
    loop: Loop,
    places: Sequence[torch.fx.Node],
    outs: Sequence[torch.fx.Node],
    used: set[int],
) -> list[int]:
    """Outputs that are read, and the carries that those depend on in any iteration."""
    index = {place: i for i, place in enumerate(places)}
    needed, todo = set(used), list(used)
    seen: set[torch.fx.Node] = set()
    while todo:
        stack = [outs[todo.pop()]]
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            stack.extend(value.all_input_nodes)
            i = index.get(value)
            if i is not None and i < loop.num_carry and i not in needed:
                needed.add(i)
                todo.append(i)
    return sorted(needed)
