"""Hand-written collectives: for the axes that stay with the compiler, all but the dims they resize pass."""

from __future__ import annotations

import torch
import torch.fx

from pfx.compiler.manual import rank_of_device
from pfx.compiler.rule import Call, Local, Rule, named, operand_nodes, shape_of
from pfx.lax.manual.axis_index import AxisIndex
from pfx.lax.manual.collective import Collective


def rule(node: torch.fx.Node) -> Rule | None:
    """The rule of a collective or an axis index; None for anything else."""
    if isinstance(node.target, AxisIndex):
        return Rule((), ((),), {}, localize=_rank)
    if not isinstance(node.target, Collective):
        return None
    made, (operand,) = node.target, operand_nodes(node)
    dims, shape, resized = named("d", len(shape_of(operand))), shape_of(operand), set()
    if made.kind not in ("all_reduce", "permute", "own", "cast"):
        resized = {made.dim, made.to_dim} - {-1}
    results = tuple((f"new{i}",) if i in resized else d for i, d in enumerate(dims))
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    sizes |= {f"new{i}": shape_of(node)[i] for i in resized}
    whole = frozenset(f"{name}{i}" for i in resized for name in ("d", "new"))
    linear = ((0,),) if made.reduce == "sum" else ()
    return Rule((dims,), (results,), sizes, whole, linear=linear)


def _rank(local: Local) -> Call:
    index: AxisIndex = local.node.target  # type: ignore[assignment]
    device = {"device": index.mesh.device}
    return Call(rank_of_device, (), device, ((index.axes, 1),))
