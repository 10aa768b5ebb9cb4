"""From a function to a program: trace, simplify, propagate, partition, and the passes after it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pfx import _torch
from pfx.compiler.batched import unmerge_batches
from pfx.compiler.functional import check_pure
from pfx.compiler.loops import outputs_of, prune_loops, sink_constraints
from pfx.compiler.manual import check_meshes, has_regions, settle
from pfx.compiler.numbers import share_numbers
from pfx.compiler.order import finish_each_chain
from pfx.compiler.partition import partition
from pfx.compiler.passes import bucket_collectives, number_in_order
from pfx.compiler.pipeline.form import form_pipelines
from pfx.compiler.products import speed_up_products
from pfx.compiler.program import Program
from pfx.compiler.propagate import Context, propagate
from pfx.compiler.repeats import merge_repeated_updates
from pfx.compiler.reuse import reuse_buffers
from pfx.compiler.selects import fuse_guarded_updates
from pfx.compiler.simplify import simplify
from pfx.compiler.stages import lay_out_pipelines
from pfx.compiler.sums import reassociate_sums
from pfx.lax.ops.functionalize import functionalize
from pfx.mesh import Mesh
from pfx.schedules.action import Schedule
from pfx.spec import Layout, effective


@dataclass(frozen=True)
class Lowered:
    """A program, and the tensors its function closed over: the program's trailing inputs."""

    program: Program
    captured: list[torch.Tensor] = field(default_factory=list)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put garbage collection off: it looks through all that a trace has made, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_undisturbed()
def lower(
    fn: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Any],
    in_layouts: Sequence[Layout],
    out_layouts: Callable[[Sequence[torch.Tensor]], Sequence[Layout | None]],
    mesh: Mesh,
    *,
    names: Mapping[str, Any] | None = None,
    rules: Mapping[Any, str] | None = None,
    donated: Sequence[bool] = (),
    bucket_bytes: int = 32 << 20,
    schedule: str | Schedule | None = None,
    where: str = "",
    arg_names: Sequence[str] = (),
) -> Lowered:
    """Compile ``fn(*tensors) -> tensors`` for every device of a mesh.

    Args:
        inputs: tensors or metas, one per argument; only their form is read.
        in_layouts: the layout of each argument.
        out_layouts: given the (fake) results, the layout each must have, None for any.
        names: logical dim names to mesh axes, for `constrain` with a string.
        rules: einops patterns of users' ops.
        donated: which arguments the program may overwrite.
        bucket_bytes: collectives of one kind are joined up to this many bytes.
        schedule: of pipelines: a name in `pfx.schedules.build`, a schedule, or None for the usual.
        where: what errors call the function.
        arg_names: what errors call its arguments.
    """
    traced = _torch.trace(fn, inputs)
    module = functionalize(traced, where, arg_names)
    check_pure(module, where)
    module = simplify(module)
    share_numbers(module.graph)
    sink_constraints(module.graph)
    prune_loops(module.graph)
    unmerge_batches(module.graph)
    reassociate_sums(module.graph)
    merge_repeated_updates(module.graph)
    manual = has_regions(module.graph)
    if manual:
        check_meshes(module.graph, mesh, where)
        settle(module.graph)
    context = Context(mesh, names, rules or {}, manual=manual)
    captured = [Layout(((),) * tensor.ndim) for tensor in traced.captured]
    asked_in = [*in_layouts, *captured]
    asked_out = list(out_layouts([node.meta["val"] for node in outputs_of(module.graph)]))
    layouts = [effective(layout, mesh) for layout in asked_in]
    form_pipelines(module.graph, layouts, context.rule, context.note)
    exact = [asked and effective(asked, mesh) for asked in asked_out]
    solution = propagate(module.graph, layouts, [None] * len(exact), exact, context)
    finals = [
        wanted or Layout(natural.dims)
        for wanted, natural in zip(exact, solution.outputs, strict=True)
    ]
    program = partition(module, solution, layouts, finals, context)
    program.inputs = [replace(v, layout=a) for v, a in zip(program.inputs, asked_in, strict=True)]
    program.outputs = [
        replace(v, layout=a or v.layout) for v, a in zip(program.outputs, asked_out, strict=True)
    ]
    program.report = list(context.report)
    fuse_guarded_updates(program)
    bucket_collectives(program, bucket_bytes)
    finish_each_chain(program)
    number_in_order(program)
    lay_out_pipelines(program, schedule, bucket_bytes, where)
    if schedule is not None and not program.pipelines():
        program.report.append(
            "schedule: no scan over layers became a pipeline, so nothing runs by it"
        )
    program.donated = frozenset(
        value.number for value, given in zip(program.inputs, donated, strict=False) if given
    )
    speed_up_products(program)
    reuse_buffers(program)
    return Lowered(program, traced.captured)
