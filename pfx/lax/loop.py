"""The loop primitive: one node in a graph, whose every derivative is again a loop.

A body is traced once, whatever the length. For reverse mode its vjp is cut into a forward and a
backward body (`pfx.lax.body`): the forward loop stacks the residuals, the backward loop walks them
in reverse and accumulates the cotangents of the closed-over tensors in its carry. The input carries
are emitted as residuals too, and cotangents that arrive for residuals (second derivatives) are part
of the next backward body, so ``grad(grad(scan))`` is right. For forward mode a second loop carries
the tangents past the same input carries, those of the residuals included, so forward over reverse
is right as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch
from pfx.lax.body import (
    Body,
    cotangent_meta,
    is_differentiable,
    joint,
    jvp_of,
    meta_of,
    owned,
    trace_body,
)
from pfx.lax.manual.variance import joined
from pfx.lax.manual.zeros import zero_cotangent, zeros_of
from pfx.lax.vmap import spmd_axis, vmap
from pfx.meta import TensorMeta


@dataclass(frozen=True, eq=False)
class Loop:
    """The scan primitive: operands are carries, then xs, then consts; outputs carries, then ys.

    Called on plain tensors it is a Python loop over slices. When a derivative is taken, the last
    `num_residuals` outputs are what the `backward` body reads next to the operands; without one, the
    backward loop recomputes `primal`, the body as it was.
    """

    __name__ = "scan"

    body: Body
    num_carry: int
    num_xs: int
    length: int
    reverse: bool
    remat: str | None = None
    backward: Body | None = None
    primal: Body | None = None
    num_residuals: int = 0

    @property
    def num_ys(self) -> int:
        """How many stacked outputs the loop has, residuals included."""
        return len(self.body.out_metas) - self.num_carry

    def out_metas(self, operands: Sequence[torch.Tensor]) -> list[TensorMeta]:
        """The form of every output: carries as they came in, ys stacked on a new dim 0."""
        # Not their strides: an expanded carry overlaps itself in memory, what comes out does not.
        carries = [replace(TensorMeta.of(x), stride=None) for x in operands[: self.num_carry]]
        ys = self.body.out_metas[self.num_carry :]
        return carries + [replace(y, shape=(self.length, *y.shape), stride=None) for y in ys]

    def result_variances(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """What each output is along the axes of a manual region."""
        return tuple(meta.variance for meta in self.body.out_metas)

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # In a graph that is run or traced again, every output is an ordinary one.
        return scan_flat(replace(self, backward=None, primal=None, num_residuals=0), operands)

    def compute(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A Python loop over slices."""
        carry = list(operands[: self.num_carry])
        xs = operands[self.num_carry : self.num_carry + self.num_xs]
        consts = operands[self.num_carry + self.num_xs :]
        rows: list[Any] = [None] * self.length
        for i in reversed(range(self.length)) if self.reverse else range(self.length):
            outs = self.body(*carry, *(x[i] for x in xs), *consts)
            carry, rows[i] = list(outs[: self.num_carry]), outs[self.num_carry :]
        return (*carry, *(torch.stack(column) for column in zip(*rows, strict=True)))


class _Scan(torch.autograd.Function):
    """Forward runs the loop; backward, jvp and vmap are again loops, so every order composes."""

    @staticmethod
    def forward(loop: Loop, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return owned(_torch.bind(loop, operands, loop.out_metas(operands)), operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loop, *operands = inputs
        ctx.loop = loop
        ctx.num_operands = len(operands)
        residuals = output[len(output) - loop.num_residuals :] if loop.num_residuals else ()
        ctx.save_for_backward(*operands, *residuals)
        ctx.save_for_forward(*operands, *residuals)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[out for out in output if not is_differentiable(out)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        operands, residuals = saved[: ctx.num_operands], saved[ctx.num_operands :]
        return (None, *_pull(ctx.loop, operands, residuals, cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        operands, residuals = saved[: ctx.num_operands], saved[ctx.num_operands :]
        return tuple(_push(ctx.loop, operands, residuals, tangents))

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: Loop, *operands: Any) -> tuple[Any, Any]:
        return _batched(loop, in_dims[1:], operands)


def scan_flat(loop: Loop, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a flat scan under whatever transform is active; returns carries and ys."""
    operands = [_torch.adopt(x) for x in operands]
    num_out = loop.num_carry + loop.num_ys
    if _torch.differentiated_here(operands):
        loop = _linearized(loop)
    return tuple(_torch.apply(_Scan, loop, *operands)[:num_out])


def _linearized(loop: Loop) -> Loop:
    """Make the forward body emit what a backward loop needs, its input carries last."""
    body, backward, saved = loop.body, None, 0
    if loop.remat != "full":
        split = body.split
        body, backward, saved = split.forward, split.backward, split.num_residuals
    body = _emit_inputs(body, range(loop.num_carry))
    return replace(
        loop,
        body=body,
        backward=backward,
        primal=loop.body,
        num_residuals=saved + loop.num_carry,
    )


@functools.lru_cache(maxsize=256)
def _recomputing(body: Body) -> Body:
    """The backward body that recomputes the forward part from the inputs alone."""
    whole, num_out = joint(body), len(body.out_metas)
    return trace_body(lambda *args: whole(*args)[num_out:], whole.in_metas)[0]


def _emit_inputs(body: Body, which: Sequence[int]) -> Body:
    return trace_body(lambda *args: [*body(*args), *(args[i] for i in which)], body.in_metas)[0]


def _carries_in(
    loop: Loop, operands: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Stack what every iteration started from: the last residuals, or the loop run again.

    It has to run again where another transform was innermost when the loop was called, which saw
    none of its operands.
    """
    if residuals or not loop.num_carry:
        return list(residuals[len(residuals) - loop.num_carry :])
    emitting = replace(loop, body=_emit_inputs(loop.body, range(loop.num_carry)))
    return list(scan_flat(emitting, operands)[-loop.num_carry :])


def _pull(
    loop: Loop,
    operands: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Cotangents of the operands, by a loop in the other direction."""
    c, x = loop.num_carry, loop.num_xs
    xs, consts = list(operands[c : c + x]), list(operands[c + x :])
    carries_in, saved = _carries_in(loop, operands, residuals), list(residuals[: -c or None])
    visible = len(loop.body.out_metas) - loop.num_residuals
    if any(cotangent is not None for cotangent in cotangents[visible:]):
        # A second derivative: the residuals are outputs too, of the body that emits them.
        backward, saved = _recomputing(loop.body), []
    else:
        cotangents = cotangents[:visible]
        backward = loop.backward
        if backward is None:
            backward = _recomputing(loop.primal or loop.body)
    return _backward_loop(loop, backward, carries_in, xs, saved, consts, operands, cotangents)


def _backward_loop(
    loop: Loop,
    backward: Body,
    carries_in: list[torch.Tensor],
    xs: list[torch.Tensor],
    saved: list[torch.Tensor],
    consts: list[torch.Tensor],
    operands: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Assemble the reversed scan around `backward` and scatter its results to the operands.

    Its carry holds the cotangents of the float carries and the sums for the float consts; its xs
    are the input carries, the xs, the residuals and the cotangents of the ys.
    """
    c, x = loop.num_carry, loop.num_xs
    float_carry = [i for i in range(c) if is_differentiable(operands[i])]
    float_xs = [i for i in range(c, c + x) if is_differentiable(operands[i])]
    float_consts = [i for i in range(c + x, len(operands)) if is_differentiable(operands[i])]
    out_metas = loop.body.out_metas[: len(cotangents)]
    float_ys = [j for j in range(c, len(out_metas)) if is_differentiable(out_metas[j])]

    given = {i: cotangents[i] for i in float_carry}
    d_carry = [zero_cotangent(operands[i]) if c is None else c for i, c in given.items()]
    d_consts = [zero_cotangent(operands[i]) for i in float_consts]
    d_ys = [_or_zeros_stacked(cotangents[j], out_metas[j], loop, operands) for j in float_ys]
    n_carry, n_consts, n_saved = len(d_carry), len(d_consts), len(saved)

    def body(*args: torch.Tensor) -> list[torch.Tensor]:
        it = iter(args)

        def take(n: int) -> list[torch.Tensor]:
            return [next(it) for _ in range(n)]

        d_c, sums = take(n_carry), take(n_consts)
        carry, x_now, kept, d_y = take(c), take(x), take(n_saved), take(len(float_ys))
        pulled = iter(backward(*carry, *x_now, *take(len(consts)), *kept, *d_c, *d_y))
        new_c = [next(pulled) for _ in float_carry]
        new_x = [next(pulled) for _ in float_xs]
        return [*new_c, *(s + next(pulled) for s in sums), *new_x]

    stacked = [*carries_in, *xs, *saved, *d_ys]
    flat = [*d_carry, *d_consts, *stacked, *consts]
    traced = _settled(body, slice_metas(flat, n_carry + n_consts, len(stacked)), n_carry + n_consts)
    # The mirror is differentiated only for a second derivative, so nothing is saved for one.
    mirror = Loop(traced, n_carry + n_consts, len(stacked), loop.length, not loop.reverse, "full")
    outs = scan_flat(mirror, flat)
    result: list[torch.Tensor | None] = [None] * len(operands)
    for i, out in zip([*float_carry, *float_consts, *float_xs], outs, strict=True):
        result[i] = out
    return result


def _push(
    loop: Loop,
    operands: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Tangents of the outputs, by a loop that carries the tangents of the float carries.

    The carries themselves are read rather than carried: a batch of tangents (`jacfwd`) then does
    not make a batch of them. A tangent that is missing is zero.
    """
    c, x, out_metas = loop.num_carry, loop.num_xs, loop.body.out_metas
    moving = [
        i
        for i, operand in enumerate(operands)
        if is_differentiable(operand) and (i < c or tangents[i] is not None)
    ]
    moved = [_or_zeros(tangents[i], operands[i]) for i in moving]
    n_carry, n_xs = sum(i < c for i in moving), sum(c <= i < c + x for i in moving)
    d_carry, d_xs, d_consts = moved[:n_carry], moved[n_carry:][:n_xs], moved[n_carry + n_xs :]

    push = jvp_of(loop.body, moving)
    stacked = [*_carries_in(loop, operands, residuals), *operands[c : c + x], *d_xs]
    flat = [*d_carry, *stacked, *operands[c + x :], *d_consts]

    def body(*args: torch.Tensor) -> list[torch.Tensor]:
        d_c, now, d_x = args[:n_carry], args[n_carry:][: c + x], args[n_carry + c + x :][:n_xs]
        closed = args[n_carry + len(stacked) :]
        split = len(closed) - len(d_consts)
        return push(*now, *closed[:split], *d_c, *d_x, *closed[split:])

    traced = _settled(body, slice_metas(flat, n_carry, len(stacked)), n_carry)
    outs = scan_flat(Loop(traced, n_carry, len(stacked), loop.length, loop.reverse, "full"), flat)
    pushed = iter(outs)
    return [next(pushed) if is_differentiable(meta) else None for meta in out_metas]


def _settled(
    fn: Callable[..., Sequence[torch.Tensor]], metas: Sequence[TensorMeta], num_carry: int
) -> Body:
    """Trace the body of a loop whose carry comes to vary along the axes that its results vary along.

    Zeros, and a cotangent or tangent from elsewhere, may begin as the same on all devices.
    """
    body, _ = trace_body(fn, metas)
    while [m.variance for m in body.out_metas[:num_carry]] != [
        m.variance for m in metas[:num_carry]
    ]:
        wider = [
            replace(meta, variance=joined(meta.variance, out.variance))
            for meta, out in zip(metas, body.out_metas[:num_carry], strict=False)
        ]
        if wider == list(metas[:num_carry]):
            break
        metas = [*wider, *metas[num_carry:]]
        body, _ = trace_body(fn, metas)
    return body


def _or_zeros(tangent: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if tangent is None else tangent


def _or_zeros_stacked(
    cotangent: torch.Tensor | None, meta: TensorMeta, loop: Loop, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    if cotangent is not None:
        return cotangent
    shape = (loop.length, *meta.shape)
    return zeros_of(replace(cotangent_meta(meta), shape=shape), operands)


def slice_metas(flat: Sequence[Any], num_carry: int, num_xs: int) -> list[TensorMeta]:
    """What a body sees of the operands of its loop: one slice of every xs."""
    metas = [meta_of(value) for value in flat]
    for i in range(num_carry, num_carry + num_xs):
        metas[i] = replace(metas[i], shape=metas[i].shape[1:], stride=None)
    return [replace(meta, stride=None) for meta in metas]


def _batched(
    loop: Loop, in_dims: Sequence[int | None], operands: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The vmap rule: a scan of the vmapped body, with every carry batched at dim 0."""
    c, x = loop.num_carry, loop.num_xs
    # Not the size that vmap knows: inside a region its dim may be split over a mesh axis.
    batch_size = next(v.shape[d] for v, d in zip(operands, in_dims, strict=True) if d is not None)
    moved: list[torch.Tensor] = []
    body_dims: list[int | None] = []
    for i, (value, dim) in enumerate(zip(operands, in_dims, strict=True)):
        is_xs = c <= i < c + x
        if i < c and dim is None:
            value, dim = value.expand(batch_size, *value.shape), 0
        if dim is not None:
            value = value.movedim(dim, 1 if is_xs else 0)
        moved.append(value)
        body_dims.append(None if dim is None else 0)
    over = spmd_axis()
    mapped = vmap(lambda *a: tuple(loop.body(*a)), tuple(body_dims), spmd_axis_name=over)
    body, _ = trace_body(lambda *args: list(mapped(*args)), slice_metas(moved, c, x))
    plain = replace(loop, body=body, backward=None, num_residuals=0)
    outs = scan_flat(plain, moved)
    return outs, (0,) * c + (1,) * (len(outs) - c)
