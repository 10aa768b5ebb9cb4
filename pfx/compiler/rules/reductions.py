"""Reductions: integers, bools and extrema reduce by their meaning; `any` by max, `all` by min."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Rule,
    argument,
    bind_sizes,
    named,
    operand_nodes,
    result_values,
    shape_of,
)

aten = torch.ops.aten


def reduced_dims(node: torch.fx.Node) -> list[int]:
    """The dims a reduction runs over; an absent or empty list means all of them."""
    ndim = len(shape_of(operand_nodes(node)[0]))
    arg: Any = argument(node, "dim")
    if arg is None or arg == []:
        return list(range(ndim))
    return [int(d) % max(ndim, 1) for d in (arg if isinstance(arg, (list, tuple)) else [arg])]


def reduction(op: str, *, linear: bool = False) -> Any:
    """The rule of a reduction whose partial results combine by `op`."""

    def rule(node: torch.fx.Node) -> Rule:
        shape = shape_of(operand_nodes(node)[0])
        gone = reduced_dims(node)
        dims = named("d", len(shape))
        keep = bool(argument(node, "keepdim"))
        result = tuple(() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone)
        return Rule(
            (dims,), (result,) * len(result_values(node)), bind_sizes([dims], [shape]),
            reduce={f"d{i}": op for i in gone if i < len(shape)}, linear=((0,),) if linear else (),
        )  # fmt: skip

    return rule


TABLE: dict[Any, Any] = {
    aten.sum: reduction("sum", linear=True),
    aten.amax: reduction("max"),
    aten.amin: reduction("min"),
    aten.max.default: reduction("max"),
    aten.min.default: reduction("min"),
    aten.any: reduction("max"),
    aten.all: reduction("min"),
}
