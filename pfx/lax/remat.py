"""`remat`: forget a function's intermediates in the forward part, compute them again backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfx import _torch, tree
from pfx.errors import message
from pfx.lax.body import (
    Body,
    cotangent_meta,
    is_differentiable,
    jvp_of,
    owned,
    trace_body,
    vjp_of,
)
from pfx.lax.manual.zeros import zeros_of


class _Remat(torch.autograd.Function):
    @staticmethod
    def forward(body: Body, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return owned(body(*operands), operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[out for out in output if not is_differentiable(out)])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        # A pull may run after its transform has ended, and what follows opens one of the same number.
        body, operands = ctx.body, [_torch.alive(x) for x in ctx.saved_tensors]
        cotangents = tuple(_torch.alive(c) for c in cotangents)
        pairs = zip(cotangents, body.out_metas, strict=True)
        given = [
            zeros_of(cotangent_meta(meta), operands) if c is None else c
            for c, meta in pairs
            if is_differentiable(meta)
        ]
        with _torch.recomputing():
            pulled = iter(vjp_of(body)(*operands, *given)[len(body.out_metas) :])
        return (None, *(next(pulled) if is_differentiable(x) else None for x in operands))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        # A remat of its own: what the tangents are computed from is not saved either. It also goes
        # through the Function because torch has outer forward levels switched off here.
        body, operands = ctx.body, ctx.saved_tensors
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        operands = [*operands, *(tangents[i] for i in moving)]
        pushing, captured = trace_body(jvp_of(body, moving), operands)
        pushed = iter(_torch.apply(_Remat, pushing, *operands, *captured))
        return tuple(next(pushed) if is_differentiable(m) else None for m in body.out_metas)

    @staticmethod
    def vmap(info: Any, in_dims: Any, body: Body, *operands: Any) -> tuple[Any, Any]:
        mapped = torch.func.vmap(lambda *a: tuple(body(*a)), tuple(in_dims[1:]))  # type: ignore[arg-type]
        batched, captured = trace_body(lambda *args: list(mapped(*args)), operands)
        return _torch.apply(_Remat, batched, *operands, *captured), (0,) * len(body.out_metas)


def remat(fn: Callable[..., Any], *, policy: str = "full") -> Callable[..., Any]:
    """Return `fn` with its intermediates recomputed in the backward pass instead of saved.

    Law: values and gradients are bit-equal to those of `fn`. Source: Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    Args:
        fn: a pure function of pytrees of tensors; it may close over tensors.
        policy: "full" saves only the inputs.

    >>> f = remat(lambda x: torch.sin(torch.sin(x)))
    >>> bool(torch.func.grad(f)(torch.tensor(0.5)) == torch.func.grad(
    ...     lambda x: torch.sin(torch.sin(x)))(torch.tensor(0.5)))
    True
    """
    if policy != "full":
        raise ValueError(message("remat:", f"policy={policy!r} is unknown.", fix='use "full"'))

    def wrapped(*args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        out_def: list[tree.TreeDef] = []

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            outs, out_tree = tree.flatten(fn(*tree.unflatten(treedef, values)))
            out_def[:] = [out_tree]
            return outs

        body, captured = trace_body(flat, leaves)
        outs = _torch.apply(_Remat, body, *leaves, *captured)
        return tree.unflatten(out_def[0], outs)

    return wrapped
