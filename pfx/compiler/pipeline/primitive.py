"""The pipeline primitive: a scan over microbatches whose body scans layers that live on several devices.

Where the microbatches of an ordinary loop hand a carry on, those of a pipeline are independent: what
a microbatch makes is added up, or is a row of a stack. So they may overlap, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx.lax.body import Body

FIRST, LAST, EACH, SHARE = "first", "last", "each", "share"


@dataclass(frozen=True)
class Output:
    """One result of a pipeline: on which stage a microbatch makes it, and what becomes of it.

    Attributes:
        home: "first" or "last", the stage that makes it; "each": every stage makes the rows of its
            own layers; "share": every stage makes its layers' share of a sum.
        summed: added up over the microbatches; else the rows of a stack, one for each.
        forward: made by the forward pass.
        dtype: in which it is added up.
    """

    home: str
    summed: bool
    forward: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline in a graph: operands are xs (a row for each microbatch), then consts.

    Attributes:
        axis: the mesh axis whose devices are the stages' homes.
        stacks: which consts have the layers as dim 0, split over that axis.
        layers: how many layers there are.
    """

    __name__ = "pipeline"

    body: Body
    num_xs: int
    length: int
    axis: str
    layers: int
    stacks: tuple[bool, ...]
    outputs: tuple[Output, ...]

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What it means: one microbatch after the other, all layers in one place."""
        xs, consts = operands[: self.num_xs], operands[self.num_xs :]
        rows = [self.body(*(x[i] for x in xs), *consts) for i in range(self.length)]
        stacks = (torch.stack(column) for column in zip(*rows, strict=True))
        return tuple(
            stack.sum(0, dtype=output.dtype) if output.summed else stack
            for stack, output in zip(stacks, self.outputs, strict=True)
        )

    def result_variances(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """What each output is along the axes of a manual region."""
        return tuple(meta.variance for meta in self.body.out_metas)
