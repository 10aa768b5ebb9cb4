"""Turn decisions into a program: local calls, with a move wherever a value is not where it is needed.

Each (value, layout) pair is moved once and remembered, so a partial sum is reduced once and a
gathered activation serves all its readers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from pfx.compiler.choose import Choice
from pfx.compiler.ir import Compute, Instr, LoopInstr, Reshard, Value, values_in
from pfx.compiler.loops import outputs_of, placeholders
from pfx.compiler.program import Program
from pfx.compiler.propagate import Context, Decision, Solution
from pfx.compiler.reshard import plan_moves
from pfx.compiler.rule import Call, Local, Rule, operand_nodes, result_values
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop
from pfx.spec import Layout

Node = torch.fx.Node


def partition(
    module: torch.fx.GraphModule,
    solution: Solution,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    context: Context,
) -> Program:
    """Emit the program of a graph whose inputs and outputs have the given layouts."""
    return _Emitter(module, solution, context).run(inputs, outputs)


class _Emitter:
    """Walks a graph once, appending instructions."""

    def __init__(self, module: torch.fx.GraphModule, solution: Solution, context: Context) -> None:
        self.module, self.solution, self.context = module, solution, context
        self.mesh = context.mesh
        self.instrs: list[Instr] = []
        self.values: dict[Node, Value] = {}
        self.moved: dict[tuple[int, Layout], Value] = {}
        self.free: dict[Node, Rule] = {}
        self.count = 0

    def run(self, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Program:
        graph = self.module.graph
        places = placeholders(graph)
        for node, layout in zip(places, inputs, strict=True):
            self.values[node] = self.new(node.meta["val"], layout)
        for node in graph.nodes:
            if node.op == "get_attr":
                self.constant(node)
            elif node.op == "call_function":
                self.visit(node)
        outs = [
            self.at(node, layout, node, "the layout of the output")
            for node, layout in zip(outputs_of(graph), outputs, strict=True)
        ]
        values = [self.values[node] for node in places]
        return Program(self.mesh, values, outs, self.instrs)

    def new(self, like: Any, layout: Layout, role: str = "") -> Value:
        """Number a new value."""
        self.count += 1
        return Value(self.count, tuple(like.shape), like.dtype, layout, role)

    def constant(self, node: Node) -> None:
        tensor = getattr(self.module, str(node.target))
        out = self.new(tensor, self.solution.layouts[node])
        self.instrs.append(Compute(_Constant(tensor), (), {}, (), (out,)))
        self.values[node] = out

    def visit(self, node: Node) -> None:
        if node.target is operator.getitem:
            return  # bound when the call itself was emitted
        decision = self.solution.decisions[node]
        if isinstance(node.target, Constraint):
            reason = f"constrain to {decision.results[0].spec}"
            value = self.at(node.args[0], decision.results[0], node, reason)  # type: ignore[arg-type]
            self.values[node] = value
            return
        if isinstance(node.target, Loop):
            self.loop(node, decision)
            return
        rule = self.context.rule(node)
        if rule.free:
            self.free[node] = rule
            return
        self.call(node, rule, decision)

    def call(self, node: Node, rule: Rule, decision: Choice) -> None:
        """Emit one local call."""
        reason = _reason(node)
        ready = [
            self.at(n, layout, node, reason)
            for n, layout in zip(operand_nodes(node), decision.operands, strict=True)
        ]
        local = Local(node, rule, decision.assignment, self.mesh)
        call = rule.localize(local) if rule.localize else Call(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        values: dict[Node, list[Value]] = {}
        for n, value in zip(operand_nodes(node), ready, strict=True):
            values.setdefault(n, []).append(value)
        args = _substitute(call.args, values)
        kwargs = _substitute(dict(call.kwargs), values)
        fakes = result_values(node)
        outs = tuple(
            self.new(fake, layout, role) if isinstance(fake, torch.Tensor) else None
            for fake, layout, role in zip(fakes, decision.results, _roles(node), strict=True)
        )
        ins = tuple(dict.fromkeys([*values_in(args), *values_in(kwargs)]))
        many = isinstance(node.meta["val"], (list, tuple))
        source = node.meta.get("source", "")
        self.instrs.append(Compute(call.target, args, kwargs, ins, outs, call.offset, source, many))
        self.bind(node, outs)

    def bind(self, node: Node, outs: Sequence[Value | None]) -> None:
        """Give a node, or the items of a node with several results, their values."""
        if isinstance(node.meta["val"], torch.Tensor):
            targets = [(node, outs[0])]
        else:
            targets = [(item, outs[item.args[1]]) for item in node.users]  # type: ignore[index]
        for target, value in targets:
            if value is None:
                continue
            self.values[target] = value
            kept = self.solution.layouts[target]
            if kept != value.layout:
                self.values[target] = self.move(
                    value, kept, target, "a partial sum with several readers"
                )

    def loop(self, node: Node, decision: Choice) -> None:
        """Emit a loop: its operands brought to the body's layouts, its body partitioned."""
        loop: Loop = node.target  # type: ignore[assignment]
        assert isinstance(decision, Decision) and decision.body is not None
        c, x = loop.num_carry, loop.num_xs
        ins: list[Value] = []
        body_inputs: list[Layout] = []
        for i, (operand, layout) in enumerate(zip(node.args, decision.operands, strict=True)):
            if layout.free:
                wish = decision.body.input_wishes[i]
                lead = ((),) if c <= i < c + x else ()
                dims = (*lead, *(axes or () for axes in wish)) if wish else ((),) * len(layout.dims)
                layout = Layout(dims)
            ins.append(self.at(operand, layout, node, "an operand of the loop"))  # type: ignore[arg-type]
            body_inputs.append(layout.sliced() if c <= i < c + x else layout)
        outs_layout = decision.results
        body_outs = [*outs_layout[:c], *(layout.sliced() for layout in outs_layout[c:])]
        body = partition(loop.body.module, decision.body, body_inputs, body_outs, self.context)
        outs = tuple(
            self.new(fake, layout, role)
            for fake, layout, role in zip(node.meta["val"], outs_layout, _roles(node), strict=True)
        )
        source = node.meta.get("source", "")
        self.instrs.append(
            LoopInstr(body, c, x, loop.length, loop.reverse, tuple(ins), outs, source)
        )
        self.bind(node, outs)

    # Moves --------------------------------------------------------------------------------------

    def at(self, node: Node, layout: Layout, reader: Node, reason: str) -> Value:
        """The value of a node in a layout, moved there if it is elsewhere."""
        if node in self.free:
            return self.materialize(node, layout)
        return self.move(self.values[node], layout, reader, reason)

    def materialize(self, node: Node, layout: Layout) -> Value:
        """Make a free value (zeros, an arange) directly in a layout."""
        layout = Layout(layout.dims, layout.partial, layout.reduce)
        key = (id(node), layout)
        if key not in self.moved:
            rule = self.free[node]
            (dims,) = rule.results
            assignment = {d[0]: axes for d, axes in zip(dims, layout.dims, strict=True)}
            assert rule.localize is not None
            call = rule.localize(Local(node, rule, assignment, self.mesh))
            out = self.new(node.meta["val"], layout)
            source = node.meta.get("source", "")
            self.instrs.append(
                Compute(call.target, call.args, call.kwargs, (), (out,), call.offset, source)
            )
            self.moved[key] = out
        return self.moved[key]

    def move(self, value: Value, layout: Layout, reader: Node, reason: str) -> Value:
        """Bring a value to a layout by the planned moves, each remembered."""
        now = value
        for step in plan_moves(value.layout, layout):
            key = (now.number, step.layout)
            if key not in self.moved:
                out = replace(self.new(now, step.layout), role=now.role)
                source = _source(reader)
                self.instrs.append(Reshard(step, (now,), (out,), source, reason, (step,)))
                self.moved[key] = out
            now = self.moved[key]
        return now


class _Constant:
    """A call that returns a tensor the traced function held."""

    __name__ = "constant"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor


def _substitute(arg: Any, values: dict[Node, list[Value]]) -> Any:
    """Put values for nodes; one that is an operand twice (x @ x) may be needed in two layouts."""
    if isinstance(arg, Node):
        return values[arg].pop(0) if len(values[arg]) > 1 else values[arg][0]
    if isinstance(arg, (list, tuple)):
        return type(arg)(_substitute(item, values) for item in arg)
    if isinstance(arg, dict):
        return {key: _substitute(item, values) for key, item in arg.items()}
    return arg


def _roles(node: Node) -> list[str]:
    """The labelled role of each result of a node."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node.meta.get("role", "")]
    roles = [""] * len(value)
    for item in node.users:
        roles[item.args[1]] = item.meta.get("role", "")  # type: ignore[index]
    return roles


def _reason(node: Node) -> str:
    name = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    return f"an operand of {name}"


def _source(node: Node) -> str:
    """The source line of a node; of a backward node, that of the nearest forward ancestor."""
    line = node.meta.get("source")
    if line:
        return line
    seen, queue = {node}, list(node.all_input_nodes)
    while queue:
        current = queue.pop(0)
        if current.meta.get("source"):
            return f"grad of {current.meta['source']}"
        for parent in current.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return ""
