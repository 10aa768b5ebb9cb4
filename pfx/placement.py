"""Where the state of a training step lives: its parameters and its optimizer state, under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pfx import tree
from pfx.mesh import Mesh
from pfx.plan import DATA, PIPELINE, Plan
from pfx.spec import P


@dataclass(frozen=True, eq=False)
class Placement:
    """The specs of parameters by use: computed with, sharded within a step, kept between steps.

    What the stages of a pipeline share, such as a tied embedding, is split over them while it is
    kept: none holds the whole of what another one uses.

    Attributes:
        axes: a tree like the parameters whose leaves name their dims.
        params: the parameters, or their shapes.
        mesh: the devices.
    """

    plan: Plan
    axes: Any
    params: Any
    mesh: Mesh

    @cached_property
    def report(self) -> list[str]:
        """What the plan could not split, one line each."""
        lines: list[str] = []
        self.plan.compute_specs(self.axes, self.params, self.mesh, lines)
        self._sharded_from(1, lines, kept=True)
        return lines

    @cached_property
    def computed(self) -> Any:
        """The spec each parameter is computed with."""
        return self.plan.compute_specs(self.axes, self.params, self.mesh, [])

    @cached_property
    def gradients(self) -> Any:
        """Of gradients while they are added up: sharded from ZeRO stage 2 on."""
        return self._sharded_from(2)

    @cached_property
    def used(self) -> Any:
        """Of parameters in a step, until they are computed with: sharded at ZeRO stage 3."""
        return self._sharded_from(3)

    @cached_property
    def updated(self) -> Any:
        """Of what an update computes with: sharded from ZeRO stage 1 on."""
        return self._sharded_from(1, kept=True)

    @cached_property
    def kept(self) -> Any:
        """Of parameters between steps."""
        return self._sharded_from(3, kept=True)

    def _sharded_from(
        self, stage: int, report: list[str] | None = None, *, kept: bool = False
    ) -> Any:
        over = [DATA] * (self.plan.zero >= stage) + [PIPELINE] * (kept and self.plan.pp > 1)
        lines = [] if report is None else report
        return self.plan.sharded_specs(self.axes, self.params, self.mesh, lines, over)

    def mirrored(self, opt_state: Any) -> Any:
        """Give each leaf of an optimizer's state the spec of the parameter it mirrors, if any.

        Dims of which it has only one, as means over rows or columns do, are whole.
        """
        pairs, _ = tree.flatten_with_path(self.params)
        specs = tree.leaves(self.updated, lambda node: isinstance(node, P))
        known = [(path, leaf.shape, spec) for (path, leaf), spec in zip(pairs, specs, strict=True)]
        known.sort(key=lambda one: -len(one[0]))  # params["a"]["w"] before params["w"]

        def spec_of(path: tree.Path, leaf: Any) -> P:
            for suffix, shape, spec in known:
                if path[len(path) - len(suffix) :] == suffix and _mirrors(leaf.shape, shape):
                    sizes = zip(spec, leaf.shape, shape, strict=False)
                    return P(*(entry if mine == its else None for entry, mine, its in sizes))
            return P()

        return tree.map_with_path(spec_of, opt_state)


def _mirrors(shape: Sequence[int], of: Sequence[int]) -> bool:
    sizes = zip(shape, of, strict=False)
    return len(shape) == len(of) and all(mine in (1, its) for mine, its in sizes)
