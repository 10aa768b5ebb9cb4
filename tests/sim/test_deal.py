"""Functions of stacks whose rows an axis deals unequally, or out of order, equal plain torch.

Padding is given values that would show: it goes through logarithms and divisions, and it is written
over before a call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pfx
from pfx import P
from pfx.array import Array
from pfx.compiler.ir import Reshard
from pfx.mesh import Deal, Mesh, make_mesh

DEALS = {
    "30 over 4": (Deal((0, 1, 2, 3)), 30),
    "10 over 3": (Deal((0, 1, 2)), 10),
    "7 over 2": (Deal((0, 1)), 7),
    "3 over 4": (Deal((0, 1, 2, 3)), 3),
    "explicit": (Deal((0, 1), (2, 5)), 7),
    "interleaved": (Deal((0, 1, 0, 1)), 6),
    "v-shaped": (Deal((0, 1, 1, 0)), 8),
    "2 blocks and 1": (Deal((0, 0, 1)), 5),
}
each_deal = pytest.mark.parametrize("name", DEALS)


def mesh_of(deal: Deal, **axes: int) -> Mesh:
    return make_mesh("simulated", pp=max(deal.place) + 1, deals={"pp": deal}, **axes)


def spoiled(array: Array, fill: float = math.nan) -> Array:
    """The same array with other padding: a part may hold anything after its rows."""
    for shard in array.shards:
        for dim, index in enumerate(shard.index):
            if isinstance(index, tuple):
                rest = shard.data.shape[dim] - len(index)
                shard.data.narrow(dim, len(index), rest).fill_(fill)
    return array


def assert_equal(found: Any, expected: Any) -> None:
    pairs, _ = pfx.tree.flatten_with_path(expected)
    for (path, want), got in zip(pairs, pfx.tree.leaves(pfx.device_get(found)), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.allclose(got, want, 1e-10, 1e-12, equal_nan=True), (path, got, want)


def check(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    mesh: Mesh,
    specs: Sequence[P],
    out: Any = None,
    **options: Any,
) -> Any:
    """Compare with plain torch, both ways of simulating; returns the program."""
    for checked in (False, True):
        arrays = [pfx.device_put(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
        arrays = [spoiled(x) if x.dtype.is_floating_point else x for x in arrays]
        step = pfx.jit(fn, mesh=mesh, out_specs=out, check=checked, **options)
        assert_equal(step(*arrays), fn(*args))
    return step.lower(*args)


def gathers(program: Any) -> list[tuple[int, ...]]:
    """The shapes of what a program gathers, or sends to other devices by rows."""
    return [c.shape for c in program.collectives() if c.op in ("all_gather", "all_to_all")]


# Placement ----------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], P, P]:
    """A mesh with one or two axes that deal, a shape, and two specs that fit it."""
    place = lambda n: tuple(
        draw(st.permutations([*range(n), *draw(st.lists(st.integers(0, n - 1), max_size=3))]))
    )
    sizes = {"pp": draw(st.integers(1, 4)), "qq": draw(st.integers(1, 2)), "dp": 2}
    mesh = make_mesh(
        "simulated", **sizes, deals={axis: Deal(place(sizes[axis])) for axis in ("pp", "qq")}
    )
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 5)), 4)

    def spec() -> P:
        axes = draw(st.permutations(["pp", "qq", None]))
        owed = draw(st.sampled_from(["dp", ()]))
        return P(*axes[:2], None if owed else draw(st.sampled_from(["dp", None])), unreduced=owed)

    return mesh, shape, spec(), spec()


@given(placements())
def test_put_move_and_get(case: tuple[Mesh, tuple[int, ...], P, P]) -> None:
    mesh, shape, before, after = case
    value = torch.arange(math.prod(shape)).view(shape)
    array = spoiled(pfx.device_put(value, mesh, before), -1)
    assert torch.equal(pfx.device_get(array), value)
    assert torch.equal(array.full_tensor(), value)
    moved = pfx.device_put(array, mesh, after)
    assert moved.spec == after and torch.equal(moved.full_tensor(), value)
    for shard in moved.shards if not after.unreduced else ():
        index = torch.meshgrid(
            *(torch.tensor(range(*i.indices(n)) if isinstance(i, slice) else i, dtype=torch.long)
              for i, n in zip(shard.index, shape, strict=True)), indexing="ij")  # fmt: skip
        held = shard.data[tuple(slice(n) for n in index[0].shape)]
        assert torch.equal(held, value[index])


# Functions ----------------------------------------------------------------------------------------

X, Y = P("pp"), P("pp")
PASS: dict[str, tuple[Callable[..., Any], Any]] = {  # nothing is gathered
    "elementwise": (lambda x, y: (x * y + 1).abs().log() / y, P("pp")),
    "softmax over another dim": (lambda x, y: x.softmax(1) * y, P("pp")),
    "a product of rows": (lambda x, y: x[:, :, None] @ y[:, None, :], P("pp")),
    "an index into another dim": (
        lambda x, y: x.gather(1, (y > 0).long() + 7 - 7 * (x > 0).long()), P("pp")),
    "integers divided": (lambda x, y: (x * 9).long() // (x > 0).long(), P("pp")),
    "sum": (lambda x, y: x.sum() + (x / y).sum(0).prod(), None),
    "scattered sum": (lambda x, y: x.t() @ y, P("pp")),
    "integer sum": (lambda x, y: ((x * 9).long() + 1).sum(), None),
    "mean": (lambda x, y: (x.log().mean(), y.mean(0)), None),
    "extrema": (lambda x, y: (x.amax(0), (-x - 1).max(), (x + 1).min(), (y * 9).long().amax()), None),
    "any and all": (lambda x, y: ((x < 0).any(), (x > 0).all(), (y > 0).any(0)), None),
    "norms": (lambda x, y: torch.linalg.vector_norm(x) + y.norm() + y.norm(p=3), None),
    "variance": (lambda x, y: (x.var(), y.std(0), x.logsumexp(0)), None),
    "a product that contracts rows": (lambda x, y: (x.T @ y, (x * y).sum(), x[:, 0] @ y), None),
    "created": (lambda x, y: torch.ones_like(x) + torch.full(x.shape, 2.0)
                + x * torch.arange(len(x))[:, None], P("pp")),
    "gradient": (lambda x, y: pfx.grad(lambda x: ((x * y).tanh().sum(0) ** 2).sum())(x), P("pp")),
    "normal": (lambda x, y: x + pfx.random.normal(pfx.random.key(1), x.shape, dtype=x.dtype), P("pp")),
    "keys of rows": (lambda x, y: x + pfx.vmap(lambda k: pfx.random.uniform(k, x.shape[1:]))(
        pfx.random.split(pfx.random.key(1), len(x))), P("pp")),
}  # fmt: skip
GATHER: dict[str, tuple[Callable[..., Any], Any]] = {  # rows are needed in order, or all at once
    "one row": (lambda x, y: x[1] + y[-1], None),
    "rows": (lambda x, y: x[torch.tensor([2, 0, 2])], None),
    "softmax over rows": (lambda x, y: x.softmax(0), P("pp")),
    "cumulative": (lambda x, y: x.cumsum(0) + y, P("pp")),
    "flipped": (lambda x, y: x.flip(0) + y, P("pp")),
    "joined": (lambda x, y: torch.cat([x, y]).sum(1), None),
    "cut": (lambda x, y: x[:2] * y[1:3], None),
    "flattened": (lambda x, y: x.reshape(-1) * 2, None),
    "triangle": (lambda x, y: x.tril(), P("pp")),
    "to another dim": (lambda x, y: x.t() + y.t(), P("pp")),
    "written": (lambda x, y: torch.zeros_like(x).index_add(0, torch.tensor([0, 2]), y[:2]), P("pp")),
    "scan": (lambda x, y: pfx.scan(lambda c, r: ((c + r).tanh(), c * r), y[0], x), (P(), P("pp"))),
}  # fmt: skip


def arguments(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.rand(size, 4, generator=generator, dtype=torch.float64) + 0.1
    return x, torch.randn(size, 4, generator=generator, dtype=torch.float64)


@each_deal
@pytest.mark.parametrize("what", [*PASS, *GATHER])
def test_functions(what: str, name: str) -> None:
    (deal, size), (fn, out) = DEALS[name], (PASS | GATHER)[what]
    mesh, args = mesh_of(deal, dp=2), arguments(size)
    program = check(fn, args, mesh, (P("pp"), P("pp", "dp")), out)
    if what in PASS:
        program = pfx.jit(fn, mesh=mesh, in_specs=(X, Y), out_specs=out).lower(*args)
        assert not gathers(program), program.text()
    check(fn, args, mesh, (P(), P("pp", unreduced="dp")), out)


def test_what_the_tables_say_of_gathers_can_fail() -> None:
    mesh, args = mesh_of(*DEALS["7 over 2"][:1]), arguments(7)
    fn, out = GATHER["flipped"]
    assert gathers(pfx.jit(fn, mesh=mesh, in_specs=(X, Y), out_specs=out).lower(*args)) == [(8, 4)]


@settings(max_examples=60)
@given(st.data())
def test_chains_of_elementwise_ops_and_reductions(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 4))
    more = data.draw(st.lists(st.integers(0, devices - 1), max_size=3))
    mesh = mesh_of(Deal(tuple(data.draw(st.permutations([*range(devices), *more])))), dp=2)
    size = data.draw(st.integers(2, 9))
    unary = {"log": torch.log, "exp": torch.exp, "inverse": lambda x: 1 / x, "root": torch.sqrt,
             "less": lambda x: x - 1, "turned": lambda x: x.t().t()}  # fmt: skip
    ends = {"sum": lambda x: x.sum(), "sum0": lambda x: x.sum(0), "mean1": lambda x: x.mean(1),
            "max": lambda x: x.max(), "min0": lambda x: x.amin(0), "gram": lambda x: x.t() @ x,
            "outer": lambda x: x @ x.t(), "same": lambda x: x}  # fmt: skip
    names = data.draw(st.lists(st.sampled_from(sorted(unary)), max_size=4))
    end = data.draw(st.sampled_from(sorted(ends)))

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for op in names:
            x = unary[op](x) + y
        return ends[end](x)

    specs = st.sampled_from([P("pp"), P("pp", "dp"), P("dp" if size % 2 == 0 else None), P()])
    x, y = arguments(size)
    check(fn, (x, y.abs()), mesh, (data.draw(specs), data.draw(specs)))


# Training -----------------------------------------------------------------------------------------


@each_deal
def test_a_stack_is_drawn_in_place(name: str) -> None:
    deal, size = DEALS[name]
    mesh = mesh_of(deal)

    def init(key: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two = pfx.random.split(key)
        return {
            "w": pfx.random.truncated_normal(one, -2.0, 2.0, (size, 5, 3)) * 0.02,
            "b": torch.zeros(size, 3),
            "scale": 1 + 0.1 * pfx.random.normal(two, (size, 3)),
        }

    key = pfx.random.key(0)
    step = pfx.jit(init, mesh=mesh, out_specs=P("pp"))
    found, expected = step(key), init(key)
    assert all(torch.equal(pfx.device_get(found[k]), expected[k]) for k in expected)
    program = step.lower(key)
    room = mesh.extent(("pp",), size)
    assert not program.collectives()
    made = [
        v for instr in program.instrs for v in instr.outs if v is not None and v.shape[0] == size
    ]
    assert made and all(v.local_shape(mesh)[0] == room for v in made)


@each_deal
def test_adamw_with_a_global_norm_clip(name: str) -> None:
    deal, size = DEALS[name]
    mesh, (x, y) = mesh_of(deal, dp=2), arguments(size)
    optimizer = pfx.optim.chain(pfx.optim.clip_by_global_norm(0.1), pfx.optim.adamw(1e-2))
    params = {"w": x, "b": y[:, 0]}

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        new = pfx.tree.map(lambda p, u: p + u, params, updates)
        norm = sum(g.square().sum() for g in pfx.tree.leaves(grads)) ** 0.5
        return new, state, norm

    state = optimizer.init(params)
    grads = pfx.tree.map(lambda p: p.cos() / p, params)
    specs = pfx.tree.map(lambda leaf: P("pp") if leaf.ndim else P(), state)
    step = pfx.jit(update, mesh=mesh, out_specs=(P("pp"), specs, P()), donate=(0, 1))
    put = lambda value: pfx.tree.map(
        lambda leaf: spoiled(pfx.device_put(leaf, mesh, P("pp") if leaf.ndim else P())), value
    )
    held = put((params, state, grads))
    want = params, state
    for _ in range(3):
        *new, norm = step(*held)
        *want, want_norm = update(*want, grads)
        assert_equal((*new, norm), (*want, want_norm))
        held = (*new, held[2])
    program = step.lower(params, state, grads)
    assert not gathers(pfx.jit(update, mesh=mesh, in_specs=(P("pp"), specs, P("pp")),
                               out_specs=(P("pp"), specs, P())).lower(params, state, grads))  # fmt: skip
    assert program is not None and held[0]["w"].shards[0].data.shape[0] == mesh.extent(
        ("pp",), size
    )


def test_a_donated_array_is_gone_and_another_is_not() -> None:
    deal, size = DEALS["7 over 2"]
    mesh, (x, y) = mesh_of(deal), arguments(size)
    a, b = pfx.device_put(x, mesh, P("pp")), pfx.device_put(y, mesh, P("pp"))
    out = pfx.jit(lambda a, b: (a * 2 + b, b.sum()), mesh=mesh, donate=(0,))(a, b)
    assert_equal(out, (x * 2 + y, y.sum()))
    assert a.parts == () and torch.equal(pfx.device_get(b), y)


# Programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [*PASS, *GATHER])
def test_a_deal_in_equal_blocks_costs_nothing(what: str) -> None:
    fn, out = (PASS | GATHER)[what]
    texts = []
    for deals in (
        {},
        {"pp": Deal((0, 1))},
        {"pp": Deal((0, 0, 1, 1))},
        {"pp": Deal((0, 1), (4, 4))},
    ):
        mesh = make_mesh("simulated", pp=2, dp=2, deals=deals)
        step = pfx.jit(fn, mesh=mesh, in_specs=(P("pp"), P("pp", "dp")), out_specs=out)
        texts.append(step.lower(*arguments(8)).text())
    assert texts[1:] == texts[:1] * 3


def test_memory_counts_the_padding_and_no_more() -> None:
    deal, size = DEALS["30 over 4"]
    mesh, (x, _) = mesh_of(deal), arguments(size)
    array = pfx.device_put(x, mesh, P("pp"))
    assert array.bytes_per_device == 8 * 4 * 8
    program = pfx.jit(lambda x: x * 2, mesh=mesh, in_specs=P("pp")).lower(x)
    assert program.memory().peak == 2 * 8 * 4 * 8


def test_a_region_beside_a_dealt_dim() -> None:
    mesh = make_mesh("simulated", pp=2, dp=2, deals={"pp": Deal((0, 1, 1, 0))})
    x, y = arguments(8)
    scaled = pfx.shard_map(
        lambda x: x / pfx.lax.psum((x * x).sum(), "dp"),
        mesh=mesh, in_specs=P(None, "dp"), out_specs=P(None, "dp"), axis_names=("dp",),
    )  # fmt: skip
    check(lambda x, y: scaled(x) + y, (x, y), mesh, (P("pp", "dp"), P("pp")), P("pp"))
    rows = pfx.shard_map(
        lambda x: x * 2, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names=("dp",)
    )
    check(lambda x, y: rows(x * y) + y, (x, y), mesh, (P("pp"), P("pp", "dp")), P("pp"))


def test_moves_of_one_program_are_bucketed() -> None:
    deal, size = DEALS["10 over 3"]
    mesh, (x, y) = mesh_of(deal), arguments(size)
    fn = lambda x, y: (x.cumsum(0), y.cumsum(0))
    program = check(fn, (x, y), mesh, (P("pp"), P("pp")))
    step = pfx.jit(fn, mesh=mesh, in_specs=(P("pp"), P("pp")))
    moves = [i for i in step.lower(x, y).instrs if isinstance(i, Reshard) and i.communicates]
    assert program is not None and [len(move.ins) for move in moves] == [2]


def test_a_case_prints_as_what_makes_it() -> None:
    deal = Deal((0, 1), (2, 5))
    assert eval(repr(deal)) == deal and dataclasses.replace(deal, sizes=()) == Deal((0, 1))
