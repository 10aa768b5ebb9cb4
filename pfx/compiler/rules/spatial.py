"""Ops over images and windows: batch (and channels, where they do not mix) pass through."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Call,
    Dims,
    Local,
    Rule,
    argument,
    bind_sizes,
    named,
    operand_nodes,
    pattern_rule,
    result_values,
    shape_of,
)
from pfx.compiler.rules.matmul import batched

aten = torch.ops.aten


def _windows(spatial: int, operands: int = 1, results: int = 1) -> Any:
    """The rule of an op that works on the last `spatial` dims of each operand separately."""
    tensor = " ".join(("...", *(f"s{i}" for i in range(spatial))))
    return batched(f"{', '.join([tensor] * operands)} -> {', '.join([tensor] * results)}")


def _convolution(node: torch.fx.Node) -> Rule:
    """Batch passes; the output channels too, unless groups tie them to the input's."""
    n = len(shape_of(node)) - 2
    ins, kernel, outs = (" ".join(f"{c}{i}" for i in range(n)) for c in "iko")
    plain = not argument(node, "transposed") and argument(node, "groups") == 1
    out = "co" if plain else "cx"
    bias = f", {out}" if len(operand_nodes(node)) == 3 else ""
    weight = f"{'co' if plain else 'ca'} cg {kernel}"
    whole = f"ci ca cg cx {ins} {kernel} {outs}"
    return pattern_rule(node, f"n ci {ins}, {weight}{bias} -> n {out} {outs}", whole)


def _convolution_backward(node: torch.fx.Node) -> Rule:
    """``(grad, x, weight, …) -> dx, dweight, dbias``: a split batch leaves partial sums of weights."""
    shapes = [shape_of(n) for n in operand_nodes(node)]
    dims: list[Dims] = [named(f"t{k}_", len(shape)) for k, shape in enumerate(shapes)]
    dims[0], dims[1] = (("n",), *dims[0][1:]), (("n",), *dims[1][1:])
    sizes = bind_sizes(dims, shapes)
    results = (dims[1], dims[2], (dims[0][1],))
    kept = tuple(
        found if isinstance(value, torch.Tensor) else ()
        for found, value in zip(results, result_values(node), strict=True)
    )
    return Rule(tuple(dims), kept, sizes, frozenset(set(sizes) - {"n"}), linear=((0,),))


def _group_norm(node: torch.fx.Node) -> Rule | None:
    """``native_group_norm(x, weight, bias, N, C, HxW, group, eps) -> out, mean, rstd``."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    groups = int(argument(node, "group"))
    full: Dims = (("n",), ("g", "c"), *named("s", len(shape) - 2))
    stats: Dims = (("n",), ("g",))
    count = len(operand_nodes(node))
    sizes = bind_sizes([full], [shape]) | {"g": groups, "c": shape[1] // groups}
    operands = (full, *([(("g", "c"),)] * (count - 1)))
    return Rule(operands, (full, stats, stats), sizes, frozenset(set(sizes) - {"n", "g"}),
                localize=_local_group_norm)  # fmt: skip


def _local_group_norm(local: Local) -> Call:
    x, weight, bias, _, _, area, _, eps = local.node.args
    rows, channels = local.result_shape()[:2]
    groups = local.result_shape(1)[1]
    args = (local.node.target, x, weight, bias, rows, channels, area, groups, eps)
    return Call(_contiguous_first, args)


def _contiguous_first(op: Any, x: torch.Tensor, *args: Any) -> Any:
    """Call a kernel that wants its operand in order in memory; a part may be a slice of it."""
    return op(x.contiguous(), *args)


TABLE: dict[Any, Any] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.native_group_norm: _group_norm,
    **dict.fromkeys(
        (
            aten.avg_pool2d, aten._adaptive_avg_pool2d, aten.reflection_pad2d,
            aten.replication_pad2d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d,
            aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten._upsample_bilinear2d_aa,
        ),
        _windows(2),
    ),
    **dict.fromkeys(
        (
            aten.reflection_pad1d, aten.replication_pad1d, aten.upsample_nearest1d,
            aten._upsample_nearest_exact1d, aten.upsample_linear1d,
        ),
        _windows(1),
    ),
    **dict.fromkeys(
        (
            aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward,
            aten.reflection_pad2d_backward, aten.replication_pad2d_backward,
        ),
        _windows(2, 2),
    ),
    **dict.fromkeys(
        (aten.reflection_pad1d_backward, aten.replication_pad1d_backward), _windows(1, 2)
    ),
    **dict.fromkeys((aten.max_pool2d_with_indices, aten.adaptive_max_pool2d), _windows(2, 1, 2)),
    **dict.fromkeys(
        (aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward), _windows(2, 3)
    ),
    **dict.fromkeys(
        (
            aten.avg_pool3d, aten._adaptive_avg_pool3d, aten.upsample_nearest3d,
            aten._upsample_nearest_exact3d, aten.upsample_trilinear3d,
        ),
        _windows(3),
    ),
    **dict.fromkeys((aten.avg_pool3d_backward, aten._adaptive_avg_pool3d_backward), _windows(3, 2)),
    **dict.fromkeys((aten.max_pool3d_with_indices, aten.adaptive_max_pool3d), _windows(3, 1, 2)),
    **dict.fromkeys(
        (aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool3d_backward), _windows(3, 3)
    ),
    aten.grid_sampler_2d: lambda node: pattern_rule(
        node, "n c h w, n i j xy -> n c i j", "h w i j xy"
    ),
    aten.im2col: batched("... c h w -> ... x y"),
    aten.col2im: batched("... x y -> ... c h w"),
}  # fmt: skip
