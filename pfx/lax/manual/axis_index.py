"""`AxisIndex`: the rank of a device along some axes, as a primitive without operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pfx import _torch
from pfx.lax.manual.local import local
from pfx.lax.manual.variance import INVARYING, Variance
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import Axes


@dataclass(frozen=True)
class AxisIndex:
    """The number of a device along the product of some axes, row-major in the order given."""

    mesh: Mesh
    axes: Axes

    __name__ = "axis_index"
    recompute = True

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return _torch.bind(self, [], [TensorMeta((), torch.int64, self.mesh.device)])

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Variance, ...]:
        """It varies along its axes, and along no other."""
        return (INVARYING.having(self.axes, "varying"),)

    def compute(self) -> tuple[torch.Tensor, ...]:
        """All devices' ranks at once."""
        (variance,) = self.result_variances(())
        places = self.mesh.coordinates(self.mesh.ordered(self.axes))
        device = self.mesh.device
        ranks = [torch.tensor(self.mesh.index(p, self.axes), device=device) for p in places]
        return (local(self.mesh, variance, ranks),)
