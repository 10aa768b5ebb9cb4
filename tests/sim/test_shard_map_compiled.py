"""Manual regions inside a compiled program: whatever the compiler does around one, values stay.

The law: for any layouts of a compiled function's arguments and results, its values and gradients are
those of the same function called alone, and of the dense one.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, assert_close, draw, mapped, ring

FOUR = pfx.make_mesh(i=4)
OBLONG = pfx.make_mesh(i=4, j=2)
VARIED = functools.partial(lax.pcast, axis="i", to="varying")
PLACES: tuple[Any, ...] = (
    None, P("i"), P("j", "i"), P(("i", "j")), P(("j", "i")), P(None, ("i", "j")), P("i", "j"),
)  # fmt: skip


def agrees(
    fn: Any, mesh: pfx.Mesh, *args: Any, want: Any = None, ins: Any = (None,), outs: Any = (None,),
    donates: Any = ((),), checks: Sequence[bool] = (True, False),
) -> None:  # fmt: skip
    """Assert that a function compiled in every way gives what it gives alone, and can be described.

    `ins`, `outs` and `donates` are options of `jit`; `want` is the result of a dense function.
    """
    expected = fn(*args)
    if want is not None:
        assert_close(expected, want)
    before = pfx.tree.map(torch.clone, args)
    for spec, out, donate, check in itertools.product(ins, outs, donates, checks):
        step = pfx.jit(fn, mesh=mesh, in_specs=spec, out_specs=out, donate=donate, check=check)
        placed = pfx.device_put(args, mesh, spec)
        given = [placed[k] if k in donate else x for k, x in enumerate(args)]
        program = step.lower(*given)
        assert program.text() and str(program.bill()) and program.collectives() is not None
        assert program.memory().peak >= sum(program.memory().arguments.values())
        assert_close(pfx.device_get(step(*given)), expected)
        assert_close(args, before)


def loss_of(fn: Any) -> Any:
    """A number that depends on every element of every result in another way."""

    def loss(*args: Any) -> torch.Tensor:
        leaves = [y for y in pfx.tree.leaves(fn(*args)) if y.is_floating_point()]
        slopes = [torch.linspace(0.5, 2, y.numel()).double().reshape(y.shape) for y in leaves]
        parts = [(torch.sin(y) * k).sum() for y, k in zip(leaves, slopes, strict=True)]
        return torch.stack(parts).sum()

    return loss


def gradients(fn: Any, *args: Any) -> Any:
    """The gradient of `loss_of` with respect to every argument."""
    return pfx.grad(loss_of(fn), argnums=tuple(range(len(args))))(*args)


def agree_throughout(
    fn: Any, mesh: pfx.Mesh, *args: Any, dense: Any = None, outs: Any = (None,), **ways: Any
) -> None:
    """Assert it of a function and of its gradients; `dense` means the same as `fn`."""
    agrees(fn, mesh, *args, want=dense and dense(*args), outs=outs, **ways)
    want = dense and gradients(dense, *args)
    agrees(functools.partial(gradients, fn), mesh, *args, want=want, **ways)


def owed(v: torch.Tensor) -> torch.Tensor:
    """What the devices along i hold, taken for addends."""
    return lax.pcast(v + 0 * lax.axis_index("i"), "i", to="unreduced")


class TestTheCompilerAroundARegion:
    """What does not vary may be split by the compiler, but not where a hand-written op reads it."""

    # On a value that is the same on all devices: the op, and the spec of its result.
    OPS: ClassVar[Any] = {
        "psum": (lambda v: lax.psum(v, "i"), P()),
        "psum-beside": (lambda v: lax.psum(v * lax.axis_index("j"), ("i", "j")), P()),
        "psum-addends": (lambda v: lax.psum(owed(v), "i"), P()),
        "gather": (lambda v: lax.all_gather(v, "i", tiled=True, to="invarying"), P()),
        "scatter": (lambda v: lax.psum_scatter(v, "i", tiled=True), P("i")),
        "permute": (lambda v: lax.ppermute(v, "i", [(0, 1), (1, 2)]), P("i")),
        "cast": (VARIED, P("i")),
        "owed": (owed, P(unreduced=("i",))),
        "tiled": (lambda v: v, P("i")),
        "product": (lambda v: v @ v.T, P("i")),
        "scan-ys": (lambda v: pfx.scan(lambda c, w: (c, VARIED(v)), v, v)[1][0], P("i")),
        "scan": (lambda v: pfx.scan(lambda c, w: (c + w, lax.psum(c, "i")), v, v)[1][1], P()),
    }

    @pytest.mark.parametrize("closed", [True, False], ids=["closed-over", "given"])
    @pytest.mark.parametrize("name", OPS)
    def test_a_value_it_split_over_a_manual_axis(self, name: str, closed: bool) -> None:
        op, spec = self.OPS[name]

        def fn(w: torch.Tensor) -> torch.Tensor:
            w = torch.tanh(w)
            if closed:
                return mapped(lambda: op(torch.sin(w)), OBLONG, (), spec)()
            return mapped(lambda w: op(torch.sin(w)), OBLONG, P(), spec)(w)

        x, ways = draw(8, 8), {"ins": (None, (P("i"),), (P("j", "i"),)), "checks": (True,)}
        agree_throughout(fn, OBLONG, x, outs=(None, P("i"), P(None, "i")), **ways)

    def test_a_reader_that_wants_it_split(self) -> None:
        total = mapped(lambda x: lax.psum(x * x, ("i", "j")), OBLONG, P("j"), P())
        fn = lambda x: (lambda y: y + y.sum(0))(total(x))
        dense = lambda x: (lambda y: y + y.sum(0))(4 * (x * x).reshape(2, 4).sum(0))
        agree_throughout(fn, OBLONG, draw(8), dense=dense, outs=(None, P("i")))


class TestPartlyManual:
    @staticmethod
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        fn = lambda x, w: torch.tanh(x @ w) + lax.pmean(x, "i") * 0.2
        return mapped(fn, OBLONG, (P("i"), P()), P("i"), axis_names=("i",))(x, w)

    @staticmethod
    def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) + 0.2 * x.reshape(4, 2, 8).mean(0).repeat(4, 1)

    @pytest.mark.parametrize("place", PLACES)
    def test_any_layout_before_and_after(self, place: Any) -> None:
        ways: Any = {
            "ins": (place and (place, P("j")), place and (P(), place)),
            "outs": (None, place), "checks": (True,),
        }  # fmt: skip
        x, w = draw(8, 8), draw(8, 8, seed=1)
        agree_throughout(self.region, OBLONG, x, w, dense=self.dense, **ways)
        pushed = lambda fn, x, w: pfx.jvp(lambda x: gradients(fn, x, w), (x,), (torch.cos(x),))[1]
        product = lambda fn: functools.partial(pushed, fn)
        want = product(self.dense)(x, w)
        agrees(product(self.region), OBLONG, x, w, want=want, ins=ways["ins"][:1], checks=(True,))

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("remat", [None, "full"])
    def test_in_the_body_of_a_scan(self, reverse: bool, remat: Any) -> None:
        def fn(x: torch.Tensor, ws: torch.Tensor) -> Any:
            body = lambda x, w: (lambda y: (y, y.sum(0)))(self.region(x, w))
            return pfx.scan(body, x, ws, reverse=reverse, remat=remat)

        def dense(x: torch.Tensor, ws: torch.Tensor) -> Any:
            ys = []
            for w in ws.flip(0) if reverse else ws:
                x = self.dense(x, w)
                ys.append(x.sum(0))
            return x, torch.stack(ys[::-1] if reverse else ys)

        x, ws = draw(8, 8), draw(3, 8, 8, seed=1) * 0.3
        ways: Any = {"ins": (None, (P("j", "i"), P(None, "j"))), "checks": (True,)}
        agree_throughout(fn, OBLONG, x, ws, dense=dense, **ways)

    def test_nested_rematerialized_and_with_a_loop_inside(self) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            step = lambda c, r: c * 0.5 + lax.ppermute(torch.sin(r) * c, "j", ring(2))
            c, ys = pfx.scan(lambda c, r: (step(c, r), lax.pmean(c, ("i", "j"))), x[0], x)
            return x * c + ys.sum()

        columns = {"in_specs": P(None, "j"), "out_specs": P(None, "j"), "axis_names": "j"}
        outer = lambda x, w: pfx.remat(lambda x: pfx.shard_map(inner, **columns)(x @ w))(x)
        fn = mapped(outer, OBLONG, (P("i"), P()), P("i"), axis_names=("i",))
        ways: Any = {"ins": (None, (P("j", "i"), P("i", "j"))), "checks": (True,)}
        agree_throughout(fn, OBLONG, draw(8, 8), draw(8, 8, seed=1), **ways)

    def test_gradients_taken_inside(self) -> None:
        part = lambda w, x: pfx.grad(lambda w: (torch.sin(x @ w) ** 2).sum())(w)

        def region(x: torch.Tensor, w: torch.Tensor) -> Any:
            total = lambda w: lax.psum((torch.sin(x @ w) ** 2).sum(), "i")
            curved = pfx.jvp(pfx.grad(total), (w,), (w * 0.5,))[1]
            own = part(lax.pcast(w, "i", to="varying"), x)
            return part(w, x), own, part(lax.pcast(w, "i", to="reduced"), x), curved

        def dense(x: torch.Tensor, w: torch.Tensor) -> Any:
            curved = pfx.jvp(lambda w: part(w, x), (w,), (w * 0.5,))[1]
            return part(w, x), torch.cat([part(w, b) for b in x.chunk(4)]), part(w, x), curved

        specs = (P(), P("i"), P(unreduced=("i",)), P())
        fn = mapped(region, OBLONG, (P("i"), P()), specs, axis_names=("i",))
        x, w = draw(8, 8), draw(8, 8, seed=1)
        ways: Any = {"ins": (None, (P("j", "i"), P("i", "j"))), "checks": (True,)}
        agree_throughout(fn, OBLONG, x, w, dense=dense, **ways)


def test_a_carry_of_every_variance() -> None:
    def body(carry: Any, row: torch.Tensor) -> Any:
        v, i, u, r = carry
        u = u + lax.pcast(torch.outer(row, row), "i", to="unreduced")
        i = i * 0.9 + lax.pmean(torch.sin(v), "i").sum(0)[None] * 0.1
        v = torch.tanh(v + i.mean())
        return (v, i, u, r * r), (v.sum(), owed(i.sum()))

    def region(x: torch.Tensor, w: torch.Tensor) -> Any:
        start = (x, w[:1], owed(torch.zeros_like(w)), lax.pcast(w, "i", to="reduced"))
        (v, i, u, r), (ys, addends) = pfx.scan(body, start, x)
        varied = lax.pcast(r, "i", to="varying") * x.sum()
        return v, i, lax.psum(u, "i"), u, varied, ys, lax.psum(addends, "i")

    specs = (P("i"), P(), P(), P(unreduced=("i",)), P("i"), P("i"), P())
    fn = mapped(region, OBLONG, (P("i"), P()), specs, axis_names=("i",))
    x, w = draw(8, 8), draw(8, 8, seed=1) * 0.5
    agree_throughout(fn, OBLONG, x, w, ins=(None, (P("j", "i"), P("i", "j"))))


def test_sums_that_are_owed_pass_between_regions_and_jit() -> None:
    addends = P(unreduced=("i",))
    options: Any = {"axis_names": ("i",)}
    add = mapped(lambda x: owed(x.sum(0)), OBLONG, P("i"), addends, **options)
    read = lambda u: (lax.psum(u, "i"), lax.psum_scatter(u, "i", tiled=True), u * 2)
    use = mapped(read, OBLONG, addends, (P(), P("i"), addends), **options)
    x = draw(8, 8)
    total = x.sum(0)
    fn = lambda x: (add(x), *use(add(x)))
    ins, outs = (None, (P("j", "i"),)), (None, (addends, P("j"), P(), P(unreduced=("i", "j"))))
    agrees(fn, OBLONG, x, want=(total, total, total, 2 * total), ins=ins, outs=outs)
    places = (None, (addends,), (P(unreduced=("j",)),), (P("j", unreduced=("i",)),), (P("i"),))
    agrees(use, OBLONG, total, want=(total, total, 2 * total), ins=places, outs=(None, outs[1][1:]))


KEY = pfx.random.key(3)
LOCAL = {
    "max": lambda x: tuple(torch.max(x, 1)),
    "split": lambda x: torch.split(x, [3, 5], 1),
    "no-rule": lambda x: torch.linalg.solve(x[:, :2] @ x[:, :2].T + torch.eye(2).double(), x),
    "layer_norm": lambda x: F.layer_norm(x, (8,)) * lax.axis_index("i"),
    "integers": lambda x: (x > 0).long().argmax(1) + lax.axis_index("i"),
    "gather": lambda x: x.gather(1, (x.abs() * 2).long().clamp(0, 7)),
    "rank-index": lambda x: x.flip(1)[torch.arange(2), lax.axis_index("i").expand(2)],
    "random": lambda x: pfx.random.normal(pfx.random.fold_in(KEY, lax.axis_index("i")), x.shape) * x,
    "dropout": lambda x: torch.where(pfx.random.bernoulli(KEY, 0.5, x.shape), x, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_ops_on_what_a_device_holds(name: str) -> None:
    fn = mapped(LOCAL[name], OBLONG, P("i"), P("i"), axis_names=("i",))
    x, ways = draw(8, 8), {"ins": (None, (P("j", "i"),), (P("i", "j"),)), "checks": (True,)}
    differentiable = any(y.is_floating_point() for y in pfx.tree.leaves(fn(x)))
    (agree_throughout if differentiable else agrees)(fn, OBLONG, x, **ways)


class TestMemoryOfOthers:
    """In-place ops and donated buffers change nothing that somebody else still reads."""

    X = draw(8, 8)
    DONATED: ClassVar[Any] = {"ins": ((P(),), (P("i"),), (P("j", "i"),)), "donates": ((), (0,))}

    def test_an_argument_written_inside(self) -> None:
        def change(x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            x[:, 1:3] = 5.0
            return x + lax.axis_index("i")

        def fn(x: torch.Tensor) -> Any:
            return mapped(change, OBLONG, P("i"), P("i"), axis_names=("i",))(x), x * 3

        rows = torch.arange(4).repeat_interleave(2)[:, None].double()
        kept = torch.tensor([2.0, 0, 0, 2, 2, 2, 2, 2]).double()
        dense = lambda x: (x * kept + 5 * (kept == 0) + rows, x * 3)
        agree_throughout(fn, OBLONG, self.X, dense=dense, **self.DONATED)

    @pytest.mark.parametrize(
        "make",
        [lambda x: VARIED(torch.zeros(2, 8).double()),
         lambda x: VARIED(lax.psum(x, "i")),
         lambda x: lax.all_gather(x, "i", tiled=True)[:2],
         lambda x: lax.ppermute(x, "i", ring(4)), lambda x: lax.ppermute(x, "i", [(0, 0), (1, 1)]),
         lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True)],
        ids=["cast", "cast-sum", "gather", "permute", "stay", "exchange"],
    )  # fmt: skip
    @EACH_WAY
    def test_what_a_collective_made_is_each_device_s_own(self, run: Any, make: Any) -> None:
        written = mapped(lambda x: (make(x).add_(lax.axis_index("i")), x), FOUR, P("i"), P("i"))
        plain = mapped(lambda x: (make(x) + lax.axis_index("i"), x), FOUR, P("i"), P("i"))
        assert_close(run(written, FOUR, self.X), plain(self.X))

    def test_a_donated_argument_is_kept_while_it_is_needed(self) -> None:
        def region(x: torch.Tensor) -> Any:
            gathered = lax.all_gather(x, "i", tiled=True, to="invarying")
            return torch.sin(x) * 2, lax.psum(owed(x), "i"), gathered, owed(x), x

        def fn(x: torch.Tensor) -> Any:
            specs = (P("i"), P(), P(), P(unreduced=("i",)), P("i"))
            y, r, z, u, same = mapped(region, OBLONG, P("i"), specs, axis_names=("i",))(x)
            tiled = mapped(lambda x: x, OBLONG, P(), P(None, "i"), axis_names=("i",))(x)
            return torch.exp(y), r, torch.sin(z), u, u + u, same, torch.cos(x * 3), tiled

        agrees(fn, OBLONG, self.X, **self.DONATED)


class TestSmall:
    def test_an_axis_of_one_device(self) -> None:
        mesh = pfx.make_mesh(i=1, j=2)

        def region(x: torch.Tensor) -> Any:
            moved = lax.ppermute(x, "i", []), lax.all_to_all(x, "i", 0, 1, tiled=True)
            return (
                x,
                lax.psum(x, "i"),
                *moved,
                lax.psum(x * lax.axis_index("j"), ("i", "j")),
                owed(x),
            )

        specs = (P("i"), P(), P("i"), P("i"), P(), P(unreduced=("i",)))
        fn = mapped(region, mesh, P("i"), specs)
        places = (None, (P("i"),), (P(("i", "j")),), (P("j", "i"),))
        agree_throughout(fn, mesh, draw(8, 8), ins=places)

    @pytest.mark.parametrize("shape", [(0, 8), (4, 4)], ids=["empty", "one-row"])
    def test_blocks_with_few_elements(self, shape: tuple[int, ...]) -> None:
        def region(x: torch.Tensor) -> Any:
            moved = lax.all_gather(x, "i"), lax.ppermute(x, "i", [(0, 1)])
            parts = lax.psum_scatter(x, "i", dim=1, tiled=True)
            return lax.psum(x, "i"), lax.psum(x.sum(), "i"), *moved, parts

        fn = mapped(region, FOUR, P("i"), (P(), P(), P("i"), P("i"), P("i")))
        agree_throughout(fn, FOUR, draw(*shape), ins=(None, (P("i"),), (P(None, "i"),)))


@pytest.mark.parametrize("loop", [False, True], ids=["once", "in-a-loop"])
def test_collectives_beside_each_other_are_not_mixed_up(loop: bool) -> None:
    perms = [[(q, (q + s) % 4) for q in range(4)] for s in range(4)] + [[(0, 1)], [(1, 0)]]
    groups = [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [2, 0]], [[2, 0, 3, 1]]]

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x * 0 + lax.pmin(lax.stop_gradient(x), "i") + lax.psum((x > 0).long(), "i")
        for k, perm in enumerate(perms):
            y = y + lax.ppermute(torch.sin(x * (k + 1)), "i", perm) * (k + 1)
        for k, ranks in enumerate(groups):
            y = y + lax.psum(x * (k + 1), "i", groups=ranks)
            y = y + lax.pmax(lax.stop_gradient(x) * (k + 1), "i", groups=ranks)
            y = y + lax.all_gather(x * (k + 2), "i", groups=ranks).sum(0)
            y = y + lax.all_to_all(x * (k + 3), "i", 1, 1, tiled=True, groups=ranks)
        return y

    def looped(x: torch.Tensor) -> torch.Tensor:
        return pfx.scan(lambda c, r: (region(c * 0.01) + r, c.sum()), x, x)[0]

    fn = mapped(looped if loop else region, FOUR, P("i"), P("i"))
    agree_throughout(fn, FOUR, draw(8, 8), checks=(True,))


class TestMegatron:
    """One block by hand over tp, the batch left to the compiler, beside the annotated one."""

    MESH = pfx.make_mesh(dp=2, tp=4)
    SPECS: ClassVar[Any] = {"up": P(None, "tp"), "down": P("tp")}
    PARAMS: ClassVar[Any] = {"up": draw(16, 32), "down": draw(32, 16, seed=1)}

    @staticmethod
    def annotated(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(x @ p["up"]) @ p["down"]

    @classmethod
    def manual(cls, p: Any, x: torch.Tensor) -> torch.Tensor:
        fn = lambda p, x: x + lax.psum(F.gelu(x @ p["up"]) @ p["down"], "tp")
        return mapped(fn, cls.MESH, (cls.SPECS, P()), P(), axis_names=("tp",))(p, x)

    def programs(self, make: Any, ins: P, *args: Any) -> list[Any]:
        found = []
        for fn in (self.annotated, self.manual):
            step = pfx.jit(make(fn), mesh=self.MESH, in_specs=(self.SPECS, ins),
                           out_specs=self.SPECS, check=True)  # fmt: skip
            assert_close(pfx.device_get(step(*args)), make(self.annotated)(*args))
            program = step.lower(*args)
            moved = Counter((c.op, c.axes, c.bytes, c.count) for c in program.collectives())
            found.append((moved, program.memory().peak))
        return found

    def test_the_gradient_moves_and_holds_the_same(self) -> None:
        make = lambda fn: lambda p, x: pfx.grad(lambda p: (fn(p, x) ** 2).sum())(p)
        ours, theirs = self.programs(make, P("dp"), self.PARAMS, draw(4, 8, 16))
        assert ours == theirs

    def test_gradients_that_are_accumulated_are_reduced_once(self) -> None:
        def make(fn: Any) -> Any:
            def accumulate(p: Any, xs: torch.Tensor) -> Any:
                one = lambda x: pfx.grad(lambda p: (fn(p, x) ** 2).sum())(p)
                body = lambda total, x: (pfx.tree.map(torch.add, total, one(x)), None)
                return pfx.scan(body, pfx.tree.map(torch.zeros_like, p), xs)[0]

            return accumulate

        ours, theirs = self.programs(make, P(None, "dp"), self.PARAMS, draw(3, 4, 8, 16))
        assert ours == theirs
