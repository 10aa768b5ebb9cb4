"""Reductions: integers, bools and extrema reduce by their meaning; `any` by max, `all` by min."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import Rule, bind_sizes, named, operand_nodes, result_values, shape_of

aten = torch.ops.aten


def reduced_dims(node: torch.fx.Node, position: int = 1) -> list[int]:
    """The dims a reduction runs over; an absent or empty list means all of them."""
    ndim = len(shape_of(operand_nodes(node)[0]))
    arg: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    if arg is None or arg == []:
        return list(range(ndim))
    dims = arg if isinstance(arg, (list, tuple)) else [arg]
    return [int(d) % max(ndim, 1) for d in dims]


def reduction(op: str, *, linear: bool = False, split: bool = True) -> Any:
    """The rule of a reduction whose partial results combine by `op`; `split=False` needs it whole."""

    def rule(node: torch.fx.Node) -> Rule:
        shape = shape_of(operand_nodes(node)[0])
        gone = reduced_dims(node)
        dims = named("d", len(shape))
        sizes = bind_sizes([dims], [shape])
        keep = result_values(node)[0].ndim == len(shape) and bool(shape)
        result = tuple(
            () if i in gone else d for i, d in enumerate(dims) if keep or i not in gone
        )
        names = [f"d{i}" for i in gone if i < len(shape)]
        whole = frozenset() if split else frozenset(names)
        return Rule(
            (dims,), tuple(result for _ in result_values(node)), sizes, whole,
            reduce=dict.fromkeys(names, op), linear=((0,),) if linear else (),
        )  # fmt: skip

    return rule


TABLE: dict[Any, Any] = {
    aten.sum: reduction("sum", linear=True),
    aten.amax: reduction("max"),
    aten.amin: reduction("min"),
    aten.any: reduction("max"),
    aten.all: reduction("min"),
    aten.prod: reduction("prod", split=False),
    aten.argmax: reduction("max", split=False),
    aten.argmin: reduction("min", split=False),
    aten.max: reduction("max", split=False),
    aten.min: reduction("min", split=False),
    aten.mean: reduction("sum", split=False),
    aten.var: reduction("sum", split=False),
    aten.std: reduction("sum", split=False),
    aten.logsumexp: reduction("sum", split=False),
    aten.linalg_vector_norm: reduction("sum", split=False),
}
