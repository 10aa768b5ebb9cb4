"""Gradients through a manual region, around it and inside it, against the dense function's.

The number in a test's name is a case that JAX 0.10 agrees with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, EXTREMA, LINEAR, Case, assert_close, complains, draw, mapped

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # torch's, for jvp

FOUR = pfx.make_mesh(i=4)
SQUARE = pfx.make_mesh(i=2, j=2)
OBLONG = pfx.make_mesh(i=4, j=2)
SAME = lambda x: x


def gradients(fn: Any, *args: Any) -> Any:
    """With respect to all arguments."""
    return pfx.grad(fn, argnums=tuple(range(len(args))))(*args)


def gradient(fn: Any) -> Any:
    """Of the sum of the result."""
    return pfx.grad(lambda x: fn(x).sum())


class TestOutside:
    @EACH_WAY
    @pytest.mark.parametrize(("spec", "times"), [(P(), 1.0), (P("i"), 4.0)])
    def test_G1_of_a_psum(self, run: Any, spec: P, times: float) -> None:
        fn = mapped(lambda x: lax.psum(x, "i"), FOUR, P("i"), spec)
        assert run(gradient(fn), FOUR, draw(8)).tolist() == [times] * 8

    @EACH_WAY
    def test_G1_of_a_psum_of_what_does_not_vary(self, run: Any) -> None:
        fn = mapped(lambda x: lax.psum(x, "i"), FOUR, P(), P())
        assert run(gradient(fn), FOUR, draw(2)).tolist() == [4.0] * 2

    @EACH_WAY
    @pytest.mark.parametrize(
        ("specs", "times"),
        [((P(), P("i")), 4.0), ((P(), P()), 1.0), ((P("i"), P("i")), 1.0), ((P(), P("j")), 2.0),
         ((P(), P(("i", "j"))), 8.0), ((P("i"), P(("i", "j"))), 2.0)],
    )  # fmt: skip
    def test_G2_of_the_identity(self, run: Any, specs: Any, times: float) -> None:
        assert run(gradient(mapped(SAME, OBLONG, *specs)), OBLONG, draw(8)).tolist() == [times] * 8

    @EACH_WAY
    def test_G4_of_an_all_gather_with_weights(self, run: Any) -> None:
        w = draw(16)
        fn = mapped(lambda x: lax.all_gather(x, "i", tiled=True), FOUR, P("i"), P("i"))
        found = run(pfx.grad(lambda x: (fn(x) * w).sum()), FOUR, draw(4, seed=1))
        assert_close(found, w.reshape(4, 4).sum(0))

    @EACH_WAY
    def test_G5_of_a_psum_scatter_with_weights(self, run: Any) -> None:
        w = draw(4)
        fn = mapped(lambda x: lax.psum_scatter(x, "i", tiled=True), FOUR, P("i"), P("i"))
        found = run(pfx.grad(lambda x: (fn(x) * w).sum()), FOUR, draw(16, seed=1))
        assert_close(found, w.repeat(4))

    @EACH_WAY
    def test_G7_of_an_all_to_all_that_only_reshards(self, run: Any) -> None:
        w = draw(8, 8)
        fn = lambda a: lax.all_to_all(a, "i", 1, 0, tiled=True)
        moved = mapped(fn, FOUR, P("i"), P(None, "i"))
        found = run(pfx.grad(lambda a: (moved(a) * w).sum()), FOUR, draw(8, 8, seed=1))
        assert_close(found, w)

    @EACH_WAY
    def test_of_what_it_closes_over(self, run: Any) -> None:
        x = draw(8)

        def loss(w: torch.Tensor) -> torch.Tensor:
            return (mapped(lambda x: x * torch.sin(w), FOUR, P("i"), P("i"))(x) ** 2).sum()

        w = draw(2, seed=1)
        dense = pfx.grad(lambda w: ((x * torch.sin(w.repeat(4))) ** 2).sum())
        assert_close(run(pfx.grad(loss), FOUR, w), dense(w))

    @EACH_WAY
    def test_G9_a_data_parallel_loss_needs_no_psum_of_gradients(self, run: Any) -> None:
        params = {"w": draw(5, 3), "b": draw(3, seed=1)}
        x, y = draw(8, 5, seed=2), draw(8, 3, seed=3)

        def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean()

        parallel = mapped(
            lambda *args: lax.pmean(loss(*args), "i"), FOUR, (P(), P("i"), P("i")), P()
        )
        found = run(lambda *args: gradients(parallel, *args), FOUR, params, x, y)
        assert_close(found, gradients(loss, params, x, y))

    @EACH_WAY
    def test_G13_megatron(self, run: Any) -> None:
        x, up, down = draw(6, 4), draw(4, 8, seed=1), draw(8, 4, seed=2)

        def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return lax.psum(F.gelu(x @ up) @ down, "i")

        dense = lambda x, up, down: ((F.gelu(x @ up) @ down) ** 2).sum()
        part = mapped(block, FOUR, (P(), P(None, "i"), P("i")), P())
        loss = lambda *args: (part(*args) ** 2).sum()
        found = run(lambda *args: gradients(loss, *args), FOUR, x, up, down)
        assert_close(found, gradients(dense, x, up, down))


# An invarying x = 3 beside a varying v = 1, 2, 3, 4.
SPECS = (P(), P("i"))
X, V = torch.tensor(3.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
CAST = lambda x: lax.pcast(x, "i", to="varying")


class TestInside:
    @EACH_WAY
    @pytest.mark.parametrize(
        ("loss", "want"),
        [
            (lambda x, v: (x * v).sum(), 10.0),
            (lambda x, v: lax.psum((x * v).sum(), "i"), 10.0),
            (lambda x, v: lax.pmean((x * v).sum(), "i"), 2.5),
            (lambda x, v: x**2, 6.0),
            (lambda x, v: lax.psum(x, "i"), 4.0),
            (lambda x, v: v.sum(), 0.0),
            (lambda x, v: lax.psum((CAST(x) * v).sum(), "i"), 10.0),
            (lambda x, v: (x * v * lax.stop_gradient(lax.psum(v, "i"))).sum(), 100.0),
        ],
    )
    def test_G11_of_an_invarying_value_is_summed_over_the_devices(
        self, run: Any, loss: Any, want: float
    ) -> None:
        inner = lambda x, v: pfx.grad(lambda x: loss(x, v))(x)
        assert float(run(mapped(inner, FOUR, SPECS, P()), FOUR, X, V)) == pytest.approx(want)

    @EACH_WAY
    @pytest.mark.parametrize(
        "loss", [lambda x, v: (x * v).sum(), lambda x, v: lax.psum((x * v).sum(), "i")]
    )
    def test_G11_of_the_value_cast_to_varying_it_is_each_devices_own(
        self, run: Any, loss: Any
    ) -> None:
        inner = lambda x, v: pfx.grad(lambda x: loss(x, v))(CAST(x))[None]
        assert run(mapped(inner, FOUR, SPECS, P("i")), FOUR, X, V).tolist() == [1.0, 2.0, 3.0, 4.0]

    @EACH_WAY
    @pytest.mark.parametrize(
        "loss", [lambda x, v: (x * v * v).sum(), lambda x, v: lax.psum((x * v * v).sum(), "i")]
    )
    def test_of_a_varying_value_it_varies(self, run: Any, loss: Any) -> None:
        inner = lambda x, v: pfx.grad(lambda v: loss(x, v))(v)
        assert run(mapped(inner, FOUR, SPECS, P("i")), FOUR, X, V).tolist() == [6, 12, 18, 24]

    @EACH_WAY
    def test_over_two_axes_the_sum_is_over_both(self, run: Any) -> None:
        inner = lambda x, v: pfx.grad(lambda x: (x * v).sum())(x)
        v = torch.arange(8.0, dtype=torch.float64)
        assert float(run(mapped(inner, OBLONG, (P(), P(("i", "j"))), P()), OBLONG, X, v)) == 28.0

    @EACH_WAY
    @pytest.mark.parametrize(
        "loss", [lambda x, v: (x**3 * v).sum(), lambda x, v: lax.psum((x**3 * v).sum(), "i")]
    )
    def test_of_order_two(self, run: Any, loss: Any) -> None:
        for twice in (pfx.hessian, lambda f: pfx.grad(pfx.grad(f))):
            inner = lambda x, v, twice=twice: twice(lambda x: loss(x, v))(x)
            assert float(run(mapped(inner, FOUR, SPECS, P()), FOUR, X, V)) == pytest.approx(180.0)

    @EACH_WAY
    def test_a_jacobian_forward_is_local_and_in_reverse_is_summed(self, run: Any) -> None:
        w = draw(2)
        forward = lambda w, v: pfx.jacfwd(lambda w: w * v)(w)[None]
        found = run(mapped(forward, FOUR, SPECS, P("i")), FOUR, w, V)
        assert_close(found, V[:, None, None] * torch.eye(2, dtype=torch.float64))
        reverse = lambda w, v: pfx.jacrev(lambda w: w * v)(w)
        found = run(mapped(reverse, FOUR, SPECS, P()), FOUR, w, V)
        assert_close(found, 10 * torch.eye(2, dtype=torch.float64))

    @EACH_WAY
    def test_per_example_gradients(self, run: Any) -> None:
        def inner(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return pfx.vmap(pfx.grad(lambda x, e: x**2 * e), (None, 0))(CAST(x), v)

        v = draw(8)
        assert_close(run(mapped(inner, FOUR, SPECS, P("i")), FOUR, X, v), 6 * v)

    @EACH_WAY
    def test_of_a_reduced_value_it_is_unreduced_and_summed_once(self, run: Any) -> None:
        def inner(w: torch.Tensor, batches: torch.Tensor) -> torch.Tensor:
            reduced = lax.pcast(w, "i", to="reduced")
            zeros = lax.pcast(
                lax.pcast(torch.zeros_like(w), "i", to="varying"), "i", to="unreduced"
            )

            def body(total: torch.Tensor, x: torch.Tensor) -> Any:
                return total + pfx.grad(lambda w: ((x @ w) ** 2).sum())(reduced), None

            return lax.psum(pfx.scan(body, zeros, batches)[0], "i")

        w, x = draw(3), draw(2, 8, 3, seed=1)
        found = run(mapped(inner, FOUR, (P(), P(None, "i")), P()), FOUR, w, x)
        assert_close(found, pfx.grad(lambda w: ((x @ w) ** 2).sum())(w))


class TestEveryCollective:
    """Every derivative of every collective against that of its dense meaning."""

    MESH = pfx.make_mesh(i=2, j=3)
    AXES = pytest.mark.parametrize("axis", ["i", ("j", "i")], ids=str)
    CASES = pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)

    def both(self, case: Case, axis: Any) -> tuple[Any, Any, torch.Tensor]:
        """A function of a value through the collective, the same densely, and an example."""
        x = case.example(self.MESH, axis)
        w = draw(*case.dense(x, self.MESH, axis).shape, seed=7)
        apply = case.on(self.MESH, axis)
        manual = lambda x: (torch.sin(apply(x**2)) * w).sum()
        dense = lambda x: (torch.sin(case.dense(x**2, self.MESH, axis)) * w).sum()
        return manual, dense, x

    @EACH_WAY
    @AXES
    @CASES
    def test_in_reverse(self, run: Any, case: Case, axis: Any) -> None:
        manual, dense, x = self.both(case, axis)
        assert_close(run(pfx.grad(manual), self.MESH, x), pfx.grad(dense)(x))

    @EACH_WAY
    @AXES
    @CASES
    def test_forward(self, run: Any, case: Case, axis: Any) -> None:
        manual, dense, x = self.both(case, axis)
        t = draw(*x.shape, seed=3)
        found = run(lambda x, t: pfx.jvp(manual, (x,), (t,)), self.MESH, x, t)
        assert_close(found, pfx.jvp(dense, (x,), (t,)))

    @AXES
    @CASES
    def test_G16_of_order_two(self, case: Case, axis: Any) -> None:
        manual, dense, x = self.both(case, axis)
        t = draw(*x.shape, seed=3)
        for along in (
            lambda f: pfx.grad(lambda x: (pfx.grad(f)(x) * t).sum())(x),  # reverse over reverse
            lambda f: pfx.jvp(pfx.grad(f), (x,), (t,))[1],  # forward over reverse
            lambda f: pfx.grad(lambda x: pfx.jvp(f, (x,), (t,))[1])(x),  # reverse over forward
        ):
            assert_close(along(manual), along(dense))

    @AXES
    @CASES
    def test_G16_by_finite_differences(self, case: Case, axis: Any) -> None:
        manual, _, x = self.both(case, axis)
        t, eps = draw(*x.shape, seed=3), 1e-5
        slope = (manual(x + eps * t) - manual(x - eps * t)) / (2 * eps)
        assert float((pfx.grad(manual)(x) * t).sum()) == pytest.approx(float(slope), rel=1e-6)
        change = (pfx.grad(manual)(x + eps * t) - pfx.grad(manual)(x - eps * t)) / (2 * eps)
        found = pfx.jvp(pfx.grad(manual), (x,), (t,))[1]
        torch.testing.assert_close(found, change, rtol=1e-5, atol=1e-5)

    @AXES
    @CASES
    def test_V1_under_vmap(self, case: Case, axis: Any) -> None:
        manual, dense, x = self.both(case, axis)
        xs = torch.stack([x, x + 1, -x])
        assert_close(pfx.vmap(manual)(xs), torch.stack([dense(x) for x in xs]))
        found = pfx.vmap(pfx.grad(manual))(xs)
        assert_close(found, torch.stack([pfx.grad(dense)(x) for x in xs]))

    @EACH_WAY
    @pytest.mark.parametrize("case", EXTREMA, ids=lambda case: case.name)
    def test_an_extremum_has_none(self, run: Any, case: Case) -> None:
        x = case.example(FOUR, "i")
        apply = case.on(FOUR, "i")
        with complains((TypeError, ValueError), case.name, "stop_gradient"):
            run(gradient(apply), FOUR, x)
        with complains((TypeError, ValueError), case.name, "stop_gradient"):
            run(lambda x: pfx.jvp(apply, (x,), (x,)), FOUR, x)

    @EACH_WAY
    @pytest.mark.parametrize("case", EXTREMA, ids=lambda case: case.name)
    def test_an_extremum_of_what_is_held_fixed(self, run: Any, case: Case) -> None:
        fn = lambda x: x - case.apply(lax.stop_gradient(x), "i")
        found = run(gradient(mapped(fn, FOUR, P("i"), P("i"))), FOUR, draw(8))
        assert found.tolist() == [1.0] * 8


class TestVmap:
    @EACH_WAY
    @pytest.mark.parametrize("dims", [(0, 0), (1, 0), (0, 1), (-1, -1)])
    def test_V1_of_a_region(self, run: Any, dims: tuple[int, int]) -> None:
        fn = mapped(lambda x: x - lax.pmean(x, "i") + lax.axis_index("i"), FOUR, P("i"), P("i"))
        x = draw(3, 8)
        found = run(lambda x: pfx.vmap(fn, dims[0], dims[1])(x), FOUR, x.movedim(0, dims[0]))
        assert_close(found, torch.stack([fn(row) for row in x]).movedim(0, dims[1]))

    @EACH_WAY
    def test_V1_over_one_of_its_arguments(self, run: Any) -> None:
        fn = mapped(lambda x, y: lax.psum(x * y, "i"), FOUR, (P("i"), P()), P())
        x, y = draw(8), draw(3, 2, seed=1)
        found = run(lambda x, y: pfx.vmap(fn, (None, 0))(x, y), FOUR, x, y)
        assert_close(found, torch.stack([fn(x, row) for row in y]))

    @EACH_WAY
    def test_V1_over_what_it_closes_over(self, run: Any) -> None:
        x, w = draw(8), draw(3, 2, seed=1)
        over = lambda w: mapped(lambda x: x * w, FOUR, P("i"), P("i"))(x)
        assert_close(
            run(lambda w: pfx.vmap(over)(w), FOUR, w), torch.stack([x * r.repeat(4) for r in w])
        )

    @EACH_WAY
    def test_V1_inside_a_region(self, run: Any) -> None:
        fn = lambda x: pfx.vmap(lambda row: lax.psum_scatter(row, "i", tiled=True))(x)
        x = draw(2, 16)
        found = run(mapped(fn, FOUR, P(None, "i"), P(None, "i")), FOUR, x)
        assert_close(found, x.reshape(2, 4, 4).sum(1))


class TestRemat:
    @staticmethod
    def twice(x: torch.Tensor) -> torch.Tensor:
        """Two gathers, and ops that would each keep a residual."""
        whole = torch.sin(lax.all_gather(x, "i", tiled=True))
        part = lax.psum_scatter(torch.cos(whole), "i", tiled=True)
        return torch.sin(lax.all_gather(part, "i", tiled=True)).sum()[None]

    @EACH_WAY
    def test_R2_changes_no_gradient(self, run: Any) -> None:
        x = draw(8)
        plain = mapped(self.twice, FOUR, P("i"), P("i"))
        again = mapped(pfx.remat(self.twice), FOUR, P("i"), P("i"))
        around = pfx.remat(plain)
        want = gradient(plain)(x)
        for fn in (again, around):
            assert torch.equal(run(gradient(fn), FOUR, x), want)

    def test_R2_keeps_the_input_alone(self) -> None:
        x = draw(8).requires_grad_()
        kept: list[tuple[int, ...]] = []
        again = mapped(pfx.remat(self.twice), FOUR, P("i"), P("i"))
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
        )
        with hooks:
            again(x)
        assert len(kept) == 1 and kept[0][-1] in (2, 8)

    def test_R2_gathers_again(self) -> None:
        def gathers(fn: Any) -> int:
            grad = torch.func.grad_and_value(lambda x: mapped(fn, FOUR, P("i"), P("i"))(x).sum())
            program = pfx.jit(grad, mesh=FOUR).lower(pfx.ShapeDtype((8,), torch.float64))
            return sum(c.count for c in program.collectives() if c.op == "all_gather")

        assert gathers(pfx.remat(self.twice)) > gathers(self.twice)
