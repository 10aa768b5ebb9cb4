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
from pfx.compiler.deals import emit_move, neutralized, unaligned
from pfx.compiler.ir import (
    Compute,
    Constant,
    Instr,
    LoopInstr,
    PipelineInstr,
    Reshard,
    Value,
    values_in,
)
from pfx.compiler.loops import outputs_of, placeholders
from pfx.compiler.manual import axes_of, move_of
from pfx.compiler.origins import reason_of, roles_of, source_of
from pfx.compiler.part_names import Name, after, names_of_results
from pfx.compiler.pipeline.primitive import Pipeline
from pfx.compiler.program import Program
from pfx.compiler.propagate import Context, Decision, Solution
from pfx.compiler.reshard import Move, plan_moves
from pfx.compiler.rule import Call, Local, Rule, operand_nodes, result_values, substituted
from pfx.lax.constrain import Constraint
from pfx.lax.manual.axis_index import AxisIndex
from pfx.lax.manual.boundary import Boundary
from pfx.lax.manual.collective import Collective
from pfx.lax.manual.variance import node_variance
from pfx.lax.scan import Loop
from pfx.spec import Axes, Layout

Node = torch.fx.Node


def partition(
    module: torch.fx.GraphModule,
    solution: Solution,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    context: Context,
) -> Program:
    """Emit the program of a graph whose inputs and outputs have the given layouts."""
    emitter = _Emitter(module, solution, context)
    places = placeholders(module.graph)
    values = [
        emitter.new(node.meta["val"], layout) for node, layout in zip(places, inputs, strict=True)
    ]
    return emitter.run(values, outputs)


class _Emitter:
    """Walks a graph once, appending instructions."""

    def __init__(self, module: torch.fx.GraphModule, solution: Solution, context: Context) -> None:
        self.module, self.solution, self.context = module, solution, context
        self.mesh = context.mesh
        self.instrs: list[Instr] = []
        self.values: dict[Node, Value] = {}
        self.moved: dict[Any, Value] = {}
        self.free: dict[Node, Rule] = {}
        self.count = 0

    def run(
        self, inputs: Sequence[Value], outputs: Sequence[Layout], own: Sequence[Axes] = ()
    ) -> Program:
        """Emit everything; output i has parts of its own along the axes ``own[i]`` at least."""
        graph = self.module.graph
        self.values = dict(zip(placeholders(graph), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "get_attr":
                self.constant(node)
            elif node.op == "call_function":
                self.visit(node)
        outs = [
            self.at(node, layout, node, "the layout of the output")
            for node, layout in zip(outputs_of(graph), outputs, strict=True)
        ]
        for i, axes in enumerate(own):
            outs[i] = self.spread(outs[i], axes)
        return Program(self.mesh, list(inputs), outs, self.instrs)

    def next_number(self) -> int:
        """Number a new value."""
        self.count += 1
        return self.count

    def new(self, fake: Any, layout: Layout, role: str = "", name: Name | None = None) -> Value:
        """Number a new value; `name` says what the axes of a manual region are to it."""
        number, shape = self.next_number(), tuple(fake.shape)
        if name is not None:
            shape, layout = name.shape(shape, self.mesh), name.full(layout, self.mesh)
        return Value(number, shape, fake.dtype, layout, role)

    def like(self, value: Value, *, row: bool = False, stack: int = 0, role: str = "") -> Value:
        """Number a new value in the place of another, of a row of it, or of a stack of it."""
        shape, layout = value.shape, value.layout
        if row:
            varying = self.mesh.ordered((*layout.varying, *layout.dims[0]))
            shape, layout = shape[1:], replace(layout.sliced(), varying=varying)
        if stack:
            shape, layout = (stack, *shape), layout.stacked()
        return Value(self.next_number(), shape, value.dtype, layout, role)

    def constant(self, node: Node) -> None:
        tensor = getattr(self.module, str(node.target))
        out = self.new(tensor, self.solution.layouts[node])
        self.instrs.append(Compute(Constant(tensor), (), {}, (), (out,)))
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
        if isinstance(node.target, Pipeline):
            self.pipeline(node, decision)
            return
        if isinstance(node.target, Boundary):
            self.cross(node, decision)
            return
        if isinstance(node.target, Collective):
            self.collective(node, decision)
            return
        rule = self.context.rule(node)
        if rule.free:
            self.free[node] = rule
            return
        self.call(node, rule, decision)

    def call(self, node: Node, rule: Rule, decision: Choice) -> None:
        """Emit one local call."""
        reason = reason_of(node)
        ready = [
            self.at(n, layout, node, reason)
            for n, layout in zip(operand_nodes(node), decision.operands, strict=True)
        ]
        fills, ready = neutralized(
            node, rule, decision.assignment, ready, self.mesh, self.next_number
        )
        self.instrs += fills
        local = Local(node, rule, decision.assignment, self.mesh)
        call = rule.localize(local) if rule.localize else Call(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        values: dict[Node, list[Value]] = {}
        for n, value in zip(operand_nodes(node), ready, strict=True):
            values.setdefault(n, []).append(value)
        args = substituted(call.args, values)
        kwargs = substituted(dict(call.kwargs), values)
        fakes = result_values(node)
        names = self.names_of_results(node, rule, ready)
        outs = tuple(
            self.new(fake, layout, role, name) if isinstance(fake, torch.Tensor) else None
            for fake, layout, role, name in zip(
                fakes, decision.results, roles_of(node), names, strict=True
            )
        )
        ins = tuple(dict.fromkeys([*values_in(args), *values_in(kwargs)]))
        rows: tuple[int, ...] = ()
        if node.meta.get("stack"):
            outs = tuple(out and replace(out, stack=True) for out in outs)
            lead = rule.results[0][:1]
            along = [v for v, dims in zip(ready, rule.operands, strict=True) if dims[:1] == lead]
            rows = tuple(k for k, value in enumerate(ins) if value in along)
        many = isinstance(node.meta["val"], (list, tuple))
        source = node.meta.get("source", "")
        self.instrs.append(
            Compute(call.target, args, kwargs, ins, outs, call.offset, source, many, rows=rows)
        )
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
            kept = self.named(target, value, self.solution.layouts[target])
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
        for i, (operand, layout) in enumerate(zip(node.args, decision.operands, strict=True)):
            if layout.free:
                wish = decision.body.input_wishes[i]
                lead = ((),) if c <= i < c + x else ()
                dims = (*lead, *(axes or () for axes in wish)) if wish else ((),) * len(layout.dims)
                layout = Layout(dims)
            if c <= i < c + x:
                self.note_gathered_rows(node, operand)  # type: ignore[arg-type]
            ins.append(self.at(operand, layout, node, "an operand of the loop"))  # type: ignore[arg-type]
        metas = (*loop.body.in_metas[:c], *loop.body.out_metas[c:])
        own = [self.mesh.ordered(tuple(axes_of(meta))) for meta in metas]
        ins[:c] = [self.spread(value, axes) for value, axes in zip(ins[:c], own[:c], strict=True)]
        inner = _Emitter(loop.body.module, decision.body, self.context)
        body_ins = [inner.like(value, row=c <= i < c + x) for i, value in enumerate(ins)]
        outs_layout = decision.results
        body_outs = [*outs_layout[:c], *(layout.sliced() for layout in outs_layout[c:])]
        body = inner.run(body_ins, body_outs, own)
        outs = tuple(
            self.like(value, stack=loop.length if i >= c else 0, role=role)
            for i, (value, role) in enumerate(zip(body.outputs, roles_of(node), strict=True))
        )
        source, axis = node.meta.get("source", ""), node.meta.get("axis", "")
        if axis:  # what a loop over layers stacks is a row for each
            outs = (*outs[:c], *(replace(out, stack=True) for out in outs[c:]))
        self.instrs.append(
            LoopInstr(body, c, x, loop.length, loop.reverse, tuple(ins), outs, source, axis)
        )
        self.bind(node, outs)

    def note_gathered_rows(self, node: Node, operand: Node) -> None:
        """Report a scan over a dim that is split: it needs every row, everywhere."""
        value = self.values.get(operand)
        axes = [a for a in value.layout.dims[0] if a not in self.own(operand)] if value else []
        if axes:
            by = " and ".join(map(repr, axes))
            line = (
                f"the scan at {source_of(node)} runs over rows that {by} splits: all are gathered"
            )
            self.context.note(line)

    def pipeline(self, node: Node, decision: Choice) -> None:
        """Emit a pipeline as one microbatch on all stages at once; `lay_out` cuts it into stages."""
        made: Pipeline = node.target  # type: ignore[assignment]
        assert isinstance(decision, Decision) and decision.body is not None
        ins = [
            self.at(operand, layout, node, "an operand of the pipeline")  # type: ignore[arg-type]
            for operand, layout in zip(node.args, decision.operands, strict=True)
        ]
        inner = _Emitter(made.body.module, decision.body, self.context)
        layouts = list(decision.body.inputs)
        places = placeholders(made.body.module.graph)
        body_ins = [
            replace(inner.new(p.meta["val"], layout), stack=p.meta["stack"])
            for p, layout in zip(places, layouts, strict=True)
        ]
        own = [self.mesh.ordered(tuple(axes_of(meta))) for meta in made.body.out_metas]
        wanted = [replace(k, free=False, zero=False) for k in decision.body.outputs]
        body = inner.run(body_ins, wanted, own)
        outs = tuple(
            self.new(fake, layout, role)
            for fake, layout, role in zip(
                node.meta["val"], decision.results, roles_of(node), strict=True
            )
        )
        source = node.meta.get("source", "")
        self.instrs.append(PipelineInstr(made, body, tuple(ins), outs, source))
        self.bind(node, outs)

    def own(self, node: Node) -> Axes:
        """The axes along which the devices of a manual region have a value of their own."""
        if not self.context.manual:
            return ()
        return self.mesh.ordered(tuple(node_variance(node).axes))

    def named(self, node: Node, value: Value, layout: Layout) -> Layout:
        """The layout of a node's value that is `layout` but for the axes of a manual region."""
        axes = self.own(node)
        return Name.of(value.layout, axes).full(layout, self.mesh) if axes else layout

    def names_of_results(
        self, node: Node, rule: Rule, operands: Sequence[Value]
    ) -> Sequence[Name | None]:
        """What the axes of a manual region are to the results of a call."""
        if isinstance(node.target, AxisIndex):
            return [Name((), varying=node.target.axes)]
        names = [
            Name.of(value.layout, self.own(n))
            for n, value in zip(operand_nodes(node), operands, strict=True)
        ]
        if not any(name.axes for name in names):
            return [None] * len(rule.results)
        return names_of_results(rule, names, self.mesh)

    def cross(self, node: Node, decision: Choice) -> None:
        """Enter or leave a manual region: the same tensors under another name."""
        boundary: Boundary = node.target  # type: ignore[assignment]
        reason = f"{boundary.__name__} shard_map as {boundary.layout.spec}"
        value = self.at(node.args[0], decision.operands[0], node, reason)  # type: ignore[arg-type]
        if not boundary.inward:
            value = self.spread(value, boundary.layout.axes)
            name = Name.of(value.layout, self.own(node))
            shape = name.shape(tuple(node.meta["val"].shape), self.mesh)
            layout = name.full(decision.results[0], self.mesh)
            value = replace(value, shape=shape, layout=layout)
        self.bind(node, [value])

    def collective(self, node: Node, decision: Choice) -> None:
        """Emit a hand-written collective."""
        made: Collective = node.target  # type: ignore[assignment]
        operand: Node = node.args[0]  # type: ignore[assignment]
        reason = "an operand of a hand-written collective"
        value = self.at(operand, decision.operands[0], node, reason)
        name = after(made, Name.of(value.layout, self.own(operand)))
        out = self.new(node.meta["val"], decision.results[0], node.meta.get("role", ""), name)
        move = move_of(made, out.layout)
        source, why = source_of(node), f"{made.public_name} in shard_map"
        if source.startswith("grad of"):
            why = f"gradient: {why}"  # the transpose of another, or of a cast
        self.instrs.append(Reshard(move, (value,), (out,), source, why, (move,)))
        self.bind(node, [out])

    def spread(self, value: Value, axes: Axes) -> Value:
        """A value with parts of its own along `axes`."""
        missing = tuple(axis for axis in axes if axis not in value.layout.axes)
        if not missing:
            return value
        varying = self.mesh.ordered((*value.layout.varying, *missing))
        layout = replace(value.layout, varying=varying)
        move = Move("cast", missing, -1, -1, layout)
        out = replace(value, number=self.next_number(), layout=layout)
        self.instrs.append(Reshard(move, (value,), (out,), moves=(move,)))
        return out

    def at(self, node: Node, layout: Layout, reader: Node, reason: str) -> Value:
        """The value of a node in a layout, moved there if it is elsewhere."""
        if node in self.free:
            return self.materialize(node, layout)
        value = self.values[node]
        return self.move(value, self.named(node, value, layout), reader, reason)

    def materialize(self, node: Node, layout: Layout) -> Value:
        """Make a free value (zeros, an arange) directly in a layout."""
        layout = Layout(layout.dims, layout.partial, layout.reduce)
        if layout.partial and not self.free[node].zero:
            whole = self.materialize(node, layout.whole())
            return self.move(whole, layout, node, "a sum that is owed")
        key = (id(node), layout)
        if key not in self.moved:
            rule = self.free[node]
            (dims,) = rule.results
            assignment = {d[0]: axes for d, axes in zip(dims, layout.dims, strict=True)}
            dealt = unaligned(rule, assignment, self.mesh)
            if dealt:
                near = tuple(
                    () if d[0] in dealt else axes for d, axes in zip(dims, layout.dims, strict=True)
                )
                whole = self.materialize(node, replace(layout, dims=near))
                return self.move(whole, layout, node, "rows that an axis deals")
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
            key = (now.number, now.shape, step.layout)
            if key not in self.moved:
                source = source_of(reader)
                made = emit_move(now, step, self.mesh, self.next_number, source, reason)
                self.instrs += made
                (self.moved[key],) = made[-1].outs  # type: ignore[assignment]
            now = self.moved[key]
        return now
