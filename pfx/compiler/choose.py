"""At one node: of the ways to give axes to its factors, the one that disturbs least.

Every operand and every wish for a result propose axes for factors. Where they conflict, the
assignment that leaves most of them in place wins, then the one that moves fewest bytes, then the one
that splits the work most.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from pfx.compiler.deals import can_deal
from pfx.compiler.reshard import reshard_bytes
from pfx.compiler.rule import Assignment, Dim, Dims, Rule, operand_nodes, result_values
from pfx.compiler.wishes import Wish, common, filled
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout


@dataclass(frozen=True)
class Flow:
    """The axes whose partial sums flow through a node, and the operands that carry them."""

    axes: Axes = ()
    operands: tuple[int, ...] = ()


@dataclass(frozen=True)
class Choice:
    """How one node runs: axes of its factors, the layouts it needs, the layouts it makes."""

    assignment: Assignment
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


class Chooser:
    """The ways to run one node, and the best of them."""

    def __init__(self, node: torch.fx.Node, rule: Rule, mesh: Mesh) -> None:
        self.rule, self.mesh = rule, mesh
        self.sizes = [_size(n.meta["val"]) for n in operand_nodes(node)]
        self.out_sizes = [_size(v) for v in result_values(node)]
        self.dims: dict[str, list[Dim]] = {}  # by factor: those that it is in
        for dim in itertools.chain(*rule.operands, *rule.results):
            for factor in dim:
                self.dims.setdefault(factor, []).append(dim)

    def best(
        self,
        have: Sequence[Layout],
        wishes: Sequence[Wish],
        flow: Flow = Flow(),
        *,
        wish_first: bool = False,
        busy: Axes = (),
    ) -> Choice:
        """Of the ways to merge what operands and wishes propose, the one that disturbs least.

        No factor is split over a `busy` axis.
        """
        deals = not busy  # a manual region names its values as parts in equal blocks
        given = [
            self.proposal(dims, layout.dims, deals=deals)
            for dims, layout in zip(self.rule.operands, have, strict=True)
            if not layout.free
        ]
        wished = [
            self.proposal(dims, wish, deals=deals)
            for dims, wish in zip(self.rule.results, wishes, strict=True)
            if wish is not None and dims
        ]
        proposals = [p for p in ([*wished, *given] if wish_first else [*given, *wished]) if p]
        choices = [self.choice(a, flow) for a in self.candidates(proposals, (*flow.axes, *busy))]
        if len(choices) == 1:
            return choices[0]  # the usual case, and a score takes as long as all before it
        return min(choices, key=lambda choice: self.score(choice, proposals, have, wishes))

    def proposal(
        self, dims: Dims, axes_of_dims: Sequence[Axes | None], *, deals: bool = True
    ) -> Assignment:
        """Read the axes of dims as axes of factors, major factors first, while they divide.

        With `deals`, an axis may also deal the only factor of a dim unequally.
        """
        found: Assignment = {}
        for dim, axes in zip(dims, axes_of_dims, strict=True):
            rest = list(axes or ())
            for factor in dim:
                taken: list[str] = []
                size = self.rule.sizes[factor]
                while rest and self.mesh.even(rest[:1], size):
                    size //= self.mesh.shape[rest[0]]
                    taken.append(rest.pop(0))
                if not taken and len(rest) == len(dim) == 1 and deals:
                    if can_deal(self.rule, factor, rest[0], self.mesh):
                        taken.append(rest.pop(0))
                if factor in self.rule.whole:
                    break
                if taken:
                    found[factor] = tuple(taken)
                if size > 1:
                    break
        return found

    def candidates(self, proposals: Sequence[Assignment], busy: Axes) -> list[Assignment]:
        """Merge the proposals in every order; if they are many, starting from each in turn."""
        found: list[Assignment] = []
        distinct = [p for i, p in enumerate(proposals) if p not in proposals[:i]]
        if len(distinct) <= 3:
            orders = [list(order) for order in itertools.permutations(distinct)]
        else:
            orders = [[p, *(q for q in distinct if q is not p)] for p in distinct]
        for order in orders:
            merged: Assignment = {}
            for proposal in order:
                self.merge(merged, proposal, busy)
            if merged not in found:
                found.append(merged)
        return found

    def merge(self, into: Assignment, other: Assignment, busy: Axes) -> None:
        """Add to an assignment what fits: each axis once, parts contiguous, major axes first."""
        for factor, wanted in other.items():
            have = into.get(factor, ())
            used = {a for f, named in into.items() if f != factor for a in named} | set(busy)
            axes = tuple(itertools.takewhile(lambda a, used=used: a not in used, wanted))
            if len(axes) <= len(have) or axes[: len(have)] != have:
                continue
            into[factor] = axes
            if not all(self.rule.representable(dim, into, self.mesh) for dim in self.dims[factor]):
                into[factor] = have
                if not have:
                    del into[factor]

    def choice(self, assignment: Assignment, flow: Flow) -> Choice:
        """The layouts that follow from an assignment."""
        operands = tuple(
            self.rule.layout(dims, assignment, flow.axes if i in flow.operands else ())
            for i, dims in enumerate(self.rule.operands)
        )
        results = []
        for dims in self.rule.results:
            kept = {f for dim in dims for f in dim}
            gone = {f: axes for f, axes in assignment.items() if f not in kept}
            owed = tuple(a for axes in gone.values() for a in axes)
            kinds = {self.rule.reduce.get(f, "sum") for f in gone}
            assert len(kinds) <= 1
            layout = self.rule.layout(dims, assignment, self.mesh.ordered((*flow.axes, *owed)))
            results.append(replace(layout, reduce=kinds.pop() if kinds else "sum"))
        return Choice(assignment, operands, tuple(results))

    def score(
        self,
        choice: Choice,
        proposals: Sequence[Assignment],
        have: Sequence[Layout],
        wishes: Sequence[Wish],
    ) -> tuple[int, float, int]:
        """What to minimize: lost placements, then bytes sent, then unsplit work."""
        split = [a for axes in choice.assignment.values() for a in axes]
        cost = self.bytes(choice, have, wishes)
        return -_votes(choice.assignment, proposals), cost, -self.mesh.count(split)

    def bytes(self, choice: Choice, have: Sequence[Layout], wishes: Sequence[Wish]) -> float:
        """Bytes sent to bring the operands, and the results to their wishes."""
        total = 0.0
        for source, target, size in zip(have, choice.operands, self.sizes, strict=True):
            total += reshard_bytes(source, target, *size, self.mesh)
        for natural, wish, size in zip(choice.results, wishes, self.out_sizes, strict=True):
            total += reshard_bytes(natural, filled(wish, natural), *size, self.mesh)
        return total


def _size(value: object) -> tuple[int, int]:
    """The elements of a value and the bytes of each; nothing where an op returns no tensor."""
    return (value.numel(), value.dtype.itemsize) if isinstance(value, torch.Tensor) else (0, 0)


def _votes(assignment: Assignment, proposals: Sequence[Assignment]) -> int:
    """How many proposed placements an assignment leaves where they are."""
    return sum(
        len(common(axes, assignment.get(factor, ())))
        for proposal in proposals
        for factor, axes in proposal.items()
    )
