"""Layer norm and fused attention: their reduced dims stay whole, batch dims and heads pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx.compiler.rule import (
    Dims,
    Rule,
    bind_sizes,
    named,
    operand_nodes,
    result_values,
    shape_of,
)

aten = torch.ops.aten


def _norm_dims(shape: tuple[int, ...], normalized: int) -> tuple[Dims, Dims, Dims]:
    """Dims of the input, of the statistics and of the weight of a layer norm."""
    lead = named("b", len(shape) - normalized)
    tail = named("e", normalized)
    return (*lead, *tail), (*lead, *((),) * normalized), tail


def _layer_norm(node: torch.fx.Node) -> Rule:
    """``native_layer_norm(x, normalized_shape, weight, bias, eps) -> out, mean, rstd``."""
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    full, stats, tail = _norm_dims(shape, len(node.args[1]))  # type: ignore[arg-type]
    operands = (full, *([tail] * (len(operand_nodes(node)) - 1)))
    sizes = bind_sizes([full], [shape])
    return Rule(operands, (full, stats, stats), sizes, frozenset(d[0] for d in tail))


def _layer_norm_backward(node: torch.fx.Node) -> Rule:
    """``(grad, x, normalized_shape, mean, rstd, weight, bias, mask) -> dx, dweight, dbias``."""
    shape = shape_of(node.args[1])  # type: ignore[arg-type]
    full, stats, tail = _norm_dims(shape, len(node.args[2]))  # type: ignore[arg-type]
    operands = (full, full, stats, stats, *([tail] * (len(operand_nodes(node)) - 4)))
    results = tuple(
        dims if isinstance(value, torch.Tensor) else ()
        for dims, value in zip((full, tail, tail), result_values(node), strict=True)
    )
    sizes = bind_sizes([full], [shape])
    return Rule(operands, results, sizes, frozenset(d[0] for d in tail))


_Q, _K, _LSE = "b h s d", "b h t d", "b h s"


def _attention_mask(node: torch.fx.Node, full: tuple[int, ...]) -> Dims | None:
    mask = node.kwargs.get("attn_mask")
    if mask is None:
        return None
    names = ("b", "h", "s", "t")
    shape = shape_of(mask)  # type: ignore[arg-type]
    lead = 4 - len(shape)
    return tuple((names[lead + i],) if n == full[lead + i] else () for i, n in enumerate(shape))


def _attention(operands: tuple[str, ...], results: tuple[str, ...]) -> Any:
    """Attention over whole sequences: batch and heads may be split, nothing else."""

    def rule(node: torch.fx.Node) -> Rule | None:
        mask = node.kwargs.get("attn_mask")
        nodes = operand_nodes(node)
        plain = nodes[:-1] if mask is not None else nodes
        query, key = (shape_of(n) for n in plain[len(operands) > 3 :][:2])
        if len(query) != 4 or query[1] != key[1]:
            return None
        sizes = dict(zip("bhsd", query, strict=True)) | {"t": key[2]}
        dims: list[Dims] = [tuple((f,) for f in text.split()) for text in operands]
        extra = _attention_mask(node, (*query[:3], key[2]))
        if extra is not None:
            dims.append(extra)
        outs = tuple(tuple((f,) for f in text.split()) for text in results)
        return Rule(tuple(dims), outs, sizes, frozenset("std"))

    return rule


TABLE: dict[Any, Any] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention((_Q, _K, _K), (_Q, _LSE)),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(
        (_Q, _Q, _K, _K, _Q, _LSE), (_Q, _K, _K)
    ),
}
