"""Recognize pipelines: a scan over microbatches whose body scans layers that several devices hold.

The body must fall apart into stages: what is not a layer runs on the first or the last stage, layers
hand their carry to the next one, and what a microbatch makes is added up or stacked. Such a loop
becomes one `Pipeline` node, with an output for every addend and every stage that makes one: the
embedding's gradient from the lookup is one, that from a tied head another. A loop that is not a
pipeline stays a loop: its layers are gathered, and the report says why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from pfx._torch import GraphModule
from pfx.compiler.loops import erase_dead, outputs_of, placeholders, sink_constraints
from pfx.compiler.origins import source_of
from pfx.compiler.pipeline.homes import Homes, NoPipelineError
from pfx.compiler.pipeline.primitive import FIRST, LAST, Output, Pipeline
from pfx.compiler.pipeline.stacked import (
    RuleOf,
    Stacks,
    behind_rows,
    scanned,
    scanned_over,
    sources_of,
    stacks_of,
)
from pfx.lax.body import Body
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop
from pfx.meta import TensorMeta
from pfx.spec import Layout, P

Node = torch.fx.Node
aten = torch.ops.aten


def form_pipelines(
    graph: torch.fx.Graph, layouts: Sequence[Layout], rule_of: RuleOf, note: Callable[[str], None]
) -> None:
    """Turn every loop of a graph that is a pipeline into one, in place.

    Args:
        layouts: where the graph's inputs are; an input whose dim 0 one axis splits may be a stack.
        rule_of: gives the sharding rule of a node.
        note: takes a line on what could not be a pipeline.
    """
    inputs = dict(zip(placeholders(graph), layouts, strict=True))
    split = {n: k.dims[0][0] for n, k in inputs.items() if k.dims and len(k.dims[0]) == 1}
    loops = [node for node in graph.nodes if isinstance(node.target, Loop)]
    if not split or not loops:
        return
    used = _axes_behind(graph, inputs)
    stacks = stacks_of(graph, split, rule_of)
    for node in loops:
        try:
            if found := _find(node, stacks, used, rule_of, note):
                _replace(graph, node, *found)
        except NoPipelineError as why:
            note(f"the scan at {source_of(node)} is over split layers, but is no pipeline: {why}")


def _axes_behind(graph: torch.fx.Graph, inputs: Mapping[Node, Layout]) -> dict[Node, set[str]]:
    """For each value the axes that split the inputs it is made from."""
    found: dict[Node, set[str]] = {node: set(layout.axes) for node, layout in inputs.items()}
    for node in graph.nodes:
        found.setdefault(node, set().union(*(found[n] for n in node.all_input_nodes)))
    return found


def _find(
    node: Node,
    stacks: Stacks,
    used: Mapping[Node, set[str]],
    rule_of: RuleOf,
    note: Callable[[str], None],
) -> tuple[str, Homes] | None:
    """The axis and the layer loops of a loop over microbatches, if it has any, in a graph of its own."""
    loop: Loop = node.target  # type: ignore[assignment]
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(loop.body.module.graph, {}))
    consts = loop.num_carry + loop.num_xs
    operands = list(zip(placeholders(graph), node.args, strict=True))
    known = {place: stacks[given] for place, given in operands[consts:] if given in stacks}  # type: ignore[index]
    maybe = stacks_of(graph, known, rule_of)
    loops = [n for n in graph.nodes if isinstance(n.target, Loop) and scanned(n, maybe)]
    if not loops:
        if any(behind_rows(n) & known.keys() for n in graph.nodes if isinstance(n.target, Loop)):
            raise NoPipelineError("no scan in it runs over their rows as they are")
        return None
    axis = str(scanned(loops[0], maybe))
    for operand in node.args[loop.num_carry : consts]:
        if axis in used[operand]:  # type: ignore[index]
            raise NoPipelineError(f"{axis!r} splits the batch, so its devices need every layer")
    if any(scanned(n, maybe) != axis for n in loops):
        raise NoPipelineError("its layers are split over several axes")
    forward, backward = loops[0].target, loops[-1].target
    if len(loops) > 2 or (len(loops) == 2 and not backward.reverse):
        raise NoPipelineError(f"it scans layers {len(loops)} times, not forward and backward once")
    if forward.reverse:
        raise NoPipelineError("it scans layers from the last to the first")
    if forward.length != backward.length:
        raise NoPipelineError("it scans different numbers of layers forward and backward")
    # Inputs that are split alike but not scanned are ordinary operands.
    mine = sources_of([x for n in loops for x in scanned_over(n)], maybe)
    others = [n for n, split in known.items() if split == axis and n not in mine and n.users]
    if others:
        shapes = ", ".join(str(tuple(n.meta["val"].shape)) for n in others)
        note(
            f"the pipeline at {node.meta.get('source', '')}: {axis!r} splits rows that no scan runs "
            f"over, of {shapes}: they are gathered"
        )
    stacked = stacks_of(graph, {n: axis for n in known if n in mine}, rule_of)
    return axis, Homes(graph, loops[0], loops[1] if len(loops) == 2 else None, stacked, rule_of)


def _addends(out: Node, carry: Node, graph: torch.fx.Graph) -> list[Node]:
    """What one iteration adds to a carry that it only adds to."""
    found: list[Node] = []
    while out is not carry:
        sub = out.target is aten.sub.Tensor
        if (out.target is not aten.add.Tensor and not sub) or len(out.users) != 1:
            raise NoPipelineError(_DEPENDS)
        a, b = out.args
        scale = (-1 if sub else 1) * out.kwargs.get("alpha", 1)  # type: ignore[operator]
        if not sub and scale == 1 and _reads(b, carry):
            a, b = b, a
        if not _reads(a, carry) or _reads(b, carry):
            raise NoPipelineError(_DEPENDS)
        found.append(_addend(b, scale, out, graph))
        out = a  # type: ignore[assignment]
    if len(carry.users) != 1:
        raise NoPipelineError(_DEPENDS)
    return found


_DEPENDS = "a microbatch reads what the one before made, so they cannot overlap"


def _reads(node: object, carry: Node) -> bool:
    """Tell whether a value is a carry, or that with something added."""
    while isinstance(node, Node) and node is not carry:
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return False
        if _reads(node.args[1], carry):
            return True
        node = node.args[0]
    return node is carry


def _addend(value: Any, scale: Any, out: Node, graph: torch.fx.Graph) -> Node:
    """A node for what is added: a number becomes a tensor, and a scale a product."""
    like = out.meta["val"]
    if isinstance(value, Node) and value.meta["val"].shape != like.shape:
        raise NoPipelineError("a microbatch changes the shape of what it adds to")
    if isinstance(value, Node) and scale == 1:
        return value
    with graph.inserting_before(out):
        if isinstance(value, Node):
            made = graph.call_function(aten.mul.Tensor, (value, scale))
        else:
            made = graph.call_function(aten.full.default, (list(like.shape), value * scale))
            made.kwargs = {"dtype": like.dtype, "device": like.device}
    made.meta = {**out.meta, "val": like}
    return made


@dataclass(frozen=True)
class _Term:
    """One output of a pipeline: the output of the loop it belongs to, and the node that makes it."""

    index: int
    node: Node


def _terms(loop: Loop, homes: Homes) -> list[_Term]:
    places, outs = placeholders(homes.graph), outputs_of(homes.graph)
    found: list[_Term] = []
    for i, out in enumerate(outs):
        if i < loop.num_carry:
            for addend in _addends(out, places[i], homes.graph):
                if addend not in homes.needs:
                    homes.insert(addend)
                found += [_Term(i, term) for term in homes.terms(addend)]
        elif homes.of(out) not in (FIRST, LAST):
            raise NoPipelineError(
                f"{out.name} is stacked for each microbatch and made on several stages; "
                "take gradients inside the scan over microbatches, and add them up there"
            )
        else:
            found.append(_Term(i, out))
    return found


def _replace(graph: torch.fx.Graph, node: Node, axis: str, homes: Homes) -> None:
    """Put a `Pipeline` and the sums of its outputs in the place of a loop."""
    loop: Loop = node.target  # type: ignore[assignment]
    c, terms = loop.num_carry, _terms(loop, homes)
    outputs = tuple(
        Output(
            str(homes.of(term.node)),
            term.index < c,
            # The gradients at the end of the forward pass are made in the backward one: no line made them.
            bool(term.node.meta.get("source", "").strip()) and term.node not in homes.after,
            loop.body.out_metas[term.index].dtype,
        )
        for term in terms
    )
    consts = placeholders(homes.graph)[c + loop.num_xs :]
    made = Pipeline(
        _body(loop, axis, homes, [term.node for term in terms]),
        loop.num_xs,
        loop.length,
        axis,
        homes.forward.target.length,  # type: ignore[union-attr]
        tuple(place in homes.stacks for place in consts),
        outputs,
    )
    meta = {key: value for key, value in node.meta.items() if key != "variance"}
    with graph.inserting_before(node):
        call = graph.call_function(made, node.args[c:])
        call.meta = {**meta, "val": tuple(_value(loop, term) for term in terms)}
        items = [graph.call_function(operator.getitem, (call, k)) for k in range(len(terms))]
        for item, value, term in zip(items, call.meta["val"], terms, strict=True):
            item.meta = {**meta, "val": value, "role": _role(node, term)}
        for i, user in _users(node).items():
            mine = [item for item, term in zip(items, terms, strict=True) if term.index == i]
            user.replace_all_uses_with(_total(graph, node, i, mine))
            graph.erase_node(user)
    graph.erase_node(node)


def _users(node: Node) -> dict[int, Node]:
    return {user.args[1]: user for user in list(node.users)}  # type: ignore[misc]


def _role(node: Node, term: _Term) -> str:
    """What an output is: as it is called outside the loop, or inside."""
    user = _users(node).get(term.index)
    return (user.meta.get("role") if user else "") or term.node.meta.get("role", "")


def _value(loop: Loop, term: _Term) -> torch.Tensor:
    """The (fake) result of an output."""
    value = term.node.meta["val"]
    if term.index < loop.num_carry:
        return value.to(loop.body.out_metas[term.index].dtype)
    return value.new_empty((loop.length, *value.shape))


def _total(graph: torch.fx.Graph, node: Node, index: int, mine: Sequence[Node]) -> Node:
    """What stands for an output of the loop: the sum of its addends and of the carry it began from."""
    loop: Loop = node.target  # type: ignore[assignment]
    parts = list(mine)
    if index < loop.num_carry and not (mine and _is_zeros(node.args[index])):
        parts.append(node.args[index])  # type: ignore[arg-type]
    total = parts[0]
    for more in parts[1:]:
        item = graph.call_function(aten.add.Tensor, (total, more))
        item.meta = dict(total.meta)
        total = item
    return total


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    if node.target in (aten.full.default, aten.full_like.default):
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default)


def _body(loop: Loop, axis: str, homes: Homes, terms: Sequence[Node]) -> Body:
    """The body with the addends as its outputs, and without the carry."""
    graph = homes.graph
    (end,) = graph.find_nodes(op="output")
    end.args = (list(terms),)
    erase_dead(graph)
    for place in placeholders(graph)[: loop.num_carry]:
        graph.erase_node(place)
    for node in homes.loops:
        node.meta["axis"] = axis
    for node in graph.nodes:
        node.meta["stack"] = node in homes.stacks
        if isinstance(node.target, Constraint):
            node.target = _without(node.target, axis)
    metas = tuple(
        replace(TensorMeta.of(n.meta["val"]), variance=n.meta.get("variance")) for n in terms
    )
    sink_constraints(graph)
    module = GraphModule(loop.body.module, graph)
    return Body(module, loop.body.in_metas[loop.num_carry :], metas)


def _without(constraint: Constraint, axis: str) -> Constraint:
    """The constraint of a stage's own rows, as far as a `P` goes; names are the plan's to read."""
    cut = lambda spec: spec if isinstance(spec, str) else _spec_without(spec, axis)
    return replace(constraint, spec=cut(constraint.spec), grad_spec=cut(constraint.grad_spec))


def _spec_without(spec: P, axis: str) -> P:
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    kept = [tuple(a for a in axes if a != axis) for axes in entries]
    return spec.with_dims(*(None if not k else k[0] if len(k) == 1 else k for k in kept))
