"""Assign each value of a microbatch to the stage that can compute it, from what it depends on.

====================================  ===========  ==================================================
a value that depends on               belongs to   for example
====================================  ===========  ==================================================
the microbatch alone                  LAST         the number of labels that count
what the last layer hands on          LAST         the loss, the head's gradient
what comes back from the first layer  FIRST        the embedding's gradient
rows of layers, one by one            EACH         a layer's gradient
rows of layers, summed up             SHARE        an auxiliary loss of all layers
rows of layers, in another way        no stage     the largest weight of all layers
several of these                      no stage     a tied embedding's gradient, until its addends part
====================================  ===========  ==================================================
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.compiler.pipeline.primitive import EACH, FIRST, LAST, SHARE
from pfx.compiler.pipeline.stacked import RuleOf, Stacks, scanned_over, stack_axis
from pfx.compiler.rule import operand_nodes
from pfx.lax.constrain import Constraint
from pfx.lax.scan import Loop

Node = torch.fx.Node
aten = torch.ops.aten
_ALL = "all"  # the rows of all stages, in a way that is no sum of each stage's


class NoPipelineError(Exception):
    """Why a loop over split layers is not a pipeline."""


@dataclass
class Homes:
    """The layer loops of a microbatch's graph, and where everything else in it belongs.

    Attributes:
        forward, backward: the loops over layers; the second runs from the last layer to the first.
        stacks: the values whose dim 0 counts the layers.
        needs: for each value, the stages whose work it depends on.
        after: the values that the backward loop has a part in.
    """

    graph: torch.fx.Graph
    forward: Node
    backward: Node | None
    stacks: Stacks
    rule_of: RuleOf
    needs: dict[Node, frozenset[str]] = field(default_factory=dict)
    after: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            self.place(node)
        self.check()

    @property
    def loops(self) -> tuple[Node, ...]:
        """The loops over layers."""
        return (self.forward, self.backward) if self.backward else (self.forward,)

    def place(self, node: Node) -> None:
        """Note what a node depends on."""
        self.needs[node] = self._needs(node)
        if node is self.backward or any(n in self.after for n in node.all_input_nodes):
            self.after.add(node)

    def _needs(self, node: Node) -> frozenset[str]:
        if node in self.loops or node in self.stacks:
            return frozenset()
        if node.target is operator.getitem and node.args[0] in self.loops:
            return frozenset((FIRST if node.args[0] is self.backward else LAST,))
        needs = frozenset().union(*(self.needs[n] for n in node.all_input_nodes))
        if any(n in self.stacks for n in node.all_input_nodes):
            needs |= {SHARE if self._sums_rows(node) else _ALL}
        if needs == {SHARE} and not self._sums_rows(node) and self.linear_in(node) is None:
            return frozenset((_ALL,))
        return needs

    def _sums_rows(self, node: Node) -> bool:
        """Tell whether a node is a sum over the layers of a stack, to which each stage adds its share."""
        if node.args[0] not in self.stacks:
            return False
        if node.target is aten.sum.default:
            return True
        if node.target is not aten.sum.dim_IntList:
            return False
        dims = {d % node.args[0].meta["val"].ndim for d in node.args[1] or [0]}  # type: ignore[union-attr]
        return 0 in dims

    def linear_in(self, node: Node) -> tuple[int, ...] | None:
        """The operands that carry what a node depends on, if it is linear in them together."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        operands = operand_nodes(node)
        mine = tuple(k for k, n in enumerate(operands) if self.needs[n] or n in self.stacks)
        if isinstance(node.target, Constraint):
            return mine
        if not isinstance(node.target, OpOverload):
            return None
        groups = self.rule_of(node).linear
        return mine if any(set(mine) == set(group) for group in groups) else None

    def of(self, node: Node) -> str | None:
        """The one stage that can make a value, or None."""
        if node in self.stacks:
            return EACH
        needs = self.needs[node]
        if len(needs) > 1 or _ALL in needs:
            return None
        return next(iter(needs), LAST)

    def check(self) -> None:
        """Raise unless layers get nothing but their carry, their rows, and what every stage can make."""
        for node in self.graph.nodes:
            if node in self.loops:
                loop: Loop = node.target
                for operand in node.args[loop.num_carry + loop.num_xs :]:
                    self._every_stage(operand)
                    if operand in self.stacks:
                        raise NoPipelineError(f"each layer reads all rows of {operand.name}")
                for operand in scanned_over(node):
                    self._every_stage(operand)
                for operand in node.args[: loop.num_carry]:
                    allowed = {LAST} if node is self.backward else set()
                    if operand in self.stacks or self.needs[operand] - allowed:
                        raise NoPipelineError(
                            f"the layers begin from {operand.name}, which no one stage makes"
                        )
            elif node in self.stacks and node.target is not operator.getitem:
                for operand in operand_nodes(node):
                    self._every_stage(operand)

    def _every_stage(self, operand: Node) -> None:
        if self.needs[operand]:
            what = "which another stage makes in the same pass"
            raise NoPipelineError(f"layers read {operand.name}, {what}")

    def terms(self, node: Node) -> Iterator[Node]:
        """The addends of a value, each made on one stage; linear ops go to each addend."""
        if self.of(node) is not None:
            yield node
            return
        carried = [operand_nodes(node)[k] for k in self.linear_in(node) or ()]
        value = node.meta["val"]
        if node.target is aten.add.Tensor and not node.kwargs:
            if all(isinstance(a, Node) and a.meta["val"].shape == value.shape for a in node.args):
                for operand in node.args:
                    yield from self.terms(operand)  # type: ignore[arg-type]
                return
        if len(carried) == 1:
            for term in self.terms(carried[0]):
                yield self.applied(node, carried[0], term)
            return
        raise NoPipelineError(f"{node.name} ({_source(node)}) mixes what several stages make")

    def applied(self, node: Node, operand: Node, term: Node) -> Node:
        """What a node makes of one addend of its operand."""
        if term.meta["val"].dtype != operand.meta["val"].dtype:
            raise NoPipelineError(f"{node.name} adds up several dtypes, made on several stages")
        with self.graph.inserting_before(node.next):
            made = self.graph.node_copy(node, lambda n: term if n is operand else n)
        self.insert(made)
        if self.of(made) is None:
            raise NoPipelineError(f"{node.name} ({_source(node)}) mixes what several stages make")
        return made

    def insert(self, node: Node) -> None:
        """Take in a node that was added to the graph."""
        if axis := stack_axis(node, self.stacks, self.rule_of):
            self.stacks[node] = axis
        self.place(node)


def _source(node: Node) -> str:
    return (node.meta.get("source") or "").strip() or "in the backward pass"
