"""The layouts of a loop: what goes into an iteration as its carry must come out of it the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.fx

from pfx.compiler.manual import axes_of, without
from pfx.compiler.wishes import Wish, common
from pfx.lax.scan import Loop
from pfx.spec import Layout, replicated

_GUESSES = 5  # of a carry, before it is kept whole


class Solved(Protocol):
    """What is read of the solution for a body."""

    outputs: tuple[Layout, ...]


# From a graph, the layouts of its inputs, wishes and exact layouts for its outputs, to a solution.
Solve = Callable[[torch.fx.Graph, Sequence[Layout], Sequence[Wish], Sequence[Layout | None]], Any]


def settle_loop(
    loop: Loop, have: Sequence[Layout], wishes: Sequence[Wish], solve: Solve
) -> tuple[tuple[Layout, ...], tuple[Layout, ...], Any]:
    """Find carries whose layouts the body keeps, then decide the body with them.

    Args:
        have: the layouts of the loop's operands.
        wishes: for its results.
        solve: decides the body.

    Returns:
        The layouts that the operands are brought to, those of the results, and the body's solution.
    """
    graph, c, x = loop.body.module.graph, loop.num_carry, loop.num_xs
    # What varies over a region's axes is not split over them by the compiler too.
    taken = [axes_of(meta) for meta in loop.body.in_metas]
    have = [without(layout, axes) for layout, axes in zip(have, taken, strict=True)]
    xs, consts = [layout.sliced() for layout in have[c : c + x]], have[c + x :]
    carry_wishes, y_wishes = wishes[:c], [None if w is None else w[1:] for w in wishes[c:]]
    open_carry, open_ys = [None] * c, [None] * len(y_wishes)

    carries = list(have[:c])
    for attempt in range(_GUESSES):
        wished = [w if k.free else k.dims for k, w in zip(carries, carry_wishes, strict=True)]
        body: Solved = solve(
            graph, [*carries, *xs, *consts], [*wished, *y_wishes], [*open_carry, *open_ys]
        )
        made = [without(out, axes) for out, axes in zip(body.outputs, taken[:c], strict=False)]
        new = [_next_guess(old, out, attempt) for old, out in zip(carries, made, strict=True)]
        if new == carries:
            break
        carries = new
    else:
        carries = [k.whole() for k in carries]
    carries = [_materialized(k) for k in carries]

    inputs, wished = [*carries, *xs, *consts], [*open_carry, *y_wishes]
    body = solve(graph, inputs, wished, [*carries, *open_ys])
    ys = list(body.outputs[c:])
    own = [axes_of(meta) for meta in loop.body.out_metas[c:]]
    kept = [without(y, axes) for y, axes in zip(ys, own, strict=True)]
    if kept != ys:
        body = solve(graph, inputs, wished, [*carries, *kept])
    results = (*carries, *(_materialized(y).stacked() for y in body.outputs[c:]))
    return (*carries, *(k.stacked() for k in xs), *consts), results, body


def _materialized(layout: Layout) -> Layout:
    """A value that goes into or out of a body is made, so it is no longer free."""
    return replicated(len(layout.dims)) if layout.free else layout


def _next_guess(old: Layout, out: Layout, attempt: int) -> Layout:
    """The next guess for a carry: zeros take what the body makes, others follow it once."""
    if out.free:
        return old
    if old.free:
        return out if old.zero else out.whole()
    if old == out:
        return old
    if old.partial and set(old.partial) == set(out.partial) and attempt < 2:
        return out
    if attempt < 2:
        return out.whole()
    return Layout(tuple(common(a, b) for a, b in zip(old.dims, out.dims, strict=True)))
