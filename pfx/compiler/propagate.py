"""Give every value a layout and every node an assignment of axes to factors.

Three sweeps, each linear. Forward: what do the inputs' layouts imply? Backward: where would the
consumers of each value like it to be? Forward again, with those wishes: the decisions. A wish is what
turns an all-reduce followed by a slice into a reduce-scatter (`pfx.compiler.wishes`).

How a node chooses is in `pfx.compiler.choose`. A partial sum flows through a linear op when that op
is its only reader and does not make it larger; otherwise it is reduced, once, where it was made, in
the form its readers wish.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.compiler.carries import settle_loop
from pfx.compiler.choose import Choice, Chooser, Flow
from pfx.compiler.loops import outputs_of, placeholders
from pfx.compiler.manual import boundary_layouts, busy_axes, without
from pfx.compiler.names import spec_of_names
from pfx.compiler.pipeline.layouts import outer_wishes, settle_pipeline
from pfx.compiler.pipeline.primitive import Pipeline
from pfx.compiler.rule import Rule, operand_nodes
from pfx.compiler.rules import find_rule
from pfx.compiler.wishes import Wish, agreed, open_factors, opinion, reduced
from pfx.lax.constrain import Constraint
from pfx.lax.manual.boundary import Boundary
from pfx.lax.manual.collective import Collective
from pfx.lax.scan import Loop
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout, P, effective, layout_of, replicated

Node = torch.fx.Node


@dataclass
class Context:
    """What a compilation knows besides the graph: the mesh, logical names, users' rules, reports."""

    mesh: Mesh
    names: Mapping[str, Any] | None = None
    rules: Mapping[Any, str] = field(default_factory=dict)
    report: dict[str, None] = field(default_factory=dict)
    solved: dict[Any, Solution] = field(default_factory=dict)
    found: dict[Node, tuple[Rule, bool]] = field(default_factory=dict)
    manual: bool = False  # there are manual regions, whose axes are not the compiler's to use

    def note(self, line: str) -> None:
        """Add a line to the report, once."""
        self.report.setdefault(line)

    def rule(self, node: Node) -> Rule:
        """The rule of a node; the safe default is reported."""
        if node not in self.found:
            self.found[node] = find_rule(node, dict(self.rules))
            if not self.found[node][1]:
                self.note(f"{node.target}: no sharding rule, computed whole on every device")
        return self.found[node][0]


@dataclass(frozen=True)
class Decision(Choice):
    """How one node runs; of a loop, also how its body does."""

    body: Solution | None = None


@dataclass
class Solution:
    """The decisions for a graph, the layout of every value, and the wishes for its inputs."""

    graph: torch.fx.Graph
    inputs: tuple[Layout, ...]
    layouts: dict[Node, Layout]
    decisions: dict[Node, Choice]
    outputs: tuple[Layout, ...]
    input_wishes: tuple[Wish, ...]


def propagate(
    graph: torch.fx.Graph,
    inputs: Sequence[Layout],
    wishes: Sequence[Wish],
    exact: Sequence[Layout | None],
    context: Context,
    num_carry: int = 0,
    *,
    sums: Collection[int] = (),
    taken: Axes = (),
) -> Solution:
    """Decide a graph's layouts from those of its inputs.

    `wishes` say where the readers of the outputs would like them; an output with an entry in `exact`
    ends up exactly so. In the body of a loop the first `num_carry` inputs and outputs are the carry.
    Outputs numbered in `sums` are added up. Nothing is split over the axes `taken`.
    """
    key = (id(graph), tuple(inputs), tuple(wishes), tuple(exact), taken)
    if key not in context.solved:
        sweeps = _Sweeps(graph, inputs, wishes, exact, context, num_carry, sums, taken)
        context.solved[key] = sweeps.run()
    return context.solved[key]


class _Sweeps:
    """The state of one propagation over one graph."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        inputs: Sequence[Layout],
        wishes: Sequence[Wish],
        exact: Sequence[Layout | None],
        context: Context,
        num_carry: int,
        sums: Collection[int],
        taken: Axes,
    ) -> None:
        self.num_carry, self.sums, self.taken = num_carry, sums, taken
        self.graph, self.context, self.mesh = graph, context, context.mesh
        self.inputs = dict(zip(placeholders(graph), inputs, strict=True))
        self.outs, self.exact_outs = outputs_of(graph), exact
        self.out_wishes = [
            wish if layout is None else layout.dims
            for wish, layout in zip(wishes, exact, strict=True)
        ]
        self.readers = _count_readers(graph, self.outs)
        self.wishes: dict[Node, Wish] = {}
        self.layouts: dict[Node, Layout] = {}
        self.decisions: dict[Node, Choice] = {}
        self.choosers: dict[Node, Chooser] = {}

    def run(self) -> Solution:
        for _ in range(2):
            self.forward()
            self.backward()
        self.forward()
        outputs = tuple(
            self.layouts[node] if layout is None else layout
            for node, layout in zip(self.outs, self.exact_outs, strict=True)
        )
        wishes = tuple(self.wishes.get(node) for node in self.inputs)
        inputs = tuple(self.inputs.values())
        return Solution(self.graph, inputs, self.layouts, self.decisions, outputs, wishes)

    def forward(self) -> None:
        """One sweep in order, deciding every node from its operands and its wish."""
        self.decisions = {}
        self.layouts = dict(self.inputs)
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.layouts[node] = replicated(node.meta["val"].ndim)
            elif node.op == "call_function":
                self.visit(node)

    def visit(self, node: Node) -> None:
        if node.target is operator.getitem:
            decision = self.decisions[node.args[0]]  # type: ignore[index]
            self.layouts[node] = self.made(node, decision.results[node.args[1]])  # type: ignore[index]
            return
        if isinstance(node.target, Constraint):
            target = self.exact(node)
            self.decisions[node] = Choice({}, (target,), (target,))
            self.layouts[node] = target
            return
        if isinstance(node.target, Boundary):
            operand, result = boundary_layouts(node.target, self.layouts[node.args[0]])  # type: ignore[index]
            self.decisions[node] = Choice({}, (operand,), (result,))
            self.layouts[node] = self.made(node, result)
            return
        if isinstance(node.target, Loop):
            self.decisions[node] = self.decide_loop(node)
            return
        if isinstance(node.target, Pipeline):
            self.decisions[node] = self.decide_pipeline(node)
            return
        self.decisions[node] = self.decide(node)
        if isinstance(node.meta["val"], torch.Tensor):
            self.layouts[node] = self.made(node, self.decisions[node].results[0])

    def made(self, node: Node, natural: Layout) -> Layout:
        """The layout in which a value is kept: a partial sum with several readers is reduced."""
        if not natural.partial or (self.readers[node] <= 1 and natural.reduce == "sum"):
            return natural
        return reduced(natural, self.wishes.get(node))

    def exact(self, node: Node) -> Layout:
        """The layout a constraint asks for."""
        spec = node.target.spec  # type: ignore[union-attr]
        shape = node.meta["val"].shape
        where = f"constrain at {node.meta.get('source') or 'an unknown line'}: the value"
        if isinstance(spec, str):
            if self.context.names is None:
                self.context.note(
                    f"constrain(x, {spec!r}): jit has no names=, so it constrains nothing"
                )
                return self.layouts[node.args[0]].whole()  # type: ignore[index]
            spec = self.named(spec, shape)
        layout = effective(layout_of(spec, shape, self.mesh, where), self.mesh)
        busy = self.busy(node)
        if busy and self.mesh.deals:  # a region's values have names only as parts in equal blocks
            busy += tuple(
                a
                for n, d in zip(shape, layout.dims, strict=True)
                if self.mesh.dealt(d, n)
                for a in d
            )
        return without(layout, busy)

    def named(self, text: str, shape: Sequence[int]) -> P:
        """Translate logical names to a spec; what does not divide or is taken stays whole."""
        return spec_of_names(text, shape, self.context.names or {}, self.mesh, self.context.note)

    def decide(self, node: Node) -> Choice:
        """Choose how an ordinary node runs."""
        rule = self.context.rule(node)
        have = [self.layouts[n] for n in operand_nodes(node)]
        wishes = self.result_wishes(node)
        if rule.free:
            free = tuple(Layout(((),) * len(d), free=True, zero=rule.zero) for d in rule.results)
            return Choice({}, (), free)
        flow = self.flowing(node, rule, have)
        return self.chooser(node).best(have, wishes, flow, busy=self.busy(node))

    def busy(self, node: Node) -> Axes:
        """The axes that a pipeline, or a manual region at this node, has taken."""
        return (*self.taken, *busy_axes(node, self.mesh)) if self.context.manual else self.taken

    def chooser(self, node: Node) -> Chooser:
        """The chooser of a node, made once."""
        if node not in self.choosers:
            self.choosers[node] = Chooser(node, self.context.rule(node), self.mesh)
        return self.choosers[node]

    def result_wishes(self, node: Node) -> list[Wish]:
        """The wishes for each result of a node."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return [self.wishes.get(node)]
        found: list[Wish] = [None] * len(value)
        for item in node.users:
            found[item.args[1]] = self.wishes.get(item)  # type: ignore[index]
        return found

    def flowing(self, node: Node, rule: Rule, have: Sequence[Layout]) -> Flow:
        """The axes whose partial sums flow through a node, and the operands that carry them."""
        partial = [i for i, layout in enumerate(have) if layout.partial]
        if not partial:
            return Flow()
        axes = have[partial[0]].partial
        nodes = operand_nodes(node)
        for group in rule.linear:
            fits = set(partial) <= set(group) and all(
                have[i].zero or set(have[i].partial) == set(axes) for i in group
            )
            if fits and self.may_grow(node, nodes[partial[0]], axes):
                return Flow(axes, group)
        return Flow()

    def may_grow(self, node: Node, operand: Node, owed: Axes) -> bool:
        """Tell whether a partial sum is better reduced after a node than before it.

        It is when the node does not enlarge it; when it is scattered afterwards, at half the cost of
        an all-reduce; and when it ends in an accumulator of the loop, to be reduced once at the end.
        """
        wish = self.wishes.get(node)
        scattered = any(set(owed) & set(axes or ()) for axes in wish or ())
        before = operand.meta["val"].numel() * (2 if scattered else 1)
        return node.meta["val"].numel() <= before or self.accumulates(node)

    def accumulates(self, node: Node) -> bool:
        """Tell whether a value goes through linear ops only into a carry that began as zeros."""
        while node not in self.outs:
            if self.readers[node] != 1:
                return False
            (reader,) = node.users
            if not isinstance(reader.target, Boundary) and not self.linear(reader, node):
                return False
            node = reader
        i = self.outs.index(node)
        if i in self.sums:
            return self.readers[node] == 1
        carry = list(self.inputs.values())[i] if i < self.num_carry else None
        return self.readers[node] == 1 and carry is not None and (carry.zero or bool(carry.partial))

    def linear(self, reader: Node, operand: Node) -> bool:
        """Tell whether a partial sum may flow through one operand of a node."""
        if not isinstance(reader.target, (OpOverload, Collective)):
            return False
        place = operand_nodes(reader).index(operand)
        return any(place in group for group in self.context.rule(reader).linear)

    def decide_loop(self, node: Node) -> Decision:
        """Decide a loop with its body."""
        loop: Loop = node.target  # type: ignore[assignment]
        have = [self.layouts[n] for n in node.args]  # type: ignore[index]
        solve = lambda graph, inputs, wishes, exact: propagate(
            graph, inputs, wishes, exact, self.context, loop.num_carry, taken=self.taken
        )
        operands, results, body = settle_loop(loop, have, self.result_wishes(node), solve)
        return Decision({}, operands, results, body)

    def decide_pipeline(self, node: Node) -> Decision:
        """Decide a pipeline with its body, in which its axis is taken."""
        made: Pipeline = node.target  # type: ignore[assignment]
        have = [self.layouts[n] for n in node.args]  # type: ignore[index]
        graph, taken = made.body.module.graph, (*self.taken, made.axis)
        sums = [i for i, output in enumerate(made.outputs) if output.summed]
        solve = lambda inputs, wishes: propagate(
            graph, inputs, wishes, [None] * len(wishes), self.context, sums=sums, taken=taken
        )
        wishes = self.result_wishes(node)
        operands, results, body = settle_pipeline(made, have, wishes, self.mesh, solve)
        return Decision({}, operands, results, body)

    def backward(self) -> None:
        """One sweep in reverse: the wish for a value is what all its readers agree on."""
        asked: dict[Node, list[Wish]] = {}
        self.wishes = {}
        for node, wish in zip(self.outs, self.out_wishes, strict=True):
            asked.setdefault(node, []).append(wish)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "output":
                continue
            if node in asked:
                self.wishes[node] = agreed(asked[node])
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            for operand, wish in self.wanted(node):
                asked.setdefault(operand, []).append(wish)

    def wanted(self, node: Node) -> list[tuple[Node, Wish]]:
        """Where a node would like its operands, given its own wish."""
        decision = self.decisions[node]
        if isinstance(node.target, Constraint):
            return [(node.args[0], decision.operands[0].dims)]  # type: ignore[list-item]
        if isinstance(node.target, Boundary):
            return [(node.args[0], _across(node.target, decision, self.wishes.get(node)))]  # type: ignore[list-item]
        if isinstance(node.target, Loop):
            assert isinstance(decision, Decision) and decision.body is not None
            c, x = node.target.num_carry, node.target.num_xs
            wishes: list[Wish] = [layout.dims for layout in decision.operands[:c]]
            inner = decision.body.input_wishes
            wishes += [None if w is None else (None, *w) for w in inner[c : c + x]]
            wishes += inner[c + x :]
            return list(zip(node.args, wishes, strict=True))  # type: ignore[arg-type]
        if isinstance(node.target, Pipeline):
            assert isinstance(decision, Decision) and decision.body is not None
            wishes = outer_wishes(node.target, decision.body.input_wishes)
            return list(zip(node.args, wishes, strict=True))  # type: ignore[arg-type]
        rule = self.context.rule(node)
        if rule.free:
            return []
        # As in `decide`, but a tie goes to the wish: it knows what comes after. Partial sums that flow
        # through take no axis, since the wish may be to scatter them.
        wishes = self.result_wishes(node)
        have = [self.layouts[n] for n in operand_nodes(node)]
        best = self.chooser(node).best(have, wishes, wish_first=True, busy=self.busy(node))
        assignment = best.assignment
        may_split = open_factors(rule, wishes)
        return [
            (n, opinion(rule, dims, assignment, may_split, now))
            for n, dims, now in zip(operand_nodes(node), rule.operands, have, strict=True)
        ]


def _across(boundary: Boundary, decision: Choice, wish: Wish) -> Wish:
    """The wish for what crosses a boundary: for its blocks on the way in, for the rest on the way out."""
    if boundary.inward or wish is None:
        return decision.operands[0].dims
    taken = {a for axes in boundary.dims for a in axes}
    return tuple(axes and tuple(a for a in axes if a not in taken) for axes in wish)


def _count_readers(graph: torch.fx.Graph, outs: Sequence[Node]) -> dict[Node, int]:
    counts = dict.fromkeys(graph.nodes, 0)
    for node in graph.nodes:
        if node.op == "call_function":
            for operand in operand_nodes(node):
                counts[operand] += 1
    for node in outs:
        counts[node] += 1
    return counts
