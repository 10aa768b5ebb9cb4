"""Kernels that update a parameter in one pass over memory, where a chain of calls takes several.

Each is called with tensors and numbers (0-d tensors, which it reads: so only where that waits for no
device), and can write results over operands: see `pfx.compiler.in_place`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pfx import _torch

_CHUNK = 1 << 16  # elements whose squares are summed up at once: they stay in a cache
_WORTH_A_CALL = 1 << 14  # so many cost more than the calls that add up their squares


@dataclass(frozen=True)
class SumOfSquares:
    """The sum of the squares over all but some leading dims, chunk by chunk.

    Attributes:
        leading: how many dims stay.
        keepdim: whether the others stay too, with size 1.
    """

    __name__ = "sum_of_squares"

    leading: int = 0
    keepdim: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sums."""
        kept, gone = x.shape[: self.leading], x.shape[self.leading :]
        rows, size = math.prod(kept), math.prod(gone)
        if rows != 1 and size < _WORTH_A_CALL:
            sums = torch.sum((x * x).reshape(rows, size), 1)
        else:
            sums = torch.stack([_of_row(row) for row in x.reshape(rows, size).unbind()])
        return sums.reshape((*kept, *(1 for _ in gone)) if self.keepdim else kept)


def _of_row(row: Tensor) -> Tensor:
    return torch.stack([torch.dot(chunk, chunk) for chunk in row.split(_CHUNK)]).sum()


@dataclass(frozen=True)
class AdamW:
    """``p + rate · (m / (sqrt(v) · slope + offset) + decay · p)`` after a step of both moments.

    torch's kernel corrects its moments by powers of the step; here the corrections are values of the
    program, so it is told that infinitely many steps have passed, and they go into its rate and eps.
    """

    __name__ = "adamw"
    operands: ClassVar = ((0,), (2,), (3,))

    beta1: float
    beta2: float
    decay: float

    def __call__(
        self,
        p: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        slope: Tensor,
        offset: Tensor,
        rate: Tensor,
        *,
        over: tuple[int, ...] = (-1, -1, -1),
    ) -> tuple[Tensor, ...]:
        """Return the parameter and both moments."""
        p, m, v = _kept((p, m, v), over)
        scale, eps = slope.item(), offset.item()
        _torch.adamw_(
            p,
            m,
            v,
            grad,
            lr=-rate.item() / scale,
            betas=(self.beta1, self.beta2),
            weight_decay=self.decay * scale,
            eps=eps / scale,
        )
        return p, m, v


@dataclass(frozen=True)
class Momentum:
    """``p + rate · v`` with ``v = momentum · v + g + decay · p``, or looking one step ahead."""

    __name__ = "sgd"
    operands: ClassVar = ((0,), (2,))

    momentum: float
    decay: float
    nesterov: bool

    def __call__(
        self, p: Tensor, grad: Tensor, v: Tensor, rate: Tensor, *, over: tuple[int, ...] = (-1, -1)
    ) -> tuple[Tensor, ...]:
        """Return the parameter and the accumulated gradient."""
        p, v = _kept((p, v), over)
        _torch.sgd_(
            p,
            v,
            grad,
            lr=-rate.item(),
            momentum=self.momentum,
            weight_decay=self.decay,
            nesterov=self.nesterov,
        )
        return p, v


@dataclass(frozen=True)
class AddScaled:
    """``p + rate · u``."""

    __name__ = "add_scaled"
    operands: ClassVar = ((0, 1),)

    def __call__(
        self, p: Tensor, u: Tensor, rate: Tensor, *, over: tuple[int, ...] = (-1,)
    ) -> Tensor:
        """Return the sum."""
        out = None if over[0] < 0 else (p, u)[over[0]]
        return torch.add(p, u, alpha=rate.item(), out=out)


def _kept(values: tuple[Tensor, ...], over: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Copies of what must stay as it is."""
    return tuple(x if place >= 0 else x.clone() for x, place in zip(values, over, strict=True))
