"""Zeros of the form of a cotangent: what a sum of cotangents begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import _torch
from pfx._torch import TensorMeta
from pfx.lax.local import zeros_as
from pfx.lax.variance import Variance


@dataclass(frozen=True)
class Zeros:
    """x ↦ 0, in the variance of a cotangent of x."""

    __name__ = "zeros"
    recompute = True

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_torch.apply(_Zeros, x),)

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Variance, ...]:
        """The dual of the operand's."""
        return (operands[0].dual,)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Zeros on every device."""
        return (zeros_as(x),)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _torch.bind(Zeros(), [x], [TensorMeta.of(x)])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> None:  # type: ignore[override]
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _torch.apply(_Zeros, x), in_dims[0]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _torch.apply(_Zeros, tangent)


def zero_cotangent(x: torch.Tensor) -> torch.Tensor:
    """Zeros with the form and the variance of a cotangent of `x`."""
    return _torch.apply(_Zeros, x)
