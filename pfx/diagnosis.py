"""`diagnosis`: what to look at when a step went wrong: norms by leaf and layer, and dtype ranges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfx import tree
from pfx.optim.base import widen

STACK = "layers"


def diagnosis(
    values: Any, axes: Any, dtype: torch.dtype | None = None, scale: Tensor | None = None
) -> dict[str, dict[str, Tensor]]:
    """Describe every leaf of a tree, by the text of its path.

    Args:
        values: parameters or gradients.
        axes: a tree like it whose leaves name the dims; a "layers" dim tells layers apart.
        dtype: the ranges are those of the values in this dtype; None: in their own.
        scale: the values are multiples of what they stand for by this, a loss scale.

    Returns:
        For each leaf: norm; largest, its largest magnitude; mean and std of its elements; layers, the
        norm of each layer, where it has them; and of the (scaled) values in `dtype`, the shares that
        are zero, subnormal, not finite, or overflow (finite themselves, and not in `dtype`).

    >>> found = diagnosis({"w": torch.tensor([[3.0, 4.0], [0.0, 1e5]])}, {"w": "layers embed"},
    ...     torch.float16)["['w']"]
    >>> found["layers"], found["overflow"].item()
    (tensor([5.0000e+00, 1.0000e+05]), 0.25)
    """
    pairs, treedef = tree.flatten_with_path(values)
    names = tree.match(treedef, axes, [path for path, _ in pairs])
    return {
        tree.path_string(path): _leaf(leaf, text.split(), dtype or leaf.dtype, scale)
        for (path, leaf), text in zip(pairs, names, strict=True)
    }


def _leaf(
    x: Tensor, names: list[str], dtype: torch.dtype, scale: Tensor | None
) -> dict[str, Tensor]:
    wide = widen(x)
    true = wide if scale is None else wide / scale
    square, count = true * true, x.numel()
    mean = true.sum() / count
    spread = torch.clamp(square.sum() / count - mean * mean, min=0)
    found = {
        "norm": torch.sqrt(square.sum()),
        "largest": true.abs().amax(),
        "mean": mean,
        "std": torch.sqrt(spread),
        **_ranges(wide, dtype),
    }
    if STACK in names:
        others = [dim for dim, name in enumerate(names) if name != STACK]
        found["layers"] = torch.sqrt(square.sum(others) if others else square)
    return found


def _ranges(wide: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Shares of the elements, as they are in a dtype."""
    limits, narrow = torch.finfo(dtype), wide.to(dtype).to(wide.dtype)
    size, inside = narrow.abs(), torch.isfinite(wide)
    kinds = {
        "zero": narrow == 0,
        "subnormal": (size > 0) & (size < limits.tiny),
        "overflow": inside & ~torch.isfinite(narrow),
        "nonfinite": ~inside,
    }
    # Counted in the wide dtype: sums of bools would be divided as float32 whatever it is.
    return {name: kind.to(wide.dtype).sum() / wide.numel() for name, kind in kinds.items()}
