"""The layouts of a pipeline: inside a stage its axis splits nothing, outside it splits stacks and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pfx.compiler.manual import without
from pfx.compiler.pipeline.primitive import EACH, Output, Pipeline
from pfx.compiler.wishes import Wish
from pfx.mesh import Mesh
from pfx.spec import Layout, replicated

# From the layouts of a body's inputs and the wishes for its outputs, to a solution.
Solve = Callable[[Sequence[Layout], Sequence[Wish]], Any]


def settle_pipeline(
    made: Pipeline, have: Sequence[Layout], wishes: Sequence[Wish], mesh: Mesh, solve: Solve
) -> tuple[tuple[Layout, ...], tuple[Layout, ...], Any]:
    """Decide the body of a pipeline from the layouts of its operands and the wishes for its results.

    Returns:
        The layouts that the operands are brought to, those of the results, and the body's solution.
    """
    axis, num_xs = (made.axis,), made.num_xs
    own = [without(layout.whole(), axis) for layout in have]
    xs = [layout.sliced() for layout in own[:num_xs]]
    rows = [_whole_rows(k) if s else k for k, s in zip(own[num_xs:], made.stacks, strict=True)]
    inner = [_inner_wish(w, o, axis) for w, o in zip(wishes, made.outputs, strict=True)]
    body = solve([*xs, *rows], inner)
    stacks = [_split_rows(k, axis) if s else k for k, s in zip(rows, made.stacks, strict=True)]
    results = tuple(
        outside(k, o, made.axis, mesh) for k, o in zip(body.outputs, made.outputs, strict=True)
    )
    return (*(k.stacked() for k in xs), *stacks), results, body


def outside(layout: Layout, output: Output, axis: str, mesh: Mesh) -> Layout:
    """The layout of an output once it has left the stages: split over them, or owed by all but one."""
    layout = replicated(len(layout.dims)) if layout.free else layout
    if output.home == EACH:
        return _split_rows(layout, (axis,))
    layout = layout if output.summed else layout.stacked()
    return replace(layout, partial=mesh.ordered((*layout.partial, axis)))


def outer_wishes(made: Pipeline, inner: Sequence[Wish]) -> list[Wish]:
    """Where a pipeline would like its operands, given where its body would."""
    wishes: list[Wish] = [None if w is None else (None, *w) for w in inner[: made.num_xs]]
    for wish, stack in zip(inner[made.num_xs :], made.stacks, strict=True):
        wishes.append(((made.axis,), *wish[1:]) if wish is not None and stack else wish)
    return wishes


def _inner_wish(wish: Wish, output: Output, axis: tuple[str, ...]) -> Wish:
    if wish is None:
        return None
    kept = tuple(axes and tuple(a for a in axes if a not in axis) for axes in wish)
    if output.home == EACH:
        return ((), *kept[1:])
    return kept if output.summed else kept[1:]


def _whole_rows(layout: Layout) -> Layout:
    return replace(layout, dims=((), *layout.dims[1:]))


def _split_rows(layout: Layout, axis: tuple[str, ...]) -> Layout:
    return replace(layout, dims=(axis, *layout.dims[1:]))
