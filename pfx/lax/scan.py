"""`scan`: a loop that stays one node in the graph, with a backward loop that is again a scan.

The body is traced once, whatever the length. Its vjp is cut into a forward and a backward body
(`pfx.lax.body`): the forward loop stacks the residuals, the backward loop walks them in reverse and
accumulates the cotangents of the closed-over tensors in its carry. The input carries are emitted as
residuals too, and cotangents that arrive for residuals (second derivatives) are part of the next
backward body, so ``grad(grad(scan))`` is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch, tree
from pfx._torch import TensorMeta
from pfx.errors import TraceError, message
from pfx.lax.body import Body, is_differentiable, joint, trace_body


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
        carries = [TensorMeta.of(x) for x in operands[: self.num_carry]]
        ys = self.body.out_metas[self.num_carry :]
        return carries + [replace(y, shape=(self.length, *y.shape), stride=None) for y in ys]

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
    """Forward runs the loop; backward and vmap are again loops, so every order composes."""

    @staticmethod
    def forward(loop: Loop, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = _torch.bind(loop, operands, loop.out_metas(operands))
        return tuple(out.clone() if any(out is x for x in operands) else out for out in outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loop, *operands = inputs
        ctx.loop = loop
        ctx.num_operands = len(operands)
        residuals = output[len(output) - loop.num_residuals :] if loop.num_residuals else ()
        ctx.save_for_backward(*operands, *residuals)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[out for out in output if not is_differentiable(out)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        operands, residuals = saved[: ctx.num_operands], saved[ctx.num_operands :]
        return (None, *_pull(ctx.loop, operands, residuals, cotangents))

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: Loop, *operands: Any) -> tuple[Any, Any]:
        return _batched(loop, info.batch_size, in_dims[1:], operands)


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


def _pull(
    loop: Loop,
    operands: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Cotangents of the operands, by a loop in the other direction."""
    c, x = loop.num_carry, loop.num_xs
    xs, consts = list(operands[c : c + x]), list(operands[c + x :])
    carries_in, saved = list(residuals[len(residuals) - c :]), list(residuals[: -c or None])
    visible = len(loop.body.out_metas) - loop.num_residuals
    if any(cotangent is not None for cotangent in cotangents[visible:]):
        # A second derivative: the residuals are outputs too, of the body that emits them.
        backward, saved = _recomputing(loop.body), []
    else:
        cotangents = cotangents[:visible]
        backward = loop.backward
        if backward is None:
            assert loop.primal is not None
            backward = _recomputing(loop.primal)
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

    d_carry = [_or_zeros(cotangents[i], operands[i]) for i in float_carry]
    d_consts = [torch.zeros_like(operands[i]) for i in float_consts]
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
    traced, _ = trace_body(body, _slice_metas(flat, n_carry + n_consts, len(stacked)))
    # The mirror is differentiated only for a second derivative, so nothing is saved for one.
    mirror = Loop(traced, n_carry + n_consts, len(stacked), loop.length, not loop.reverse, "full")
    outs = scan_flat(mirror, flat)
    result: list[torch.Tensor | None] = [None] * len(operands)
    for i, out in zip([*float_carry, *float_consts, *float_xs], outs, strict=True):
        result[i] = out
    return result


def _or_zeros(cotangent: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if cotangent is None else cotangent


def _or_zeros_stacked(
    cotangent: torch.Tensor | None, meta: TensorMeta, loop: Loop, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    if cotangent is not None:
        return cotangent
    shape = (loop.length, *meta.shape)
    return torch.zeros(shape, dtype=meta.dtype, device=operands[0].device)


def _slice_metas(flat: Sequence[Any], num_carry: int, num_xs: int) -> list[TensorMeta]:
    metas = [TensorMeta.of(value) for value in flat]
    for i in range(num_carry, num_carry + num_xs):
        metas[i] = replace(metas[i], shape=metas[i].shape[1:], stride=None)
    return [replace(meta, stride=None) for meta in metas]


def _batched(
    loop: Loop, batch_size: int, in_dims: Sequence[int | None], operands: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The vmap rule: a scan of the vmapped body, with every carry batched at dim 0."""
    c, x = loop.num_carry, loop.num_xs
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
    mapped = torch.func.vmap(lambda *a: tuple(loop.body(*a)), tuple(body_dims))  # type: ignore[arg-type]
    body, _ = trace_body(lambda *args: list(mapped(*args)), _slice_metas(moved, c, x))
    plain = replace(loop, body=body, backward=None, num_residuals=0)
    outs = scan_flat(plain, moved)
    return outs, (0,) * c + (1,) * (len(outs) - c)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    reverse: bool = False,
    remat: str | None = None,
    length: int | None = None,
) -> tuple[Any, Any]:
    """Loop ``carry, y = body(carry, x)`` over the leading dim of `xs`; jax.lax.scan's meaning.

    Args:
        body: a pure function of (carry, x) that returns (carry, y); it may close over tensors, and
            gradients reach them. Traced once, whatever the length.
        carry: pytree of tensors; every iteration must return the same shapes and dtypes.
        xs: pytree of tensors with the same leading dim n, or None with `length`.
        reverse: run from the last slice to the first; ys keep the order of xs.
        remat: None saves what the backward loop needs; "full" saves only the carry of each
            iteration and recomputes the rest (Chen et al. 2016, arXiv:1604.06174).
        length: the number of iterations; needed only when xs has no leaf.

    Returns:
        The last carry and the ys stacked on a new leading dim.

    Raises:
        TraceError: when xs disagree on their length or the carry changes its form.

    >>> scan(lambda total, x: (total + x, total * x), torch.tensor(0.), torch.arange(4.))
    (tensor(6.), tensor([0., 0., 2., 9.]))
    """
    if remat not in (None, "full"):
        raise ValueError(message("scan:", f"remat={remat!r} is unknown.", fix='use "full" or None'))
    carry_leaves, carry_def = tree.flatten(carry)
    x_leaves, x_def = tree.flatten(xs)
    carry_leaves = [torch.as_tensor(leaf) for leaf in carry_leaves]
    steps = _length(x_leaves, length)
    out_def: list[tree.TreeDef] = []
    c, x = len(carry_leaves), len(x_leaves)

    def flat_body(*args: torch.Tensor) -> list[torch.Tensor]:
        now = tree.unflatten(carry_def, args[:c]), tree.unflatten(x_def, args[c : c + x])
        result = body(*now)
        _check_pair(result)
        new_carry, y = result
        y_leaves, y_def = tree.flatten(y)
        _check_carry(carry, new_carry)
        out_def[:] = [y_def]
        return [*tree.leaves(new_carry), *(torch.as_tensor(leaf) for leaf in y_leaves)]

    flat = [*carry_leaves, *x_leaves]
    traced, captured = trace_body(flat_body, _slice_metas(flat, c, x))
    loop = Loop(traced, c, x, steps, reverse, remat)
    outs = scan_flat(loop, [*flat, *captured])
    return tree.unflatten(carry_def, outs[:c]), tree.unflatten(out_def[0], outs[c:])


def _length(xs: Sequence[torch.Tensor], length: int | None) -> int:
    if any(x.ndim == 0 for x in xs):
        raise TraceError(message("scan:", "every leaf of xs needs a leading dim to loop over."))
    sizes = {x.shape[0] for x in xs} | ({length} if length is not None else set())
    if len(sizes) != 1:
        raise TraceError(
            message(
                "scan:",
                f"xs and length must agree on one length, got {sorted(sizes)}.",
                fix="pass length=n when xs has no leaf",
            )
        )
    (size,) = sizes
    if size == 0:
        raise TraceError(message("scan:", "a scan of length 0 has no iteration to trace."))
    return size


def _check_pair(result: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = "tensor" if isinstance(result, torch.Tensor) else type(result).__name__
        what = f"must return (carry, y), got a {kind}."
        raise TraceError(message("scan: body", what, fix="return carry, None"))


def _check_carry(old: Any, new: Any) -> None:
    pairs, treedef = tree.flatten_with_path(old)
    try:
        others = tree.match(treedef, new, [path for path, _ in pairs])
    except ValueError as error:
        raise TraceError(message("scan: the carry", "changes its structure.", str(error))) from None
    for (path, before), after in zip(pairs, others, strict=True):
        before = torch.as_tensor(before)
        if not isinstance(after, torch.Tensor):
            raise TraceError(message(f"scan: carry{tree.path_string(path)}", "is not a tensor."))
        if before.shape != after.shape or before.dtype != after.dtype:
            raise TraceError(
                message(
                    f"scan: carry{tree.path_string(path)}",
                    "changes its form from one iteration to the next.",
                    f"in:  {before.dtype} {tuple(before.shape)}",
                    f"out: {after.dtype} {tuple(after.shape)}",
                    fix="cast or reshape it in the body so that both agree",
                )
            )
