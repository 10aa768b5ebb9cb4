"""The primitive behind `custom_vjp`: three traced functions, and who differentiates with which.

As in JAX, the backward rule belongs to the innermost derivative that acts on an operand. That
derivative sees the forward rule's outputs and pulls cotangents through the backward rule; every
transform further out sees the operations of both rules, so a second derivative differentiates
them as they are written, and forward mode over reverse pushes tangents through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch
from pfx.errors import TraceError, message
from pfx.lax.body import (
    Body,
    cotangent_meta,
    is_differentiable,
    jvp_of,
    meta_of,
    owned,
    trace_body,
    vjp_of,
)
from pfx.lax.manual.local import variance_of
from pfx.lax.manual.variance import Variance, misplaced
from pfx.lax.manual.zeros import zeros_of

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class CustomRule:
    """A function with a derivative of its own, over flat operands: arguments, then constants.

    `primal` maps operands to outputs, `forward` to outputs and saved residuals. `backward` reads
    the residuals, the cotangents of the float outputs and the constants, and returns a cotangent
    for each of the arguments `pulled`. A residual is a saved one, or operand i if ``residuals``
    says i, so that an argument is never copied in order to be kept.
    """

    __name__ = "custom_vjp"
    inlined = True  # a compiler takes it for what it computes

    name: str
    names: tuple[str, ...]  # of the arguments, for errors
    num_constants: tuple[int, int, int]  # closed over by each of the three functions
    primal: Body
    forward: Body
    backward: Body
    residuals: tuple[int | None, ...]
    pulled: tuple[int, ...]

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply_rule(self, operands)

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Any, ...]:
        """What each output is along the axes of a manual region."""
        return tuple(meta.variance for meta in self.primal.out_metas)

    def compute(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The function itself."""
        return tuple(self.primal(*self.parts(operands)[0]))

    @property
    def num_outputs(self) -> int:
        """How many outputs the function has."""
        return len(self.primal.out_metas)

    def parts(self, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Of one item per operand: those of `primal`, of `forward`, and the constants of `backward`."""
        first, second, third = self.num_constants
        num_args = len(items) - first - second - third
        args, until = items[:num_args], num_args + first
        return (
            [*args, *items[num_args:until]],
            [*args, *items[until : until + second]],
            list(items[until + second :]),
        )

    def batched(self, dims: Sequence[int | None], operands: Sequence[Any], size: int) -> CustomRule:
        """The rule of the function over a leading dim; an argument without it gets a sum."""
        primal_dims, forward_dims, backward_dims = self.parts(dims)
        primal_operands, forward_operands, constants = self.parts(operands)
        primal = _batched(self.primal, primal_dims, primal_operands, size)
        forward = _batched(self.forward, forward_dims, forward_operands, size)
        saved = iter(forward.out_metas[self.num_outputs :])
        inputs = [(0, next(saved)) if i is None else (dims[i], operands[i]) for i in self.residuals]
        inputs += [(0, m) for m in primal.out_metas if is_differentiable(m)]
        inputs += zip(backward_dims, constants, strict=True)
        mapped = _mapped(self.backward, [dim for dim, _ in inputs], size)

        def pull(*args: torch.Tensor) -> list[torch.Tensor]:
            pulled = zip(mapped(*args), self.pulled, strict=True)
            return [out.sum(0) if dims[i] is None else out for out, i in pulled]

        backward = trace_body(pull, [meta for _, meta in inputs])[0]
        return replace(self, primal=primal, forward=forward, backward=backward)

    def pull(self, operands: Tensors, saved: Tensors, cotangents: Tensors) -> list[Any]:
        """The cotangents of the operands by the backward rule; None for zero."""
        kept = iter(saved)
        residuals = [next(kept) if i is None else operands[i] for i in self.residuals]
        metas = self.primal.out_metas
        given = [c for c, m in zip(cotangents, metas, strict=True) if is_differentiable(m)]
        result: list[Any] = [None] * len(operands)
        outs = self.backward(*residuals, *given, *self.parts(operands)[2])
        for i, out in zip(self.pulled, outs, strict=True):
            check_cotangent(f"custom_vjp({self.name}): {self.names[i]}", operands[i], out)
            result[i] = out
        return result


@dataclass(frozen=True, eq=False)
class DeferredRule:
    """A function that its own rules call: they are traced when a derivative meets it, if ever."""

    __name__ = "custom_vjp"
    inlined = True

    name: str
    primal: Body
    complete: Callable[[], tuple[CustomRule, list[torch.Tensor]]]  # the rest of its operands too

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply_rule(self, operands)

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Any, ...]:
        """What each output is along the axes of a manual region."""
        return tuple(meta.variance for meta in self.primal.out_metas)

    def compute(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The function itself."""
        return tuple(self.primal(*operands))

    def batched(
        self, dims: Sequence[int | None], operands: Sequence[Any], size: int
    ) -> DeferredRule:
        """The same over a leading dim."""
        metas = [meta_of(x) for x in operands]

        def complete() -> tuple[CustomRule, list[torch.Tensor]]:
            rule, more = self.complete()
            return rule.batched([*dims, *[None] * len(more)], [*metas, *more], size), more

        return DeferredRule(self.name, _batched(self.primal, dims, metas, size), complete)


def check_cotangent(where: str, primal: Any, cotangent: Any) -> None:
    """Raise unless what a backward rule returned can be the cotangent of an argument's leaf.

    Args:
        where: the function and the key path of the leaf.
        primal: the argument's leaf, or anything with its shape and dtype.
        cotangent: what the rule returned for it.
    """
    if cotangent is None:
        return
    what, fix = "", ""
    if not isinstance(cotangent, torch.Tensor):
        what = f"gets a {type(cotangent).__name__} from the backward rule, not a tensor."
        fix = "return a tensor, or None for zero"
    elif not is_differentiable(primal):
        what = "is not differentiable, and the backward rule returns a cotangent for it."
        fix = "return None in its place"
    elif tuple(cotangent.shape) != tuple(primal.shape):
        what = "gets a cotangent of another shape from the backward rule."
        fix = "sum over the dims that were broadcast, or reshape"
    elif cotangent.dtype != primal.dtype:
        what = "gets a cotangent of another dtype from the backward rule."
        fix = f"return it as .to({primal.dtype})"
    else:
        what, fix = misplaced(variance_of(primal).dual, variance_of(cotangent))
    if not what:
        return
    forms = [f"argument:  {form(primal)}"]
    if isinstance(cotangent, torch.Tensor):
        forms.append(f"cotangent: {form(cotangent)}")
    raise TraceError(message(where, what, *forms, fix=fix))


def form(value: Any) -> str:
    """The dtype and shape of a value, as errors show them."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


@dataclass(frozen=True, eq=False)
class _Call:
    """One application: of the function, or, at `level`, of its rules."""

    rule: CustomRule | DeferredRule
    level: int | None  # None: no reverse derivative acts on it


def closed_over(where: str) -> TraceError:
    """The error for a derivative by a tensor that is no argument."""
    return TraceError(
        message(
            where,
            "closes over a tensor that is being differentiated.",
            "the backward rule has cotangents for arguments only: the gradient would be wrong.",
            fix="pass it as an argument, and return its cotangent (None for zero)",
        )
    )


def apply_rule(
    rule: CustomRule | DeferredRule, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Apply a rule to flat operands under whatever transform is active."""
    operands = [_torch.adopt(x) for x in operands]
    level = _torch.derivative_level(operands)
    if level is not None:
        if isinstance(rule, DeferredRule):
            rule, more = rule.complete()
            operands += [_torch.adopt(x) for x in more]
        constants = operands[len(operands) - sum(rule.num_constants) :]
        if _torch.derivative_level(constants) == level:
            raise closed_over(f"custom_vjp({rule.name}):")
    num_outputs = len(rule.primal.out_metas)
    return tuple(_torch.apply(_CustomVjp, _Call(rule, level), *operands)[:num_outputs])


class _CustomVjp(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rule = call.rule
        if call.level is None or isinstance(rule, DeferredRule):
            return _own(_torch.bind(rule, operands, rule.primal.out_metas), operands)
        return _own(rule.forward(*rule.parts(operands)[1]), operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *operands = inputs
        ctx.level, ctx.num_operands = _torch.current_level(), len(operands)
        ctx.save_for_backward(*operands, *output[len(ctx.call.rule.primal.out_metas) :])
        ctx.save_for_forward(*operands)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[out for out in output if not is_differentiable(out)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        rule, saved = ctx.call.rule, ctx.saved_tensors
        operands, residuals = saved[: ctx.num_operands], saved[ctx.num_operands :]
        result: list[Any] = [None] * len(operands)
        if ctx.level == ctx.call.level:
            outer, cotangents = cotangents[: rule.num_outputs], cotangents[rule.num_outputs :]
            if any(c is not None for c in outer):
                result = rule.pull(operands, residuals, _full(outer, rule.forward, operands))
            # Plain autograd comes again to the level it was at, for the residuals alone.
            cotangents = (None,) * rule.num_outputs + cotangents
        if any(c is not None for c in cotangents):
            given = _full(cotangents, rule.forward, operands)
            given = [c for c in given if is_differentiable(c)]
            read = rule.parts(range(len(operands)))[1]
            inputs = [operands[i] for i in read]
            pulled = iter(vjp_of(rule.forward)(*inputs, *given)[len(cotangents) :])
            for i in read:
                if is_differentiable(operands[i]):
                    more = next(pulled)
                    result[i] = more if result[i] is None else result[i] + more
        return (None, *result)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *operands: Any) -> tuple[Any, Any]:
        dims = [None if dim is None else 0 for dim in in_dims[1:]]
        moved = [
            x if dim is None else x.movedim(dim, 0)
            for x, dim in zip(operands, in_dims[1:], strict=True)
        ]
        rule = call.rule
        if call.level is None or isinstance(rule, DeferredRule):
            outs = apply_rule(rule.batched(dims, moved, info.batch_size), moved)
            return outs, (0,) * len(outs)
        mapped = _mapped(rule.forward, rule.parts(dims)[1], info.batch_size)
        outs = mapped(*rule.parts(moved)[1])
        return _own(outs, moved), (0,) * len(outs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:  # type: ignore[override]
        rule, operands = ctx.call.rule, ctx.saved_tensors[: ctx.num_operands]
        if ctx.call.level is None or ctx.level > ctx.call.level:
            raise TypeError(
                message(
                    f"custom_vjp({rule.name}):",
                    "custom_vjp has no forward-mode rule.",
                    "jvp and jacfwd push tangents, the backward rule pulls cotangents.",
                    fix="use vjp, grad or jacrev; jacfwd(jacrev(f)) for a Hessian",
                )
            )
        read = rule.parts(tangents)[1]
        moving = [i for i, t in enumerate(read) if t is not None]
        pushed = [zeros_of(m, operands) for m in rule.forward.out_metas if is_differentiable(m)]
        if moving:  # otherwise it is the backward rule that reads what moves
            with _torch.inside_jvp(rule.parts(operands)[1]) as primals:
                pushed = jvp_of(rule.forward, moving)(*primals, *(read[i] for i in moving))
        tangent = iter(pushed)
        metas = rule.forward.out_metas
        return tuple(next(tangent) if is_differentiable(meta) else None for meta in metas)


def _own(outs: Tensors, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Results as tensors of their own, not operands or one another."""
    taken = list(operands)
    for out in outs:
        taken += owned([out], taken)
    return tuple(taken[len(operands) :])


def _full(cotangents: Sequence[Any], body: Body, operands: Tensors) -> list[torch.Tensor]:
    """Zeros in the place of the cotangents that are None."""
    return [
        zeros_of(cotangent_meta(meta), operands) if c is None else c
        for c, meta in zip(cotangents, body.out_metas, strict=False)
    ]


def _mapped(
    body: Body, dims: Sequence[int | None], batch_size: int
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A body over a leading dim of the operands that have one and of all results."""
    if any(dim is not None for dim in dims):
        return torch.func.vmap(lambda *args: tuple(body(*args)), tuple(dims))  # type: ignore[arg-type]
    return lambda *args: tuple(out.expand(batch_size, *out.shape) for out in body(*args))


def _batched(body: Body, dims: Sequence[int | None], metas: Sequence[Any], size: int) -> Body:
    """The graph of a body over a leading dim."""
    mapped = _mapped(body, dims, size)
    return trace_body(lambda *args: list(mapped(*args)), metas)[0]
