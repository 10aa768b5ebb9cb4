"""Linear primitives of one tensor: one autograd.Function serves all of them.

A linear map is its own derivative, so forward mode applies it to the tangent, and reverse mode its
transpose to the cotangent. What a primitive has to say is its transpose and how it goes over a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pfx import _torch
from pfx.meta import TensorMeta


class Linear(Protocol):
    """A primitive that is linear in its one operand."""

    @property
    def compute(self) -> Callable[..., tuple[torch.Tensor, ...]]: ...

    def out_meta(self, x: torch.Tensor) -> TensorMeta:
        """The form of the result."""
        ...

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """The operand as the primitive takes it."""
        ...

    def transposed(self) -> Linear:
        """The primitive that the cotangent goes through."""
        ...

    def pushed(self) -> Linear:
        """The primitive that the tangent goes through: itself, or an error."""
        ...

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        """The result for an operand with one more leading dim, that of a batch."""
        ...


def apply(primitive: Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a linear primitive under whatever transform is active."""
    return _torch.apply(_Linear, primitive, primitive.prepared(x))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(primitive: Linear, x: torch.Tensor) -> torch.Tensor:
        return _torch.bind(primitive, [x], [primitive.out_meta(x)])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.primitive = inputs[0]
        if not output.is_floating_point() and not output.is_complex():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, Any]:  # type: ignore[override]
        return None, apply(ctx.primitive.transposed(), cotangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, primitive: Linear, x: torch.Tensor) -> tuple[Any, int]:
        return primitive.mapped(x.movedim(in_dims[1], 0)), 0

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return apply(ctx.primitive.pushed(), tangent)
