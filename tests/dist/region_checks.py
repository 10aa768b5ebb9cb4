"""Manual regions on processes, beyond the tests that `regions` runs again.

Every collective of a group of checks is in one program: compiling takes the time here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import pfx
from pfx import P, lax
from pfx.errors import TraceError
from tests.dist.regions import Twin, agree, alone, arrays, compiled, on, run
from tests.sim.manual import (
    EXTREMA,
    LINEAR,
    Case,
    assert_close,
    complains,
    draw,
    ring,
)

FOUR, SQUARE = pfx.make_mesh(i=4), pfx.make_mesh(i=2, j=2)
BOTH = P("i", "j")
WAYS: Sequence[Callable[..., Any]] = (alone, arrays, compiled)


def at_once(
    cases: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], mesh: pfx.Mesh
) -> Callable[..., Any]:
    """One region of many functions of blocks; the first dims of their values are the mesh's."""
    lead = len(mesh.axis_names)

    def one(xs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outs = {name: cases[name](x.reshape(x.shape[lead:])) for name, x in xs.items()}
        return {name: out.reshape((1,) * lead + tuple(out.shape)) for name, out in outs.items()}

    spec = P(*mesh.axis_names)
    return Twin(one, mesh, spec, spec)


def applied(cases: Sequence[Case], axis: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The cases along some axes, by name."""
    return {case.name: lambda x, case=case: case.apply(x, axis) for case in cases}


def every_collective() -> None:
    """Each in one way: over one axis, and over two in either order."""
    cases = (*LINEAR, *EXTREMA)
    for axis, way in zip(("j", ("i", "j"), ("j", "i")), WAYS, strict=True):
        xs = {case.name: case.example(SQUARE, axis) for case in cases}
        wanted = {case.name: case.dense(xs[case.name], SQUARE, axis) for case in cases}
        assert_close(way(at_once(applied(cases, axis), SQUARE), SQUARE, xs), wanted)


def dtypes() -> None:
    """One collective of each kind in floats and integers, of whole numbers: every sum is exact."""
    kinds = ("psum", "pmean", "pmax", "all_gather-0-tiled-varying", "psum_scatter-0-tiled",
             "all_to_all-0-1-tiled", "ppermute-chain")  # fmt: skip
    cases = {case.name: case for case in (*LINEAR, *EXTREMA) if case.name in kinds}
    calls, xs, wanted = {}, {}, {}
    for kind in kinds:
        case, axis = cases[kind], ("j", "i")
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64):
            name = f"{kind} of {dtype}"
            calls[name] = applied([case], axis)[kind]
            x = (4 * case.example(SQUARE, axis)).round()
            mean_of_integers = kind == "pmean" and not dtype.is_floating_point
            xs[name] = x.to(dtype)
            wanted[name] = case.dense(x, SQUARE, axis).to(
                torch.float32 if mean_of_integers else dtype
            )
    agree(compiled(at_once(calls, SQUARE), SQUARE, xs), wanted, exact=True)


def every_gradient() -> None:
    """In reverse through every collective, over two axes out of order."""
    axis = ("j", "i")
    fn = at_once(applied(LINEAR, axis), SQUARE)
    xs = {case.name: case.example(SQUARE, axis) for case in LINEAR}
    weights = {case.name: case.dense(xs[case.name], SQUARE, axis) for case in LINEAR}

    def loss(outs: Any) -> torch.Tensor:
        parts = pfx.tree.map(lambda x, w: (torch.sin(x) * w.cos()).sum(), outs, weights)
        return torch.stack(pfx.tree.leaves(parts)).sum()

    dense = lambda xs: loss({case.name: case.dense(xs[case.name], SQUARE, axis) for case in LINEAR})
    assert_close(compiled(pfx.grad(lambda xs: loss(fn(xs))), SQUARE, xs), pfx.grad(dense)(xs))


def not_numbers() -> None:
    """A NaN of one device is the maximum and the minimum; booleans are counted, and compared."""
    x = torch.tensor([[1.0, -2.0, 3.0, torch.inf], [torch.nan, 5.0, -torch.inf, 0.0]])
    extrema = {"max": lambda x: lax.pmax(x, "i"), "min": lambda x: lax.pmin(x, "i")}
    count = {"sum": lambda x: lax.psum(x, "i"), "next": lambda x: lax.ppermute(x, "i", ring(4))}
    for dtype, way in zip((torch.float32, torch.float64, torch.bfloat16), WAYS, strict=True):
        rows = torch.cat([x, x - 1]).to(dtype)
        wanted = {"max": rows.amax(0).expand(4, 4), "min": rows.amin(0).expand(4, 4)}
        found = way(at_once(extrema, FOUR), FOUR, dict.fromkeys(extrema, rows))
        agree(found, wanted, exact=True)
    flags = torch.cat([x, x - 1]) > 0
    everywhere = {
        "max": flags.any(0), "min": flags.all(0), "sum": flags.sum(0, dtype=torch.int32)
    }  # fmt: skip
    wanted = {name: x.expand(4, 4) for name, x in everywhere.items()} | {"next": flags.roll(1, 0)}
    found = compiled(at_once(extrema | count, FOUR), FOUR, dict.fromkeys(wanted, flags))
    agree(found, wanted, exact=True)


def slope(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sum of squares of all that a function returns."""
    return pfx.grad(lambda xs: sum((x**2).sum() for x in pfx.tree.leaves(fn(xs))))


def groups() -> None:
    """Collectives among some of an axis' devices, in the order listed, and their gradient."""
    for sets in ([[0, 1], [2, 3]], [[3, 0], [1, 2]]):
        calls = {
            "psum": lambda x, sets=sets: lax.psum(x, "i", groups=sets),
            "all_gather-0-tiled-varying": lambda x, sets=sets: lax.all_gather(
                x, "i", tiled=True, groups=sets
            ),
            "psum_scatter-0-tiled": lambda x, sets=sets: lax.psum_scatter(
                x, "i", tiled=True, groups=sets
            ),
            "all_to_all-0-0-tiled": lambda x, sets=sets: lax.all_to_all(
                x, "i", 0, 0, tiled=True, groups=sets
            ),
        }
        meanings = {case.name: case for case in LINEAR if case.name in calls}
        xs = {name: draw(4, *case.shape(2)) for name, case in meanings.items()}

        def dense(xs: Any, sets: Any = sets, meanings: Any = meanings) -> Any:
            outs = {}
            for name, case in meanings.items():
                rows: dict[int, torch.Tensor] = {}
                for ranks in sets:
                    parts = case.meaning([xs[name][rank] for rank in ranks])
                    rows |= dict(zip(ranks, parts, strict=True))
                outs[name] = torch.stack([rows[rank] for rank in range(4)])
            return outs

        fn = at_once(calls, FOUR)
        assert_close(alone(fn, FOUR, xs), dense(xs))
        assert_close(compiled(slope(fn), FOUR, xs), slope(dense)(xs))


def orders_of_axes() -> None:
    """L1 and C19: blocks, and a device's own index, row-major in the order that axes are given."""
    x = torch.arange(32.0).reshape(8, 4)
    for spec in (P("i", "j"), P("j", "i"), P(("j", "i")), P(None, ("i", "j"))):
        for way in WAYS:
            agree(way(Twin(lambda x: x, SQUARE, spec, spec), SQUARE, x), x, exact=True)
    swap = Twin(lambda x: x, SQUARE, P(("i", "j")), P(("j", "i")))
    index = Twin(
        lambda: tuple(lax.axis_index(a).reshape(1, 1) for a in (("i", "j"), ("j", "i"))),
        SQUARE, (), BOTH,
    )  # fmt: skip
    for way in (alone, compiled):
        agree(way(swap, SQUARE, x), x.reshape(2, 2, 2, 4).transpose(0, 1).reshape(8, 4), exact=True)
        straight, swapped = way(index, SQUARE)
        assert straight.tolist() == [[0, 1], [2, 3]] and swapped.tolist() == [[0, 2], [1, 3]]


def loops() -> None:
    """A permute inside a scan: a ring of products, alone, compiled and in reverse."""

    def travel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def step(block: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return lax.ppermute(block, "i", ring(4)), block @ w

        products = pfx.scan(step, x, torch.zeros(4))[1]
        return products[(lax.axis_index("i") - torch.arange(4)) % 4].flatten(0, 1)

    fn = Twin(travel, FOUR, (P("i"), P(None, "i")), P(None, "i"))
    x, w, weight = draw(8, 3), draw(3, 12, seed=1), draw(8, 12, seed=2)
    for way in WAYS:
        assert_close(way(fn, FOUR, x, w), x @ w)
    both = lambda f: pfx.grad(lambda x, w: (torch.sin(f(x, w)) * weight).sum(), argnums=(0, 1))
    for way in (alone, compiled):
        assert_close(way(both(fn), FOUR, x, w), both(torch.matmul)(x, w))


def owed_across_steps() -> None:
    """Regions add to an unreduced Array, step by step, and one reduces it, once."""
    w, batches = draw(3, 5), draw(3, 8, 3, seed=1)
    owed = P(unreduced="i")

    def gradient(acc: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        local = pfx.grad(lambda w: (torch.tanh(x @ w) ** 2).sum())
        return acc + lax.pcast(local(lax.pcast(w, "i", to="varying")), "i", to="unreduced")

    add = pfx.shard_map(gradient, mesh=FOUR, in_specs=(owed, P(), P("i")), out_specs=owed)
    total = pfx.shard_map(lambda acc: lax.psum(acc, "i"), mesh=FOUR, in_specs=owed, out_specs=P())
    scatter = pfx.shard_map(
        lambda acc: lax.psum_scatter(acc, "i", dim=0, tiled=True),
        mesh=FOUR, in_specs=owed, out_specs=P("i"),
    )  # fmt: skip
    dense = pfx.grad(lambda w: (torch.tanh(batches.flatten(0, 1) @ w) ** 2).sum())(w)
    step = pfx.jit(add, mesh=FOUR, out_specs=owed)
    for once in (add, step):
        acc = pfx.device_put(torch.zeros_like(w), FOUR, owed)
        for x in batches:
            acc = once(acc, pfx.device_put(w, FOUR, P()), pfx.device_put(x, FOUR, P("i")))
            assert acc.spec.unreduced == ("i",)
        assert_close(pfx.device_get(total(acc)), dense)
        assert_close(pfx.device_get(acc), dense)
    assert step.lower(acc, w, batches[0]).collectives() == []
    whole = pfx.jit(total, mesh=FOUR).lower(acc).collectives()
    assert [line.op for line in whole] == ["all_reduce"]
    rows = pfx.device_put(draw(8, 2), FOUR, owed)
    part = scatter(rows)
    assert part.spec == P("i", None) and [s.data.shape[0] for s in part.shards] == [2]
    assert_close(pfx.device_get(part), draw(8, 2))


def some_axes() -> None:
    """A region over one axis: the compiler has the other, or a region inside it."""
    x = draw(8, 4)
    center = lambda x: x - lax.pmean(x, "i")
    part = Twin(center, SQUARE, P("i"), P("i"), axis_names=("i",))
    wanted = x - x.reshape(2, 4, 4).mean(0).repeat(2, 1)

    def both(x: torch.Tensor) -> torch.Tensor:
        inner = pfx.shard_map(lambda x: x * lax.axis_size("j") + lax.psum(x, "j"),
                              in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names=("j",))  # fmt: skip
        return inner(center(x))

    nested = Twin(both, SQUARE, P("i"), P("i"), axis_names=("i",))
    sums = wanted.reshape(8, 2, 2).sum(1).repeat(1, 2)
    for way in WAYS:
        assert_close(way(part, SQUARE, x), wanted)
        assert_close(way(nested, SQUARE, x), 2 * wanted + sums)
    split = pfx.jit(
        part.regions["process"], mesh=SQUARE, in_specs=P("i", "j"), out_specs=P("i", "j")
    )
    assert_close(pfx.device_get(split(x)), wanted)


def an_if() -> None:
    """On processes a region is compiled, so that even what is the same on all cannot be read."""
    fn = Twin(lambda x: x if lax.psum(x.sum(), "i") > 0 else -x, FOUR, P("i"), P("i"))
    for way in WAYS:
        with complains(TraceError, "region_checks.py:", "value of a traced tensor", "torch.where"):
            way(fn, FOUR, torch.ones(4))
    with on("simulated"):
        assert fn(-torch.ones(4)).tolist() == [1.0] * 4


def the_simulated_tests() -> None:
    """The families that JAX agrees with: layouts, collectives, gradients and whole trainings."""
    values = ["L5", "T2", "C1", "C2", "C8", "C10", "C11", "C13", "C14", "C17", "C20"]
    gradients = ["G1", "G4", "G9", "G11", "G13", "D1", "D2", "D4", "D5", "D9"]
    more = ["test_C5_a_psum", "does_not_vary", "test_C19_picks", "numbers_go_in", "test_a_loop",
            "none_among_the_in_specs", "test_V1_over_one", "of_a_reduced_value",
            "first_device_speaks", "of_the_checked_region"]  # fmt: skip
    fewer = ["4-1", "counts0", "1000.0", "its_mirror", "of_every_dtype", "loss3", "loss4", "loss5"]
    run(values + gradients, more, without=fewer)
