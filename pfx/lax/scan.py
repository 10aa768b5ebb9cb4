"""`scan`: the loop as users write it, over pytrees and closed-over tensors; the checks live here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx import tree
from pfx.errors import TraceError, message
from pfx.lax.body import trace_body
from pfx.lax.loop import Loop, scan_flat, slice_metas
from pfx.lax.manual.local import variance_of
from pfx.lax.remat_loops import remat_loops, remat_of_loops


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
        remat: "none" saves what the backward loop needs; "full" saves only the carry of each
            iteration and recomputes the rest (Chen et al. 2016, arXiv:1604.06174). None: as the plan
            of the training step says, "none" elsewhere and in the body of another scan.
        length: the number of iterations; needed only when xs has no leaf.

    Returns:
        The last carry and the ys stacked on a new leading dim.

    Raises:
        TraceError: when xs disagree on their length or the carry changes its form.

    >>> scan(lambda total, x: (total + x, total * x), torch.tensor(0.), torch.arange(4.))
    (tensor(6.), tensor([0., 0., 2., 9.]))
    """
    if remat not in (None, "none", "full"):
        what, fix = f"remat={remat!r} is unknown.", 'use "full", "none" or None'
        raise ValueError(message("scan:", what, fix=fix))
    remat = remat_of_loops() if remat is None else remat
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
    with remat_loops(None):
        traced, captured = trace_body(flat_body, slice_metas(flat, c, x))
    loop = Loop(traced, c, x, steps, reverse, "full" if remat == "full" else None)
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
        _check_variance(f"scan: carry{tree.path_string(path)}", before, after)
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


def _check_variance(where: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """In a manual region, a carry must stay what it is along each axis."""
    old, new = variance_of(before), variance_of(after)
    if old == new:
        return
    axes = sorted(a for a in old.all_axes | new.all_axes if old.state(a) != new.state(a))
    axis, to = axes[0], new.state(axes[0])
    fix = f"carry = pfx.lax.pcast(carry, {axis!r}, to={to!r}) before the scan"
    if to == "invarying":
        fix = f"return pfx.lax.pcast(carry, {axis!r}, to={old.state(axis)!r}) from the body"
    raise TraceError(
        message(
            where,
            f"is {old.state(axis)} over {axis!r} at first, and {to} after an iteration.",
            f"in:  {old}",
            f"out: {new}",
            fix=fix,
        )
    )
