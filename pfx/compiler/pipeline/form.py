"""Recognize pipelines: a scan over microbatches whose body scans layers that several devices hold.

The body must fall apart into stages: what is not a layer runs on the first or the last stage, layers
hand their carry to the next one, and what a microbatch makes is added up or stacked. Such a loop
becomes one `Pipeline` node, with an output for every addend and every stage that makes one: the
embedding's gradient from the lookup is one, that from a tied head another. A loop over split layers
that is none stays a loop; the report says why, since its layers are then gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from pfx.compiler.loops import outputs_of, placeholders, sink_constraints
from pfx.compiler.pipeline.primitive import EACH, FIRST, LAST, Output, Pipeline
from pfx.compiler.pipeline.stacked import scanned, stacks_of
from pfx.compiler.rule import operand_nodes
from pfx.lax.body import Body
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop
from pfx.meta import TensorMeta
from pfx.spec import Layout, P

Node = torch.fx.Node
aten = torch.ops.aten


class _NoPipelineError(Exception):
    """Why a loop over split layers is not a pipeline."""


def form_pipelines(
    graph: torch.fx.Graph, layouts: Sequence[Layout], note: Callable[[str], None]
) -> None:
    """Turn every loop of a graph that is a pipeline into one, in place.

    Args:
        layouts: where the graph's inputs are; an input whose dim 0 one axis splits may be a stack.
        note: takes a line on what could not be a pipeline.
    """
    inputs = dict(zip(placeholders(graph), layouts, strict=True))
    split = {n: k.dims[0][0] for n, k in inputs.items() if k.dims and len(k.dims[0]) == 1}
    if not split:
        return
    used = _axes_behind(graph, inputs)
    stacks = stacks_of(graph, split)
    for node in list(graph.nodes):
        if isinstance(node.target, Loop):
            try:
                if found := _find(node, stacks, used):
                    _replace(graph, node, found)
            except _NoPipelineError as why:
                source = node.meta.get("source", "")
                note(f"the layers of the scan at {source} are split, but it is no pipeline: {why}")


def _axes_behind(graph: torch.fx.Graph, inputs: Mapping[Node, Layout]) -> dict[Node, set[str]]:
    """For each value the axes that split the inputs it is made from."""
    found: dict[Node, set[str]] = {node: set(layout.axes) for node, layout in inputs.items()}
    for node in graph.nodes:
        found.setdefault(node, set().union(*(found[n] for n in node.all_input_nodes)))
    return found


@dataclass(frozen=True)
class _Found:
    """A loop over microbatches, and the loops over layers in its body."""

    loop: Loop
    axis: str
    graph: torch.fx.Graph
    stacks: Mapping[Node, bool]
    forward: Node
    backward: Node | None

    def layer_loops(self) -> tuple[Node, ...]:
        return (self.forward, self.backward) if self.backward else (self.forward,)


def _find(node: Node, stacks: Mapping[Node, str], used: Mapping[Node, set[str]]) -> _Found | None:
    """The layer loops in the body of a loop over microbatches, if it is one."""
    loop: Loop = node.target  # type: ignore[assignment]
    graph, xs_end = loop.body.module.graph, loop.num_carry + loop.num_xs
    operands = dict(zip(placeholders(graph), node.args, strict=True))
    known = {
        place: stacks[operand]  # type: ignore[index]
        for place, operand in list(operands.items())[xs_end:]
        if operand in stacks
    }
    inner = stacks_of(graph, known)
    loops = [n for n in graph.nodes if isinstance(n.target, Loop) and scanned(n, inner)]
    if not loops:
        return None
    axis = scanned(loops[0], inner)
    for operand in node.args[:xs_end]:
        if axis in used[operand]:  # type: ignore[index]
            return None  # the axis splits the batch, so each of its devices needs every layer
    if any(scanned(n, inner) != axis for n in loops):
        raise _NoPipelineError("its layers are split over several axes")
    if len(loops) > 2 or (len(loops) == 2 and loops[0].target.reverse == loops[1].target.reverse):
        raise _NoPipelineError(f"it scans layers {len(loops)} times, not forward and backward once")
    if len({n.target.length for n in loops}) > 1:
        raise _NoPipelineError("it scans different numbers of layers forward and backward")
    mine = {n: True for n, found in inner.items() if found == axis}
    return _Found(loop, str(axis), graph, mine, loops[0], loops[1] if len(loops) == 2 else None)


class _Homes:
    """On which stage each value of a body can be made: what it depends on tells."""

    def __init__(self, found: _Found) -> None:
        self.found = found
        self.needs: dict[Node, frozenset[str]] = {}
        for node in found.graph.nodes:
            self.needs[node] = self._needs(node)

    def _needs(self, node: Node) -> frozenset[str]:
        found = self.found
        if node.target is operator.getitem and node.args[0] in found.layer_loops():
            if node in found.stacks:
                return frozenset()
            return frozenset((FIRST if node.args[0] is found.backward else LAST,))
        if node in found.layer_loops() or node in found.stacks:
            return frozenset()
        needs = frozenset().union(*(self.needs[n] for n in node.all_input_nodes))
        if any(n in found.stacks for n in node.all_input_nodes):
            return needs | {EACH}
        return needs

    def of(self, node: Node) -> str | None:
        """The one stage that can make a value, or None."""
        if node in self.found.stacks:
            return EACH
        needs = self.needs[node]
        if len(needs) > 1 or EACH in needs:
            return None
        return next(iter(needs), LAST)

    def check(self) -> None:
        """Raise unless layers get nothing but their carry, and what every stage can make."""
        for node in self.found.graph.nodes:
            if node not in self.found.stacks and node not in self.found.layer_loops():
                continue
            if node.target is operator.getitem:
                continue
            carries = node.target.num_carry if isinstance(node.target, Loop) else 0
            for i, operand in enumerate(operand_nodes(node)):
                allowed = {LAST} if node is self.found.backward and i < carries else set()
                if operand not in self.found.stacks and self.needs[operand] - allowed:
                    raise _NoPipelineError(
                        f"layers read {operand.name}, which another stage makes in the same pass"
                    )


def _terms(node: Node, homes: _Homes) -> Iterator[Node]:
    """The addends of a sum, each made on one stage."""
    if homes.of(node) is not None:
        yield node
        return
    shapes = [getattr(a, "meta", {}).get("val") for a in node.args]
    same = all(v is not None and v.shape == node.meta["val"].shape for v in shapes)
    if node.target is not aten.add.Tensor or node.kwargs or not same:
        raise _NoPipelineError(f"{node.name} mixes what several stages make")
    for operand in node.args:
        yield from _terms(operand, homes)  # type: ignore[arg-type]


def _added(out: Node, carry: Node) -> Node:
    """What one iteration adds to a carry that it only adds to."""
    parts = list(out.args) if out.target is aten.add.Tensor and not out.kwargs else []
    if carry not in parts or len(carry.users) != 1 or len(out.users) != 1:
        raise _NoPipelineError(
            "a microbatch reads what the one before made, so they cannot overlap"
        )
    parts.remove(carry)
    (added,) = parts
    if not isinstance(added, Node) or added.meta["val"].shape != carry.meta["val"].shape:
        raise _NoPipelineError("a microbatch changes the shape of what it adds to")
    return added


@dataclass(frozen=True)
class _Result:
    """One output of the loop: the addends that replace a carry, or the one node of a stack."""

    index: int
    nodes: tuple[Node, ...]


def _results(found: _Found, homes: _Homes) -> Iterator[_Result]:
    places, outs = placeholders(found.graph), outputs_of(found.graph)
    c = found.loop.num_carry
    for i, out in enumerate(outs):
        if i < c:
            yield _Result(i, tuple(_terms(_added(out, places[i]), homes)))
        elif homes.of(out) in (None, EACH):
            raise _NoPipelineError(f"{out.name}, stacked for each microbatch, spans several stages")
        else:
            yield _Result(i, (out,))


def _replace(graph: torch.fx.Graph, node: Node, found: _Found) -> None:
    """Put a `Pipeline` and the sums of its outputs in the place of a loop."""
    homes = _Homes(found)
    homes.check()
    loop, c = found.loop, found.loop.num_carry
    results = list(_results(found, homes))
    dtypes = [meta.dtype for meta in loop.body.out_metas]
    terms = [(r.index, term) for r in results for term in r.nodes]
    outputs = tuple(
        Output(str(homes.of(term)), i < c, bool(term.meta.get("source", "").strip()), dtypes[i])
        for i, term in terms
    )
    operands = node.args[c:]
    stacks = tuple(place in found.stacks for place in placeholders(found.graph)[c + loop.num_xs :])
    made = Pipeline(
        _body(found, [term for _, term in terms]),
        loop.num_xs,
        loop.length,
        found.axis,
        found.forward.target.length,  # type: ignore[union-attr]
        stacks,
        outputs,
    )
    with graph.inserting_before(node):
        call = graph.call_function(made, operands)
        call.meta = {**node.meta, "val": tuple(_value(loop, i, t) for i, t in terms)}
        items = [graph.call_function(operator.getitem, (call, k)) for k in range(len(terms))]
        for item, value, (i, _) in zip(items, call.meta["val"], terms, strict=True):
            item.meta = {**node.meta, "val": value, **_role(node, i)}
        totals = {r.index: _total(graph, node, r, c, items, terms) for r in results}
    for item in list(node.users):
        item.replace_all_uses_with(totals[item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    graph.erase_node(node)


def _role(node: Node, index: int) -> dict[str, str]:
    roles = [u.meta.get("role") for u in node.users if u.args[1] == index]
    return {"role": roles[0]} if roles and roles[0] else {}


def _value(loop: Loop, index: int, term: Node) -> torch.Tensor:
    """The (fake) result of an output."""
    value = term.meta["val"]
    if index < loop.num_carry:
        return value.to(loop.body.out_metas[index].dtype)
    return value.new_empty((loop.length, *value.shape))


def _total(
    graph: torch.fx.Graph,
    node: Node,
    result: _Result,
    num_carry: int,
    items: Sequence[Node],
    terms: Sequence[tuple[int, Node]],
) -> Node:
    """What stands for an output of the loop: the sum of its addends and of the carry it began from."""
    mine = [item for item, (i, _) in zip(items, terms, strict=True) if i == result.index]
    total = mine[0]
    start = (
        [] if result.index >= num_carry or _is_zeros(node.args[result.index]) else [result.index]
    )
    for more in [*mine[1:], *(node.args[i] for i in start)]:
        item = graph.call_function(aten.add.Tensor, (total, more))
        item.meta = dict(total.meta)
        total = item
    return total


def _is_zeros(node: object) -> bool:
    if not isinstance(node, Node):
        return False
    fills = {aten.full.default: 1, aten.full_like.default: 1}
    if node.target in fills:
        return node.args[1] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default)


def _body(found: _Found, terms: Sequence[Node]) -> Body:
    """The body with the addends as its outputs, and without the carry."""
    graph, loop = torch.fx.Graph(), found.loop
    copies: dict[Node, Node] = {}
    graph.graph_copy(found.graph, copies)
    graph.output([copies[term] for term in terms])
    graph.eliminate_dead_code()
    for place in placeholders(graph)[: loop.num_carry]:
        graph.erase_node(place)
    for node in found.layer_loops():
        copies[node].meta["axis"] = found.axis
    for node in graph.nodes:
        if isinstance(node.target, Constraint):
            node.target = _without(node.target, found.axis)
    sink_constraints(graph)
    metas = tuple(TensorMeta.of(term.meta["val"]) for term in terms)
    module = torch.fx.GraphModule(loop.body.module, graph)
    return Body(module, loop.body.in_metas[loop.num_carry :], metas)


def _without(constraint: Constraint, axis: str) -> Constraint:
    """The constraint of a stage's own rows, as far as a `P` goes; names are the plan's to read."""
    cut = lambda spec: spec if isinstance(spec, str) else _spec_without(spec, axis)
    return replace(constraint, spec=cut(constraint.spec), grad_spec=cut(constraint.grad_spec))


def _spec_without(spec: P, axis: str) -> P:
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    kept = [tuple(a for a in axes if a != axis) for axes in entries]
    return spec.with_dims(*(None if not k else k[0] if len(k) == 1 else k for k in kept))
