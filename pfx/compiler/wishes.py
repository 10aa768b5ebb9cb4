"""Wishes: where the readers of a value would like it to be.

A wish has an opinion per dim: axes, ``()`` for whole, or None where any split will do, as for the
operand of a square that is then summed. None instead of a wish is no opinion at all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from pfx.compiler.rule import Assignment, Dims, Rule
from pfx.spec import Axes, Layout

Wish = tuple[Axes | None, ...] | None


def agreed(asked: Sequence[Wish]) -> Wish:
    """The common part of several wishes, dim by dim, among those with an opinion."""
    opinions = [wish for wish in asked if wish is not None]
    if not opinions:
        return None
    dims = []
    for entries in zip(*opinions, strict=True):
        known = [axes for axes in entries if axes is not None]
        shared = functools.reduce(common, known) if known else None
        taken = {axis for axes in dims if axes for axis in axes}
        dims.append(None if shared and taken & set(shared) else shared)  # an axis splits one dim
    return tuple(dims)


def common(a: Axes, b: Axes) -> Axes:
    """The longest common prefix: axes split a dim row-major, so a prefix is a coarser split."""
    if not a or not b or a == b:
        return a and b
    return tuple(
        x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


def open_factors(rule: Rule, wishes: Sequence[Wish]) -> set[str]:
    """Factors a node would take split over anything: nobody downstream wants them whole.

    Those of results without an opinion, and those that a reduction of one operand sums over.
    """
    seen = {f for dims in rule.results for dim in dims for f in dim}
    found = set(rule.sizes) - seen if len(rule.operands) == 1 else set()
    for dims, wish in zip(rule.results, wishes, strict=True):
        for i, dim in enumerate(dims):
            if wish is None or wish[i] is None:
                found |= set(dim)
    return found - rule.whole


def opinion(
    rule: Rule, dims: Dims, assignment: Assignment, open_factors: set[str], now: Layout
) -> tuple[Axes | None, ...]:
    """What an assignment says of each dim: its axes, whole, or nothing.

    Of an open dim it says nothing unless it would be elsewhere than now: beside another operand.
    """
    layout = rule.layout(dims, assignment)
    return tuple(
        None if dim and set(dim) <= open_factors and axes in ((), here) else axes
        for dim, axes, here in zip(dims, layout.dims, now.dims, strict=True)
    )


def filled(wish: Wish, natural: Layout) -> Layout:
    """A wish as a whole layout: where it has no opinion, the value stays as it is."""
    if wish is None:
        return natural.whole()
    wanted = {axis for axes in wish if axes for axis in axes}
    return Layout(
        tuple(
            want if want is not None else () if wanted & set(have) else have
            for have, want in zip(natural.dims, wish, strict=True)
        )
    )


def reduced(natural: Layout, wish: Wish) -> Layout:
    """What becomes of a partial sum when it must be reduced: scattered where the wish is split."""
    if wish is None or natural.reduce != "sum":
        return natural.whole()
    dims = tuple(
        want
        if want and want[: len(have)] == have and set(want[len(have) :]) <= set(natural.partial)
        else have
        for have, want in zip(natural.dims, wish, strict=True)
    )
    return Layout(dims)
