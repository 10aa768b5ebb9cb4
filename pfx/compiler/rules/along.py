"""Ops that run along given dims (sorts, cumulative ops, flips, transforms): those stay whole.

Every other dim passes through where operands and results agree on its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Dims,
    Rule,
    argument,
    bind_sizes,
    named,
    operand_nodes,
    result_values,
    shape_of,
)

aten = torch.ops.aten


def touched_dims(node: torch.fx.Node, names: Sequence[str], ndim: int) -> set[int] | None:
    """The dims named by an op's arguments; None where one is absent, and so means them all."""
    found: set[int] = set()
    for name in names:
        arg = argument(node, name)
        if arg is None or arg == []:
            return None
        found |= {int(d) % max(ndim, 1) for d in (arg if isinstance(arg, (list, tuple)) else [arg])}
    return found


def along(*names: str, linear: bool = False) -> Any:
    """The rule of an op that works along the dims in the arguments `names`."""

    def rule(node: torch.fx.Node) -> Rule | None:
        shapes = [shape_of(n) for n in operand_nodes(node)]
        touched = touched_dims(node, names, len(shapes[0]))
        if touched is None:
            return None
        return along_dims(node, touched, linear=linear)

    return rule


def along_dims(node: torch.fx.Node, touched: set[int], *, linear: bool = False) -> Rule:
    """Tie the untouched dims of every operand and result to those of the first operand.

    Operands of equal rank match it dim by dim, any other operand (an index) is whole. A result of
    lower rank has lost the touched dims; what a result has more than that stands at its end.
    """
    operands = [shape_of(n) for n in operand_nodes(node)]
    results = [tuple(v.shape) for v in result_values(node) if isinstance(v, torch.Tensor)]
    base = operands[0]
    every = list(range(len(base)))
    rest = [i for i in every if i not in touched]
    dims = named("d", len(base))
    whole = {f"d{i}" for i in touched if i < len(base)}
    tensors: list[Dims] = []
    for k, shape in enumerate([*operands, *results]):
        n, is_result = len(shape), k >= len(operands)
        stands = (
            every if n == len(base) or (is_result and n > len(base)) else rest if is_result else []
        )
        tied = list(named(f"t{k}_", n))
        for i, j in enumerate(stands[:n]):
            if shape[i] == base[j]:
                tied[i] = dims[j]
            else:
                whole.add(f"d{j}")
        whole |= {d[0] for d in tied if d[0].startswith("t")}
        tensors.append(tuple(tied))
    sizes = bind_sizes([dims, *tensors], [base, *operands, *results])
    count = len(operands)
    group = ((0,),) if linear and count == len(results) == 1 else ()
    return Rule(
        tuple(tensors[:count]), tuple(tensors[count:]), sizes, frozenset(whole), linear=group
    )


def _flip_all(node: torch.fx.Node) -> Rule | None:
    """Roll without dims works on the flattened tensor."""
    return None if not argument(node, "dims") else along("dims", linear=True)(node)


TABLE: dict[Any, Any] = {
    aten.flip: along("dims", linear=True),
    aten.roll: _flip_all,
    aten.cumsum: along("dim", linear=True),
    **dict.fromkeys(
        (
            aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin, aten.sort, aten.topk,
            aten.kthvalue, aten.mode, aten.median.dim, aten.nanmedian.dim, aten.max.dim,
            aten.min.dim, aten.aminmax, aten.argmax, aten.argmin, aten.prod, aten.linalg_cross,
            aten._softmax, aten._log_softmax, aten._safe_softmax, aten._softmax_backward_data,
            aten._log_softmax_backward_data, aten.index_copy, aten.index_fill, aten.index_reduce,
            aten._fft_r2c, aten._fft_c2c, aten._fft_c2r,
        ),
        along("dim"),
    ),
    aten.unfold: along("dimension", linear=True),
    aten.diagonal: along("dim1", "dim2", linear=True),
}  # fmt: skip
