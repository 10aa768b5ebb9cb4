"""Unreduced values: each device holds an addend, and their sum is the value, in and out of `jit`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pfx
from pfx import P, make_mesh

AXES = ("x", "y", "z")
MESH = make_mesh("simulated", dp=2, tp=2)
OWED = P(unreduced="dp")


def _scanned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return pfx.scan(lambda carry, row: (carry + row, carry.sum()), a, b.expand(3, -1, -1))[0]


# Of two matrices of one shape. Through the linear ones an addend may pass; the others must add first.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "first": lambda a, b: a,
    "sum": lambda a, b: a + b,
    "scaled": lambda a, b: (a * 2 - b, a),
    "matmul": lambda a, b: a @ b.t(),
    "squared": lambda a, b: (a + b).square(),
    "exp": lambda a, b: (a.exp() * b, a),
    "shifted": lambda a, b: a + 1,
    "total": lambda a, b: (a * b).sum(),
    "rows": lambda a, b: a.sum(0) + b.amax(0),
    "any": lambda a, b: (a > b).any(0),
    "integers": lambda a, b: a.round().long().sum(1),
    "made": lambda a, b: (torch.ones(6, dtype=a.dtype), torch.arange(6), torch.zeros(6, 6)),
    "constrained": lambda a, b: pfx.constrain(a, P(unreduced="x")) * 3 + b,
    "then squared": lambda a, b: pfx.constrain(a - b, P(None, "y", unreduced="x")).square(),
    "gradient": lambda a, b: torch.func.grad(lambda a: (a @ b.t()).square().sum())(a),
    "scanned": _scanned,
}


@dataclass(frozen=True)
class Example:
    """A function, a mesh, and specs that all fit."""

    name: str
    sizes: Mapping[str, int]
    in_specs: tuple[P | None, P | None]
    out_unreduced: tuple[str, ...] | None  # None: for the compiler to choose
    check: bool


@st.composite
def specs(draw: st.DrawFn, ndim: int) -> P:
    """Every axis on some dim, unreduced, or unused."""
    places: list[list[str]] = [[] for _ in range(ndim + 2)]
    for axis in draw(st.permutations(AXES)):
        places[draw(st.integers(0, ndim + 1))].append(axis)
    *dims, owed, _ = places
    return P(*(tuple(axes) or None for axes in dims), unreduced=owed)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    return Example(
        draw(st.sampled_from(list(FUNCTIONS))),
        {axis: draw(st.integers(1, 2)) for axis in AXES},
        (draw(specs(2)), draw(specs(2))),
        draw(st.sampled_from([None, (), ("x",), ("z", "y"), AXES])),
        draw(st.booleans()),
    )


@given(examples(), st.integers(0, 2**16), st.booleans())
@settings(max_examples=120, deadline=None)
def test_what_is_owed_adds_up(example: Example, seed: int, put: bool) -> None:
    mesh = make_mesh("simulated", **example.sizes)
    random_ = torch.Generator().manual_seed(seed)
    args = [torch.randn(8, 8, generator=random_, dtype=torch.float64) for _ in "ab"]
    fn = FUNCTIONS[example.name]
    out = None if example.out_unreduced is None else P(unreduced=example.out_unreduced)
    run = pfx.jit(fn, mesh=mesh, in_specs=example.in_specs, out_specs=out, check=example.check)
    given_ = [
        addends(x, mesh, spec, random_) for x, spec in zip(args, example.in_specs, strict=True)
    ]
    found = run(*(given_ if put else args))
    for got, want in zip(pfx.tree.leaves(found), pfx.tree.leaves(fn(*args)), strict=True):
        assert out is None or got.spec.unreduced == mesh.ordered(out.unreduced)
        torch.testing.assert_close(pfx.device_get(got), want, rtol=1e-11, atol=1e-11)


def addends(x: torch.Tensor, mesh: pfx.Mesh, spec: P, random_: torch.Generator) -> pfx.Array:
    """An array of a value, every addend of which is full of numbers."""
    array = pfx.device_put(x, mesh, spec)
    owed = [axis for axis in spec.unreduced if mesh.shape[axis] > 1]
    if not owed:
        return array
    noise = {}
    for shard in array.shards:
        where = tuple((axis, i) for axis, i in shard.coordinate.items() if axis not in owed)
        noise.setdefault(where, []).append(shard.data)
    for parts in noise.values():
        more = [torch.randn(p.shape, generator=random_, dtype=p.dtype) for p in parts[1:]]
        for part, extra in zip(parts[1:], more, strict=True):
            part += extra
            parts[0] -= extra
    return array


# Where values are -----------------------------------------------------------------------------------


def test_the_first_device_has_the_value_and_the_others_zeros() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    array = pfx.device_put(x, MESH, P("tp", unreduced="dp"))
    assert repr(array) == "Array(f32[4/tp, 2]+dp on dp=2 tp=2)"
    assert array.spec == P("tp", None, unreduced="dp")
    for shard in array.shards:
        want = x[shard.index] if shard.coordinate["dp"] == 0 else torch.zeros(2, 2)
        assert torch.equal(shard.data, want)
    assert torch.equal(array.full_tensor(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_number_is_the_sum_of_its_addends(dtype: torch.dtype) -> None:
    array = pfx.device_put(torch.tensor(3).to(dtype), MESH, P(unreduced=("dp", "tp")))
    assert len(array.parts) == 4
    assert array.item() == torch.tensor(3).to(dtype).item()
    assert float(array) == float(torch.tensor(3).to(dtype)) and bool(array)


@pytest.mark.parametrize(
    "target", [P(), P("dp"), P("tp", unreduced="dp"), P(None, "dp", unreduced="tp"), None]
)
def test_an_array_moves_to_and_from_unreduced(target: P | None) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for source in (P(), P("dp", "tp"), OWED, P(unreduced=("tp", "dp"))):
        array = pfx.device_put(pfx.device_put(x, MESH, source), MESH, target)
        assert torch.equal(pfx.device_get(array), x)


def test_a_plain_tensor_is_given_to_the_first_device() -> None:
    run = pfx.jit(lambda x: x * 2, mesh=MESH, in_specs=OWED, out_specs=OWED)
    x = torch.arange(4.0)
    assert [part.tolist() for part in run(x).parts] == [[0, 2, 4, 6], [0, 0, 0, 0]]


# What is communicated --------------------------------------------------------------------------------


def test_a_sum_stays_owed() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    run = pfx.jit(lambda x: x.sum(0), mesh=MESH, in_specs=P("dp"), out_specs=OWED)
    assert run.lower(x).collectives() == []
    assert [part.tolist() for part in run(x).parts] == [[2, 4], [10, 12]]


def test_a_whole_value_is_lent_without_communication() -> None:
    run = pfx.jit(lambda x: x.exp(), mesh=MESH, out_specs=OWED)
    x = torch.zeros(3)
    assert run.lower(x).collectives() == []
    assert [part.tolist() for part in run(x).parts] == [[1, 1, 1], [0, 0, 0]]


def test_only_what_is_not_asked_for_is_reduced() -> None:
    x = torch.ones(4, 2)
    run = pfx.jit(lambda x: x.sum(0), mesh=MESH, in_specs=P(("dp", "tp")), out_specs=OWED)
    (line,) = run.lower(x).collectives()
    assert (line.op, line.axes) == ("all_reduce", ("tp",))


def test_an_unasked_result_is_reduced() -> None:
    run = pfx.jit(lambda x: x.sum(0), mesh=MESH, in_specs=P("dp"))
    assert run(torch.ones(4, 2)).spec == P(None)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    h, _ = pfx.scan(lambda h, w: (torch.tanh(h @ w), None), x, params["layers"])
    return (h @ params["out"]).square().sum()


def accumulate(params: Any, acc: Any, x: torch.Tensor) -> Any:
    return pfx.tree.map(torch.add, acc, torch.func.grad(loss)(params, x))


def update(params: Any, acc: Any) -> Any:
    return pfx.tree.map(lambda p, g: p - 0.1 * g, params, acc)


@pytest.mark.parametrize("check", [False, True])
def test_gradients_accumulate_and_are_reduced_once(check: bool) -> None:
    draw = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    params, batches = {"layers": draw(3, 4, 4), "out": draw(4, 2)}, draw(4, 8, 4)
    zeros = pfx.tree.map(torch.zeros_like, params)
    step = pfx.jit(accumulate, mesh=MESH, in_specs=(P(), OWED, P("dp")), out_specs=OWED,
                   donate=(1,), check=check)  # fmt: skip
    last = pfx.jit(update, mesh=MESH, in_specs=(P(), OWED), out_specs=P(), check=check)
    acc, want = pfx.device_put(zeros, MESH, OWED), zeros
    assert step.lower(params, acc, batches[0]).collectives() == []
    reduced = last.lower(params, acc).collectives()
    assert [(line.op, line.axes, line.count) for line in reduced] == [
        ("all_reduce", ("dp",), 1)
    ] * 2
    for batch in batches:
        acc, want = step(params, acc, batch), accumulate(params, want, batch)
    got, want = pfx.device_get(last(params, acc)), update(params, want)
    for name in params:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)


def test_a_scattered_reduction_reads_it_too() -> None:
    """The parameters of ZeRO: the one reduction is a reduce-scatter."""
    acc = pfx.device_put(torch.arange(8.0), MESH, OWED)
    last = pfx.jit(lambda p, g: p - g, mesh=MESH, in_specs=(P("dp"), OWED), out_specs=P("dp"))
    assert [line.op for line in last.lower(torch.ones(8), acc).collectives()] == ["reduce_scatter"]
    assert torch.equal(pfx.device_get(last(torch.ones(8), acc)), 1 - torch.arange(8.0))


# Memory --------------------------------------------------------------------------------------------


def test_giving_a_moved_array_away_keeps_the_one_it_came_from() -> None:
    add = pfx.jit(lambda x: x + 1, mesh=MESH, donate=(0,))
    for source, target in ((P(), P("dp")), (P(), OWED), (P("dp"), P("dp", unreduced="tp"))):
        array = pfx.device_put(torch.arange(4.0), MESH, source)
        add(pfx.device_put(array, MESH, target))
        assert pfx.device_get(array).tolist() == [0, 1, 2, 3]


def test_bytes_are_of_one_addend() -> None:
    array = pfx.device_put(torch.zeros(4, 4), MESH, P("tp", unreduced="dp"))
    assert array.bytes_per_device == math.prod((2, 4)) * 4
