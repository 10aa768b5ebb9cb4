"""Zeros of the form of a cotangent: what a sum of cotangents begins with, or stands for none.

They need not only the right shape: beside addends, zeros that all devices have would be of another
kind (`pfx.lax.manual.variance`), though they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch
from pfx.lax.manual.local import Local, local, variance_of
from pfx.lax.manual.variance import INVARYING, Variance
from pfx.meta import TensorMeta


@dataclass(frozen=True)
class Zeros:
    """x ↦ 0 of the form `meta`, whatever x is: the operand brings the mesh."""

    __name__ = "zeros"
    recompute = True

    meta: TensorMeta

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_torch.apply(_Zeros, self, x),)

    @property
    def variance(self) -> Variance:
        """What the zeros are along the axes of a manual region."""
        return self.meta.variance or INVARYING

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Variance, ...]:
        """What `meta` says."""
        return (self.variance,)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Zeros on every device."""
        meta = self.meta
        zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if not isinstance(x, Local):
            return (zeros,)
        places = x.mesh.coordinates(x.mesh.ordered(tuple(self.variance.axes)))
        return (local(x.mesh, self.variance, [zeros.clone() for _ in places]),)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(zeros: Zeros, x: torch.Tensor) -> torch.Tensor:
        return _torch.bind(zeros, [x], [zeros.meta])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.zeros = inputs[0]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, zeros: Zeros, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _torch.apply(_Zeros, zeros, x), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _torch.apply(_Zeros, ctx.zeros, tangent)


def zeros_of(meta: TensorMeta, beside: Sequence[torch.Tensor]) -> torch.Tensor:
    """Zeros of a form.

    Args:
        meta: the form, with what they are along the axes of a manual region.
        beside: tensors at hand; one that is not the same on all devices brings the mesh.
    """
    if meta.variance not in (None, INVARYING):
        for x in beside:
            if variance_of(x) != INVARYING:
                return _torch.apply(_Zeros, Zeros(replace(meta, stride=None)), x)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def zero_cotangent(x: torch.Tensor) -> torch.Tensor:
    """Zeros with the form and the variance of a cotangent of `x`."""
    meta = replace(TensorMeta.of(x), variance=variance_of(x).dual)
    return zeros_of(meta, [x])
