"""`stop_gradient`: a value that every derivative takes for a constant."""

from __future__ import annotations

from typing import Any

import torch

from pfx import tree


def stop_gradient(x: Any) -> Any:
    """Return the same values, constant to every derivative; jax.lax.stop_gradient's meaning.

    Law: ``grad(lambda x: f(x, stop_gradient(x)))`` is the derivative by the first argument alone.

    Args:
        x: a pytree; what is not a tensor passes.

    >>> from pfx import grad
    >>> grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
    tensor(3.)
    """
    return tree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, x)
