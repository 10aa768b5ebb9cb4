"""`label`: say what a value is (a gradient, …), so that `program.memory()` can tell its bytes apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import _torch, tree
from pfx.meta import TensorMeta


@dataclass(frozen=True)
class Label:
    """The identity, as a node that names a role; it has no effect on layouts."""

    role: str

    __name__ = "label"
    recompute = True

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_torch.apply(_Label, self, x),)

    def result_variances(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """That of the operand."""
        return tuple(operands)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The identity."""
        return (x.view_as(x),)


class _Label(torch.autograd.Function):
    @staticmethod
    def forward(label: Label, x: torch.Tensor) -> torch.Tensor:
        return _torch.bind(label, [x], [TensorMeta.of(x)])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, cotangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, mark: Label, x: torch.Tensor) -> tuple[Any, Any]:
        return _torch.apply(_Label, mark, x), in_dims[1]

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


def label(values: Any, role: str) -> Any:
    """Name the role of every leaf, e.g. "gradient"; the identity otherwise.

    >>> label(torch.ones(2), "gradient")
    tensor([1., 1.])
    """
    return tree.map(lambda x: _torch.apply(_Label, Label(role), x), values)
