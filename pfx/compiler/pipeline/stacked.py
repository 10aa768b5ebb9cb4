"""Which values of a graph are stacks of layers: dim 0 counts the layers, row by row through every op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.compiler.rule import Rule, operand_nodes, result_values
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop

Node = torch.fx.Node
RuleOf = Callable[[Node], Rule]
Stacks = dict[Node, str]  # a stack, and the axis that splits it


def stacks_of(graph: torch.fx.Graph, known: Mapping[Node, str], rule_of: RuleOf) -> Stacks:
    """Follow stacks through a graph, from those that are known to all that come from them."""
    found = dict(known)
    for node in graph.nodes:
        if node.op == "call_function" and (axis := stack_axis(node, found, rule_of)):
            found[node] = axis
    return found


def stack_axis(node: Node, stacks: Mapping[Node, str], rule_of: RuleOf) -> str | None:
    """The axis that splits a value, if it is a stack: emitted by a layer loop, or made row by row."""
    if node.target is operator.getitem:
        source: Node = node.args[0]  # type: ignore[assignment]
        if not isinstance(source.target, Loop):
            return stacks.get(source)
        return scanned(source, stacks) if node.args[1] >= source.target.num_carry else None  # type: ignore[operator]
    axes = {stacks[n] for n in operand_nodes(node) if n in stacks}
    if len(axes) != 1:
        return None
    (axis,) = axes
    if isinstance(node.target, Constraint):
        return axis if _leaves_rows(node.target, axis) else None
    if not isinstance(node.target, OpOverload):
        return None
    return axis if _row_by_row(node, stacks, rule_of(node)) else None


def scanned(node: Node, stacks: Mapping[Node, str]) -> str | None:
    """The axis that splits what a loop runs over, if that is a stack."""
    return next((stacks[x] for x in scanned_over(node) if x in stacks), None)


def scanned_over(node: Node) -> tuple[Node, ...]:
    """The operands of a loop that it runs over."""
    loop: Loop = node.target  # type: ignore[assignment]
    return node.args[loop.num_carry : loop.num_carry + loop.num_xs]  # type: ignore[return-value]


def behind_rows(node: Node) -> set[Node]:
    """All values that the rows a loop runs over are made from, but for what other loops make."""
    found: set[Node] = set()
    todo = list(scanned_over(node))
    while todo:
        now = todo.pop()
        if now not in found and not isinstance(now.target, Loop):
            found.add(now)
            todo += now.all_input_nodes
    return found


def sources_of(targets: Collection[Node], stacks: Mapping[Node, str]) -> set[Node]:
    """The stacks that the given ones come from, row by row."""
    found: set[Node] = set()
    todo = [node for node in targets if node in stacks]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            source = node.args[0] if node.target is operator.getitem else node
            if not isinstance(source.target, Loop):  # type: ignore[union-attr]
                todo += [n for n in operand_nodes(node) if n in stacks]
    return found


def _leaves_rows(constraint: Constraint, axis: str) -> bool:
    """Tell whether a constraint leaves dim 0 split as the stack's is."""
    if isinstance(constraint.spec, str) or isinstance(constraint.grad_spec, str):
        return True
    firsts = {spec[0] for spec in (constraint.spec, constraint.grad_spec) if len(spec)}
    return firsts <= {axis, (axis,)}


def _row_by_row(node: Node, stacks: Mapping[Node, str], rule: Rule) -> bool:
    """Tell whether row i of every result depends on no row but i of any stack."""
    made = zip(rule.results, result_values(node), strict=True)
    leads = {dims[0] if dims else () for dims, value in made if isinstance(value, torch.Tensor)}
    if len(leads) != 1 or len(lead := leads.pop()) != 1:
        return False
    if lead[0] in rule.whole | rule.placed:
        return False
    for operand, dims in zip(operand_nodes(node), rule.operands, strict=True):
        if any(lead[0] in dim for dim in dims[1:]):
            return False
        if operand in stacks and dims[:1] != (lead,):
            return False
    return True
