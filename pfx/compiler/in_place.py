"""Calls that add to a sum in its own memory, which outlives them."""

from __future__ import annotations

from typing import Any

import torch


def add_to(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Add a value to a sum."""
    return total.add_(value)


def add_product_to(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add the product of two matrices to a sum, whose shape may be another of the same size."""
    total.view(a.shape[0], b.shape[1]).addmm_(a, b)
    return total


def is_in_place(target: Any) -> bool:
    """Tell whether a call writes into its first operand's memory."""
    return target is add_to or target is add_product_to
