"""What would be silently wrong if a region forgot what it is: sharing memory, hidden writes, lost types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, lax
from pfx.errors import ShardingError, TraceError
from tests.sim.manual import EACH_WAY, assert_close, complains, mapped

TWO = pfx.make_mesh(dp=2)
OBLONG = pfx.make_mesh(dp=2, tp=2)
X, W = torch.tensor([1.0, 2.0]), torch.tensor([3.0])


def varying(x: torch.Tensor) -> torch.Tensor:
    return lax.pcast(x, "dp", to="varying")


class TestInPlace:
    """Each device has its own memory: what one writes, no other sees."""

    @EACH_WAY
    def test_into_a_cast(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shared = torch.zeros(1)
            own = varying(shared)
            own += x
            return own, shared

        own, shared = run(mapped(fn, TWO, P("dp"), (P("dp"), P())), TWO, X)
        assert_close((own, shared), (X, torch.zeros(1)))

    @EACH_WAY
    def test_into_what_was_gathered(self, run: Any) -> None:
        fn = lambda x: lax.all_gather(x, "dp", tiled=True).add_(x)
        assert_close(run(mapped(fn, TWO, P("dp"), P("dp")), TWO, X), torch.tensor([2.0, 3, 3, 4]))

    @EACH_WAY
    def test_into_what_was_received(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            mine = x * 1
            lax.ppermute(mine, "dp", [(0, 1), (1, 0)]).add_(100)
            return mine

        assert_close(run(mapped(fn, TWO, P("dp"), P("dp")), TWO, X), X)

    @EACH_WAY
    def test_into_a_part_of_a_value_and_its_gradient(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            x[:, 1:3] = 5.0
            return x

        region = mapped(fn, TWO, P("dp"), P("dp"))
        gradient = pfx.grad(lambda x: (region(x) ** 2).sum())
        assert_close(run(gradient, TWO, torch.ones(2, 4)), torch.tensor([[8.0, 0, 0, 8]] * 2))

    @EACH_WAY
    def test_into_what_all_share(self, run: Any) -> None:
        def statistics(x: torch.Tensor) -> torch.Tensor:
            mean, variance = torch.zeros(1), torch.ones(1)
            return F.batch_norm(x[:, None], mean, variance, training=True)[:, 0]

        def added(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(1)
            total += x
            return total

        for fn in (statistics, added):
            with complains(ShardingError, "'dp'", "pcast", "varying"):
                run(mapped(fn, TWO, P("dp"), P("dp")), TWO, torch.arange(4.0)[: len(X) * 2][:2])

    def test_an_input_stays_as_it_was(self) -> None:
        x = X.clone()
        mapped(lambda x: x.mul_(2), TWO, P("dp"), P("dp"))(x)
        mapped(lambda x: x.mul_(2), TWO, P(), P())(x)
        assert_close(x, X)


class TestGradients:
    """What leaves a region on the way back is to each axis what came in."""

    @EACH_WAY
    def test_through_an_op_called_by_its_name(self, run: Any) -> None:
        fn = lambda w, x: lax.psum(torch.ops.aten.mul.Tensor(w, x), "dp")
        region = mapped(fn, TWO, (P(), P("dp")), P())
        gradient = pfx.grad(lambda w, x: region(w, x).sum())
        assert_close(run(gradient, TWO, W, X), torch.tensor([3.0]))

    def test_through_a_function_that_knows_no_regions(self) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(w, x)
                return w * x

            @staticmethod
            def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
                w, x = ctx.saved_tensors
                return cotangent * x, cotangent * w

        w = W.clone().requires_grad_()
        region = mapped(lambda w, x: lax.psum(Product.apply(w, x), "dp"), TWO, (P(), P("dp")), P())
        with complains(ShardingError, "'dp'", "invarying", "pcast"):
            region(w, X).sum().backward()

    def test_by_copies_of_a_loss(self) -> None:
        loss = lambda r: (r * r).sum()
        fn = lambda w: lax.psum(pfx.grad(loss)(lax.pcast(w, "dp", to="reduced")), "dp")
        with complains(TypeError, "reduced", "'dp'", "pcast"):
            mapped(fn, TWO, P(), P())(W)

    @EACH_WAY
    def test_by_copies_beside_blocks(self, run: Any) -> None:
        loss = lambda r, x: (r * x).sum() + (r * r).sum()
        fn = lambda w, x: lax.psum(pfx.grad(loss)(lax.pcast(w, "dp", to="reduced"), x), "dp")
        # Each device adds the second term, and so the sum over the devices has it twice.
        expected = torch.tensor([1.0 + 2.0 + 2 * (2 * 3.0)])
        assert_close(run(mapped(fn, TWO, (P(), P("dp")), P()), TWO, W, X), expected)

    def test_a_custom_rule_that_forgets_the_sum(self) -> None:
        @pfx.custom_vjp
        def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return w * x

        product.defvjp(lambda w, x: (w * x, (w, x)), lambda r, ct: (ct * r[1], ct * r[0]))
        region = mapped(lambda w, x: lax.psum(product(w, x), "dp"), TWO, (P(), P("dp")), P())
        with complains(TraceError, "w", "varying", "'dp'", "psum"):
            pfx.grad(lambda w: region(w, X).sum())(W)

    def test_a_cotangent_of_another_kind(self) -> None:
        fn = lambda w, x: pfx.vjp(lambda w: w * 2, w)[1](x)[0]
        with complains(TypeError, "'dp'", "psum"):
            mapped(fn, TWO, (P(), P("dp")), P("dp"))(W, X)


class TestForms:
    def test_devices_must_agree_on_a_shape(self) -> None:
        fn = lambda x: x[x > 1].sum()[None]
        with complains(TraceError, "'dp'"):
            mapped(fn, TWO, P("dp"), P("dp"))(torch.arange(4.0))

    def test_an_index_out_of_range_is_an_error(self) -> None:
        last = lambda x: torch.arange(4.0)[lax.axis_index("dp") - 1][None]
        assert_close(mapped(last, TWO, P("dp"), P("dp"))(X), torch.tensor([3.0, 0.0]))
        with pytest.raises(IndexError):
            beyond = lambda x: torch.arange(4.0)[lax.axis_index("dp") + 4][None]
            mapped(beyond, TWO, P("dp"), P("dp"))(X)

    @EACH_WAY
    def test_like_constructors_of_a_varying_value(self, run: Any) -> None:
        for made in (torch.ones_like, torch.zeros_like, lambda x: x.new_ones(1)):
            fn = lambda x, made=made: lax.psum(made(x), "dp")
            assert_close(run(mapped(fn, TWO, P("dp"), P()), TWO, X), 2 * made(X[:1]))

    @EACH_WAY
    def test_a_copy_of_addends_and_of_copies(self, run: Any) -> None:
        fn = lambda x: lax.psum(pfx.constrain(lax.pcast(x, "dp", to="unreduced"), P()), "dp")
        assert_close(run(mapped(fn, TWO, P("dp"), P()), TWO, X), torch.tensor([3.0]))
        assert_close(
            run(mapped(lambda w: lax.pcast(w, "dp", to="reduced"), TWO, P(), P()), TWO, W), W
        )


class TestBatchOverAnAxis:
    """vmap(spmd_axis_name=…) says where the batch lives; what is computed stays the same."""

    def same(self, fn: Any, *args: torch.Tensor, in_dims: Any) -> None:
        split = lambda *args: pfx.vmap(fn, in_dims, spmd_axis_name="tp")(*args)
        expected = pfx.vmap(fn, in_dims)(*args)
        assert_close(split(*args), expected)
        compiled = pfx.jit(split, mesh=OBLONG, check=True)
        assert_close(pfx.device_get(compiled(*args)), expected)

    def test_a_gradient_inside(self) -> None:
        inner = lambda x, w: pfx.grad(lambda w: lax.psum(x * w, "dp").sum())(w)
        region = pfx.shard_map(inner, mesh=OBLONG, in_specs=(P("dp"), P()), out_specs=P())
        self.same(region, torch.arange(8.0).reshape(4, 2), torch.ones(1), in_dims=(0, None))

    def test_a_closure(self) -> None:
        def fn(k: torch.Tensor) -> torch.Tensor:
            inner = lambda x: lax.psum(x * k, "dp")
            return pfx.shard_map(inner, mesh=OBLONG, in_specs=P("dp"), out_specs=P())(torch.ones(2))

        self.same(fn, torch.arange(4.0), in_dims=0)

    def test_it_is_split_over_the_axis(self) -> None:
        region = pfx.shard_map(
            lambda x: lax.psum(torch.sin(x), "dp"), mesh=OBLONG, in_specs=P("dp"), out_specs=P()
        )
        split = lambda x: pfx.vmap(region, spmd_axis_name="tp")(x)
        program = pfx.jit(split, mesh=OBLONG).lower(torch.ones(4, 2))
        assert program.outputs[0].layout.dims == (("tp",), ())
        assert [c.op for c in program.collectives()] == ["all_reduce"]
        with complains(ShardingError, "3", "2", "divisible"):
            pfx.jit(split, mesh=OBLONG).lower(torch.ones(3, 2))


@EACH_WAY
def test_a_value_that_is_the_same_is_not_split_where_it_is_counted(run: Any) -> None:
    """Whatever the readers of a sum would like, its operand is the same on all devices."""
    region = mapped(lambda x: lax.psum(torch.sin(x), "dp"), TWO, P(), P())
    x = torch.arange(8.0)
    assert_close(run(lambda x: region(x), TWO, x), 2 * torch.sin(x))
    for specs in ({"out_specs": P("dp")}, {"in_specs": P("dp"), "out_specs": P("dp")}):
        found = pfx.jit(lambda x: region(x), mesh=TWO, check=True, **specs)(x)
        assert_close(pfx.device_get(found), 2 * torch.sin(x))
    tiled = lambda w: mapped(lambda: torch.sin(w), TWO, (), P("dp"))()
    found = pfx.jit(tiled, mesh=TWO, in_specs=P("dp"), check=True)(x)
    assert_close(pfx.device_get(found), torch.sin(x).repeat(2))


def test_a_region_on_another_mesh_than_the_program() -> None:
    region = mapped(lambda x: lax.psum(x, "dp"), TWO, P("dp"), P())
    looped = lambda x: pfx.scan(lambda c, _: (c + region(x).sum(), None), x.sum(), x)[0]
    for fn in (region, looped):
        with complains(ShardingError, "dp=2", "dp=4", "axis_names"):
            pfx.jit(lambda x, fn=fn: fn(x), mesh=pfx.make_mesh(dp=4)).lower(torch.ones(4))
