"""The law of resharding: moved from any layout to any other, a value is the same global value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
from pfx.compiler.ir import Reshard, Value
from pfx.compiler.program import Program
from pfx.compiler.reshard import Move, move_bytes, plan_moves, reshard_bytes
from pfx.lax.manual.transport import combine
from pfx.runtime import runtime_of
from pfx.spec import Layout, distinct_coordinates, local_slices

AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Example:
    """A mesh, a shape that every axis may split, and two layouts of it."""

    sizes: Mapping[str, int]
    shape: tuple[int, ...]
    source: Layout
    target: Layout

    @property
    def mesh(self) -> pfx.Mesh:
        return pfx.make_mesh(kind="simulated", **self.sizes)


@st.composite
def layouts(draw: st.DrawFn, axes: tuple[str, ...], ndim: int, *, partial: bool) -> Layout:
    """Every axis on some dim (several on one dim in any order), owed, or unused."""
    places: list[list[str]] = [[] for _ in range(ndim)]
    owed: list[str] = []
    for axis in draw(st.permutations(axes)):
        where = draw(st.integers(-2 if partial else -1, ndim - 1))
        if where >= 0:
            places[where].append(axis)
        elif where == -2:
            owed.append(axis)
    reduce = draw(st.sampled_from(["sum", "sum", "max", "min"])) if owed else "sum"
    ordered = tuple(axis for axis in axes if axis in owed)
    return Layout(tuple(map(tuple, places)), ordered, reduce)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    axes = AXES[: draw(st.integers(1, 3))]
    sizes = {axis: draw(st.integers(1, 3)) for axis in axes}
    ndim = draw(st.integers(0, 3))
    shape = tuple(math.prod(sizes.values()) * draw(st.integers(1, 2)) for _ in range(ndim))
    source = draw(layouts(axes, ndim, partial=True))
    target = draw(layouts(axes, ndim, partial=False))
    if source.reduce == "sum" and draw(st.booleans()):
        target = replace(draw(layouts(axes, ndim, partial=True)), reduce="sum")
    return Example(sizes, shape, source, target)


@given(examples(), st.integers(0, 2**16))
def test_the_global_value_is_kept(example: Example, seed: int) -> None:
    random_ = torch.Generator().manual_seed(seed)
    value = torch.randint(-99, 99, example.shape, generator=random_).double()  # sums are exact
    for check in (False, True):
        program = moving(example)
        run = runtime_of(example.mesh).prepare(program, check=check, deterministic=False)
        (parts,) = run([shards(value, example.source, example.mesh, random_)])
        places = list(distinct_coordinates(example.target, example.mesh))
        sums: dict[str, list[torch.Tensor]] = {}
        for place, part in zip(places, parts, strict=True):
            kept = {axis: i for axis, i in place.items() if axis not in example.target.partial}
            sums.setdefault(str(kept), []).append(part)
        for place in places:
            kept = {axis: i for axis, i in place.items() if axis not in example.target.partial}
            want = value[local_slices(value.shape, example.target, example.mesh, place)]
            assert torch.equal(torch.stack(sums[str(kept)]).sum(0), want), f"{example} at {place}"


def moving(example: Example) -> Program:
    """A program of the planned moves alone."""
    number = 1
    now = first = Value(number, example.shape, torch.float64, example.source)
    instrs = []
    for move in plan_moves(example.source, example.target):
        number += 1
        after = Value(number, example.shape, torch.float64, move.layout)
        instrs.append(Reshard(move, (now,), (after,), moves=(move,)))
        now = after
    return Program(example.mesh, [first], [now], instrs)


def shards(
    value: torch.Tensor, layout: Layout, mesh: pfx.Mesh, random_: torch.Generator
) -> list[torch.Tensor]:
    """The distinct parts of a value; those along a partial axis combine to the value."""
    parts = {}
    for place in distinct_coordinates(layout, mesh):
        parts[tuple(place.items())] = value[local_slices(value.shape, layout, mesh, place)].clone()
    for axis in layout.partial:
        size = mesh.shape[axis]
        for key in list(parts):
            if dict(key)[axis] == 0:
                group = [tuple({**dict(key), axis: i}.items()) for i in range(size)]
                parts |= zip(group, _addends(parts[key], size, layout.reduce, random_), strict=True)
    return list(parts.values())


def _addends(
    part: torch.Tensor, count: int, reduce: str, random_: torch.Generator
) -> list[torch.Tensor]:
    """`count` random tensors that combine to `part`."""
    noise = [torch.randint(0, 9, part.shape, generator=random_).double() for _ in range(count - 1)]
    if reduce == "sum":
        return [part - sum(noise), *noise]
    sign = -1 if reduce == "max" else 1
    out = [part, *(part + sign * n for n in noise)]
    assert torch.equal(combine(reduce)(out), part)
    return out


@given(examples())
def test_nothing_moves_between_equal_layouts(example: Example) -> None:
    assert plan_moves(example.target, example.target) == ()
    assert plan_moves(example.source, example.source) == ()


@given(examples())
def test_what_is_owed_is_scattered_where_it_is_split(example: Example) -> None:
    """An axis is all-reduced and then sliced only where it must wait for another to leave its dim."""
    reduced: set[str] = set()
    moves = plan_moves(example.source, example.target)
    for move in moves:
        if move.kind == "all_reduce":
            reduced |= set(move.axes)
        if move.kind == "slice" and example.source.reduce == "sum":
            late = reduced & set(move.axes)
            held = example.source.dims[move.dim]
            blocked = example.target.dims[move.dim][: len(held)] != held or any(
                axis in example.source.dims[d]
                for d in range(len(example.shape))
                for axis in example.target.dims[move.dim]
            )
            assert not late or blocked, moves
    assert sum(move.kind == "all_reduce" for move in moves) <= 1  # over all its axes at once


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (Layout(((), ()), ("x",)), Layout((("x",), ())), ["reduce_scatter"]),
        (Layout(((), ()), ("x", "y")), Layout((("x",), ("y",))), ["reduce_scatter"] * 2),
        (Layout(((), ()), ("x", "y")), Layout((("x", "y"), ())), ["reduce_scatter"]),
        (Layout(((), ()), ("x",)), Layout((("y", "x"), ())), ["slice", "reduce_scatter"]),
        (Layout(((), ()), ("x",)), Layout((("x", "y"), ())), ["reduce_scatter", "slice"]),
        (Layout((("y",), ()), ("x",)), Layout((("y", "x"), ())), ["reduce_scatter"]),
        (Layout(((), ()), ("x", "y")), Layout(((), ())), ["all_reduce"]),
        (Layout(((), ()), ("x", "y")), Layout((("x",), ())), ["reduce_scatter", "all_reduce"]),
        (Layout((("x",), ())), Layout(((), ("x",))), ["all_to_all"]),
        (Layout((("x",), ())), Layout(((), ("y", "x"))), ["slice", "all_to_all"]),
        (Layout((("x", "y"), ())), Layout((("x",), ())), ["all_gather"]),
        (Layout(((), ())), Layout((("x",), ("y",))), ["slice"] * 2),
        (Layout(((), ())), Layout(((), ()), ("x",)), ["own"]),
        (Layout(((), ()), ("x",), "max"), Layout((("x",), ())), ["all_reduce", "slice"]),
    ],
)
def test_the_moves_of_common_cases(source: Layout, target: Layout, kinds: list[str]) -> None:
    assert [move.kind for move in plan_moves(source, target)] == kinds


@given(examples())
def test_bytes_are_sane(example: Example) -> None:
    """No move costs less than nothing, and a finer target never more than a coarser one."""
    numel, mesh = math.prod(example.shape), example.mesh
    cost = reshard_bytes(example.source, example.target, numel, 8, mesh)
    assert cost >= 0
    assert reshard_bytes(example.target, example.target, numel, 8, mesh) == 0
    if mesh.count(example.source.partial) == 1:
        whole = Layout(((),) * len(example.shape))
        assert cost <= reshard_bytes(example.source, whole, numel, 8, mesh) + 1e-6


def test_ring_counts() -> None:
    mesh = pfx.make_mesh(x=4)
    owed, whole, split = Layout(((),), ("x",)), Layout(((),)), Layout((("x",),))
    assert reshard_bytes(owed, whole, 100, 4, mesh) == 2 * 400 * 3 / 4
    assert reshard_bytes(owed, split, 100, 4, mesh) == 400 * 3 / 4
    assert reshard_bytes(split, whole, 100, 4, mesh) == 100 * 3
    assert reshard_bytes(whole, split, 100, 4, mesh) == 0
    gather: Move = plan_moves(split, whole)[0]
    assert move_bytes(gather, split, 100, 4, pfx.make_mesh(x=1)) == 0
