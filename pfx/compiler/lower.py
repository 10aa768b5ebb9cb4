"""From a function to a program: trace, simplify, propagate, partition, and the passes after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pfx import _torch
from pfx.compiler.functional import check_pure
from pfx.compiler.loops import outputs_of, prune_loops, sink_constraints
from pfx.compiler.partition import partition
from pfx.compiler.passes import bucket_collectives
from pfx.compiler.program import Program
from pfx.compiler.propagate import Context, propagate
from pfx.compiler.simplify import simplify
from pfx.mesh import Mesh
from pfx.spec import Layout


@dataclass(frozen=True)
class Lowered:
    """A program, and the tensors its function closed over: the program's trailing inputs."""

    program: Program
    captured: list[torch.Tensor] = field(default_factory=list)


def lower(
    fn: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Any],
    in_layouts: Sequence[Layout],
    out_layouts: Callable[[Sequence[torch.Tensor]], Sequence[Layout | None]],
    mesh: Mesh,
    *,
    names: Mapping[str, Any] | None = None,
    rules: Mapping[Any, str] | None = None,
    bucket_bytes: int = 32 << 20,
    where: str = "",
) -> Lowered:
    """Compile ``fn(*tensors) -> tensors`` for every device of a mesh.

    Args:
        inputs: tensors or metas, one per argument; only their form is read.
        in_layouts: the layout of each argument.
        out_layouts: given the (fake) results, the layout each must have, None for any.
        names: logical dim names to mesh axes, for `constrain` with a string.
        rules: einops patterns of users' ops.
        bucket_bytes: collectives of one kind are joined up to this many bytes.
    """
    traced = _torch.trace(fn, inputs)
    check_pure(traced.module, where)
    module = simplify(traced.module)
    sink_constraints(module.graph)
    prune_loops(module.graph)
    context = Context(mesh, names, rules or {})
    captured = [Layout(((),) * tensor.ndim) for tensor in traced.captured]
    layouts = [*in_layouts, *captured]
    wishes = list(out_layouts([node.meta["val"] for node in outputs_of(module.graph)]))
    solution = propagate(module.graph, layouts, wishes, context)
    finals = [
        wish or Layout(natural.dims)
        for wish, natural in zip(wishes, solution.outputs, strict=True)
    ]
    program = partition(module, solution, layouts, finals, context)
    program.report = list(context.report)
    return Lowered(bucket_collectives(program, bucket_bytes), traced.captured)
