"""Manual regions inside and around other things: a compiler, another region, a loop, a batch, Arrays.

What JAX 0.10 does for the same program is what is expected, but where it fails on its own account.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, assert_close, complains, draw, mapped

FOUR = pfx.make_mesh(i=4)
OBLONG = pfx.make_mesh(i=4, j=2)


class TestPartlyManual:
    """Over one axis of two; the other stays with the compiler."""

    @staticmethod
    def region(x: torch.Tensor) -> torch.Tensor:
        def fn(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (2, 8)
            return x + lax.psum(torch.sin(x), "i")

        return mapped(fn, OBLONG, P("i"), P("i"), axis_names=("i",))(x)

    @staticmethod
    def dense(x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(x).reshape(4, 2, 8).sum(0).repeat(4, 1)

    @EACH_WAY
    def test_and_its_gradient(self, run: Any) -> None:
        x = draw(8, 8)
        assert_close(run(self.region, OBLONG, x), self.dense(x))
        found = run(pfx.grad(lambda x: (self.region(x) ** 2).sum()), OBLONG, x)
        assert_close(found, pfx.grad(lambda x: (self.dense(x) ** 2).sum())(x))

    def test_the_other_axis_may_split_what_goes_through(self) -> None:
        x = draw(8, 8)
        spec = P("i", "j")
        step = pfx.jit(self.region, mesh=OBLONG, in_specs=spec, out_specs=spec, check=True)
        assert_close(pfx.device_get(step(x)), self.dense(x))
        moved = {axis for c in step.lower(x).collectives() for axis in c.axes}
        assert moved == {"i"}

    @EACH_WAY
    @pytest.mark.parametrize(
        "fn", [lambda x: lax.psum(x, "j"), lambda x: x + lax.axis_index("j"),
               lambda x: x * lax.axis_size("j"), lambda x: lax.pcast(x, "j", to="varying")],
    )  # fmt: skip
    def test_the_other_axis_is_not_bound(self, run: Any, fn: Any) -> None:
        with complains(NameError, "'j'"):
            run(mapped(fn, OBLONG, P("i"), P("i"), axis_names=("i",)), OBLONG, draw(8, 8))

    def test_nor_can_a_spec_name_it(self) -> None:
        for specs in ((P("j"), P()), (P(), P("j"))):
            with complains(ValueError, "'j'", "axis_names"):
                mapped(lambda x: x, OBLONG, *specs, axis_names=("i",))(draw(8, 8))


class TestNested:
    @staticmethod
    def both(x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (2, 4)
            return x * lax.psum(x, "j") + lax.axis_index("i")

        def outer(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (2, 8)
            specs = P(None, "j")
            return pfx.shard_map(inner, in_specs=specs, out_specs=specs, axis_names=("j",))(x)

        return mapped(outer, OBLONG, P("i"), P("i"), axis_names=("i",))(x)

    @staticmethod
    def dense(x: torch.Tensor) -> torch.Tensor:
        total = (x[:, :4] + x[:, 4:]).repeat(1, 2)
        return x * total + torch.arange(4).repeat_interleave(2)[:, None]

    @EACH_WAY
    def test_one_axis_in_another(self, run: Any) -> None:
        x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
        found = run(self.both, OBLONG, x)
        assert found[0].tolist() == [0, 6, 16, 30, 16, 30, 48, 70]
        assert_close(found, self.dense(x))

    @EACH_WAY
    def test_its_gradient(self, run: Any) -> None:
        found = run(pfx.grad(lambda x: torch.sin(self.both(x)).sum()), OBLONG, draw(8, 8))
        assert_close(found, pfx.grad(lambda x: torch.sin(self.dense(x)).sum())(draw(8, 8)))

    @EACH_WAY
    def test_an_axis_is_bound_once(self, run: Any) -> None:
        inner = lambda x: pfx.shard_map(lambda x: x, in_specs=P(), out_specs=P(), axis_names="i")(x)
        with complains(ValueError, "'i'"):
            run(mapped(inner, OBLONG, P(), P(), axis_names=("i",)), OBLONG, draw(8, 8))

    @EACH_WAY
    def test_what_the_inner_region_returns_is_checked(self, run: Any) -> None:
        inner = lambda x: pfx.shard_map(lambda x: x, in_specs=P(None, "j"), out_specs=P())(x)
        with complains((TypeError, ValueError), "'j'", "psum"):
            run(mapped(inner, OBLONG, P("i"), P("i"), axis_names=("i",)), OBLONG, draw(8, 8))


class TestInside:
    CENTER = staticmethod(mapped(lambda x: x - lax.pmean(x, "i"), FOUR, P("i"), P("i")))

    @staticmethod
    def dense(x: torch.Tensor) -> torch.Tensor:
        return x - x.reshape(4, -1).mean(0).repeat(4)

    @EACH_WAY
    def test_a_loop(self, run: Any) -> None:
        def manual(x: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
            return pfx.scan(lambda x, w: (self.CENTER(torch.sin(x * w)), None), x, ws)[0]

        def dense(x: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
            for w in ws:
                x = self.dense(torch.sin(x * w))
            return x

        x, ws = draw(8), draw(3, seed=1)
        assert_close(run(manual, FOUR, x, ws), dense(x, ws))
        both = lambda fn: pfx.grad(lambda x, ws: (fn(x, ws) ** 2).sum(), argnums=(0, 1))
        assert_close(run(both(manual), FOUR, x, ws), both(dense)(x, ws))

    @EACH_WAY
    def test_a_rematerialized_function(self, run: Any) -> None:
        manual = lambda x: (pfx.remat(lambda x: self.CENTER(torch.sin(x)))(x) ** 2).sum()
        dense = lambda x: (self.dense(torch.sin(x)) ** 2).sum()
        x = draw(8)
        assert_close(run(pfx.grad(manual), FOUR, x), pfx.grad(dense)(x))

    @EACH_WAY
    def test_a_batch_split_over_another_axis(self, run: Any) -> None:
        fn = mapped(lambda x, y: x * y - lax.pmean(x, "i"), OBLONG, (P("i"), P()), P("i"))
        x, y = draw(4, 8), draw(2, seed=1)
        plain = lambda x, y: pfx.vmap(fn, (0, None))(x, y)
        split = lambda x, y: pfx.vmap(fn, (0, None), spmd_axis_name="j")(x, y)
        assert_close(run(split, OBLONG, x, y), run(plain, OBLONG, x, y))
        found = run(pfx.grad(lambda x, y: (split(x, y) ** 2).sum()), OBLONG, x, y)
        assert_close(found, pfx.grad(lambda x, y: (plain(x, y) ** 2).sum())(x, y))

    def test_a_batch_over_an_axis_that_the_region_uses(self) -> None:
        with complains(ValueError, "i"):
            pfx.vmap(self.CENTER, spmd_axis_name="i")(draw(4, 8))


class TestAround:
    def test_arrays_in_arrays_out(self) -> None:
        x = draw(8, 3)
        placed = pfx.device_put(x, OBLONG, P("i"))
        found = mapped(lambda x: lax.psum(x, "i"), OBLONG, P("i"), P())(placed)
        assert isinstance(found, pfx.Array) and not any(found.spec)
        assert_close(pfx.device_get(found), x.reshape(4, 2, 3).sum(0))
        found = mapped(lambda x: x + lax.axis_index("j"), OBLONG, P("i"), P("i", "j"))(placed)
        assert found.spec == P("i", "j")
        assert_close(pfx.device_get(found), torch.cat([x, x + 1], 1))

    def test_as_a_decorator(self) -> None:
        @pfx.shard_map(mesh=FOUR, in_specs=P("i"), out_specs=P())
        def total(x: torch.Tensor) -> torch.Tensor:
            return lax.psum(x.sum(), "i")

        assert float(total(torch.arange(8.0))) == 28.0

    @EACH_WAY
    def test_numbers_go_in_and_come_out(self, run: Any) -> None:
        fn = mapped(lambda x, n: (x * n, 1.5), FOUR, (P("i"), P()), (P("i"), P()))
        out, number = run(lambda x: fn(x, 3.0), FOUR, torch.ones(4))
        assert out.tolist() == [3.0] * 4 and float(number) == 1.5


class TestUnchecked:
    """check=False: what a spec does not mention is taken to be the same, without a look at it."""

    @EACH_WAY
    def test_the_first_device_speaks_for_all(self, run: Any) -> None:
        gather = mapped(
            lambda x: lax.all_gather(x, "i", tiled=True), FOUR, P("i"), P(), check=False
        )
        x = draw(8)
        assert_close(run(gather, FOUR, x), x)
        assert_close(run(pfx.grad(lambda x: gather(x).sum()), FOUR, x), torch.ones_like(x))

    @EACH_WAY
    @pytest.mark.parametrize(
        ("specs", "times"), [((P(), P()), 1.0), ((P(), P("i")), 4.0), ((P("i"), P("i")), 1.0)]
    )
    def test_gradients_are_those_of_the_checked_region(
        self, run: Any, specs: Any, times: float
    ) -> None:
        same = mapped(lambda x: x, FOUR, *specs, check=False)
        assert run(pfx.grad(lambda x: same(x).sum()), FOUR, draw(8)).tolist() == [times] * 8
