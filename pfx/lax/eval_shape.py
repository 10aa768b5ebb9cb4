"""`eval_shape`: what a function returns, in shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfx import tree
from pfx.array import ShapeDtype
from pfx.lax.body import trace_body
from pfx.meta import TensorMeta


def eval_shape(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function as `ShapeDtype` leaves, computing and allocating nothing.

    >>> eval_shape(lambda x: {"y": x @ x.T}, ShapeDtype((2, 3)))
    {'y': ShapeDtype(shape=(2, 2), dtype=torch.float32)}
    """
    leaves, treedef = tree.flatten(args)
    out_defs: list[tree.TreeDef] = []

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        outs, out_def = tree.flatten(fn(*tree.unflatten(treedef, values)))
        out_defs[:] = [out_def]
        return [torch.as_tensor(out) for out in outs]

    metas = [
        TensorMeta.of(leaf if hasattr(leaf, "dtype") else torch.as_tensor(leaf)) for leaf in leaves
    ]
    outs = trace_body(flat, metas)[0].out_metas
    return tree.unflatten(out_defs[0], [ShapeDtype(m.shape, m.dtype) for m in outs])
