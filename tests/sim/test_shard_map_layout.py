"""Which block of a value each device of a manual region has, and which specs and types are refused.

The number in a test's name is a case that JAX 0.10 agrees with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, alone, assert_close, complains, draw, mapped

FOUR = pfx.make_mesh(i=4)
SQUARE = pfx.make_mesh(i=2, j=2)
OBLONG = pfx.make_mesh(i=4, j=2)
SAME = lambda x: x


class TestBlocks:
    @EACH_WAY
    def test_L1_a_device_holds_the_block_of_its_coordinates(self, run: Any) -> None:
        mesh, a = pfx.make_mesh(x=2, y=2, z=2), torch.arange(64.0).reshape(8, 8)
        fn = mapped(lambda a: a[None], mesh, P("z", ("x", "y")), P(("x", "y", "z")))
        found = run(fn, mesh, a)
        for at in mesh.coordinates():
            x, y, z = at["x"], at["y"], at["z"]
            want = a[4 * z : 4 * z + 4, 2 * (2 * x + y) : 2 * (2 * x + y) + 2]
            assert torch.equal(found[4 * x + 2 * y + z], want)

    @EACH_WAY
    @pytest.mark.parametrize(
        "spec", [P(), P("i"), P("j"), P(None, "i"), P("j", "i"), P(("i", "j")), P(None, ("j", "i"))]
    )
    def test_L1_the_same_spec_in_and_out_changes_nothing(self, run: Any, spec: P) -> None:
        x = draw(8, 16, 3)
        assert torch.equal(run(mapped(SAME, OBLONG, spec, spec), OBLONG, x), x)

    @EACH_WAY
    def test_L1_the_order_of_the_axes_is_the_order_of_the_blocks(self, run: Any) -> None:
        fn = mapped(SAME, OBLONG, P(("i", "j")), P(("j", "i")))
        x = torch.arange(8)
        assert torch.equal(run(fn, OBLONG, x), x.reshape(4, 2).T.reshape(8))

    @EACH_WAY
    def test_L3_a_constant_is_tiled_over_what_its_spec_names(self, run: Any) -> None:
        c = torch.arange(6.0).reshape(2, 3)
        make = lambda: torch.arange(6.0).reshape(2, 3)
        for spec, times in ((P("i", "j"), (4, 2)), (P("j", "i"), (2, 4)), (P(("i", "j")), (8, 1))):
            assert torch.equal(run(mapped(make, OBLONG, (), spec), OBLONG), c.repeat(*times))
        assert torch.equal(run(mapped(make, OBLONG, (), P()), OBLONG), c)

    @EACH_WAY
    def test_L3_and_so_is_any_value_that_does_not_vary(self, run: Any) -> None:
        x = draw(2, 3)
        found = run(mapped(SAME, OBLONG, P(), P(None, "i")), OBLONG, x)
        assert torch.equal(found, x.repeat(1, 4))
        total = run(mapped(lambda x: lax.psum(x, "i"), FOUR, P("i"), P("i")), FOUR, torch.ones(4))
        assert total.tolist() == [4.0] * 4

    @EACH_WAY
    def test_L5_specs_concatenate_blocks_and_do_not_transpose(self, run: Any) -> None:
        x = torch.arange(16.0).reshape(4, 4)
        found = run(mapped(SAME, FOUR, P("i", None), P(None, "i")), FOUR, x)
        assert torch.equal(found, x.reshape(1, 16))

    @EACH_WAY
    def test_blocks_keep_the_rank(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            assert tuple(x.shape) == (1, 8, 3)
            return x

        run(mapped(fn, OBLONG, P("i"), P("i")), OBLONG, draw(4, 8, 3))

    @EACH_WAY
    def test_a_dim_of_size_zero(self, run: Any) -> None:
        assert run(mapped(SAME, FOUR, P("i"), P("i")), FOUR, torch.zeros(0, 3)).shape == (0, 3)

    @EACH_WAY
    def test_what_is_made_inside_is_the_same_on_all(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2) + torch.arange(2.0)

        found = run(mapped(fn, FOUR, P("i"), P()), FOUR, torch.ones(4))
        assert found.tolist() == [0.0, 1.0]

    @EACH_WAY
    def test_what_is_made_like_a_varying_value_varies(self, run: Any) -> None:
        make = lambda x: torch.zeros_like(x)
        found = run(mapped(make, FOUR, P("i"), P("i")), FOUR, torch.ones(8))
        assert found.tolist() == [0.0] * 8


class TestTrees:
    @EACH_WAY
    def test_a_spec_is_for_all_leaves_below_it(self, run: Any) -> None:
        tree = {"a": draw(4), "b": (draw(8, 2), draw(4, 3))}
        fn = mapped(lambda t: pfx.tree.map(lambda x: 2 * x, t), FOUR, P("i"), P("i"))
        assert_close(run(fn, FOUR, tree), pfx.tree.map(lambda x: 2 * x, tree))

    @EACH_WAY
    def test_each_leaf_may_have_its_own(self, run: Any) -> None:
        tree = {"a": draw(4), "b": (draw(8, 2), draw(4, 3))}
        specs = {"a": P(), "b": (P("i", "j"), P("i"))}
        assert_close(run(mapped(SAME, OBLONG, (specs,), specs), OBLONG, tree), tree)

    @EACH_WAY
    def test_a_none_among_the_in_specs_passes_its_argument_through(self, run: Any) -> None:
        def fn(x: torch.Tensor, scale: Any, nothing: Any) -> torch.Tensor:
            assert nothing is None
            return x * scale

        x = draw(4)
        found = run(lambda x: mapped(fn, FOUR, (P("i"), None, None), P("i"))(x, 3, None), FOUR, x)
        assert_close(found, 3 * x)

    def test_a_none_among_the_in_specs_passes_even_what_is_no_tensor(self) -> None:
        def fn(x: torch.Tensor, name: Any) -> torch.Tensor:
            assert name == "gelu"
            return x

        x = draw(4)
        assert torch.equal(mapped(fn, FOUR, (P("i"), None), P("i"))(x, "gelu"), x)

    @EACH_WAY
    def test_a_none_that_is_returned_stays_one(self, run: Any) -> None:
        out, nothing = run(mapped(lambda x: (x, None), FOUR, P("i"), P("i")), FOUR, draw(4))
        assert out.shape == (4,) and nothing is None

    @pytest.mark.parametrize("specs", [(P("i"),), (P("i"), P(), P())])
    def test_as_many_in_specs_as_arguments(self, specs: Any) -> None:
        with complains(ValueError, "in_specs"):
            mapped(lambda a, b: a, FOUR, specs, P("i"))(draw(4), draw(4))

    def test_the_out_specs_have_the_form_of_the_result(self) -> None:
        for specs in ((P("i"),), {"a": P("i")}):
            with complains(ValueError, "out_specs"):
                mapped(lambda a: (a, a), FOUR, P("i"), specs)(draw(4))


class TestErrors:
    @EACH_WAY
    def test_E1_a_dim_that_does_not_divide(self, run: Any) -> None:
        fn = mapped(SAME, FOUR, ({"w": P("i")},), {"w": P("i")})
        with complains(ValueError, "evenly divisible", "w", "6", "4", "'i'"):
            run(fn, FOUR, {"w": torch.arange(6.0)})

    @EACH_WAY
    def test_E1_over_two_axes(self, run: Any) -> None:
        with complains(ValueError, "evenly divisible", "12", "8", "'i'", "'j'"):
            run(mapped(SAME, OBLONG, P(("i", "j")), P()), OBLONG, torch.arange(12.0))

    @EACH_WAY
    @pytest.mark.parametrize("spec", [P("i", "j"), P(None, None)])
    def test_E2_an_in_spec_longer_than_the_rank(self, run: Any, spec: P) -> None:
        with pytest.raises(ValueError, match=r"(?s)(rank|dims?\b).*\b1\b|\b1\b.*(rank|dims?\b)"):
            run(mapped(SAME, OBLONG, spec, P()), OBLONG, torch.arange(16.0))

    @EACH_WAY
    @pytest.mark.parametrize("fn", [SAME, lambda x: x.sum()])
    def test_E2_an_out_spec_longer_than_the_rank(self, run: Any, fn: Any) -> None:
        spec = P("i", "j") if fn is SAME else P("i")
        with pytest.raises(ValueError, match=r"(?s)out_specs.*(rank|dims?\b)|(rank|dims?\b).*out"):
            run(mapped(fn, OBLONG, P("i"), spec), OBLONG, torch.arange(16.0))

    @EACH_WAY
    def test_E3_an_axis_that_the_out_spec_omits(self, run: Any) -> None:
        with complains((TypeError, ValueError), "'i'", "psum"):
            run(mapped(SAME, FOUR, P("i"), P()), FOUR, torch.arange(4.0))

    @EACH_WAY
    def test_E3_names_the_leaf_and_only_the_axes_that_are_missing(self, run: Any) -> None:
        fn = mapped(lambda x: {"good": x, "bad": x}, OBLONG, P(("i", "j")),
                    {"good": P(("i", "j")), "bad": P("j")})  # fmt: skip
        with complains((TypeError, ValueError), "'i'", "psum", "bad"):
            run(fn, OBLONG, torch.arange(8.0))

    @EACH_WAY
    def test_E3_also_over_an_axis_of_size_one(self, run: Any) -> None:
        mesh = pfx.make_mesh(i=1, j=2)
        with complains((TypeError, ValueError), "'i'"):
            run(mapped(SAME, mesh, P("i"), P()), mesh, torch.arange(4.0))

    @EACH_WAY
    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: lax.psum(x, "k"),
            lambda x: lax.psum(x, ("i", "k")),
            lambda x: x * lax.psum(1, "k"),
            lambda x: lax.pmean(x, "k"),
            lambda x: lax.pmax(x, "k"),
            lambda x: lax.all_gather(x, "k"),
            lambda x: lax.psum_scatter(x, "k"),
            lambda x: lax.all_to_all(x, "k", 0, 0),
            lambda x: lax.ppermute(x, "k", [(0, 1)]),
            lambda x: lax.pcast(x, "k", to="varying"),
            lambda x: x * lax.axis_index("k"),
            lambda x: x * lax.axis_size("k"),
        ],
    )
    def test_E5_an_axis_that_is_not_bound(self, run: Any, fn: Any) -> None:
        with complains(NameError, "k"):
            run(mapped(fn, FOUR, P("i"), P("i")), FOUR, torch.arange(4.0))

    def test_E5_outside_of_any_region(self) -> None:
        with complains(NameError, "i", "shard_map"):
            lax.psum(torch.ones(2), "i")

    @pytest.mark.parametrize("spec", [P("i", "i"), P(("i", "i"))])
    def test_an_axis_named_twice(self, spec: P) -> None:
        for specs in ((spec, P()), (P(), spec)):
            with complains(ValueError, "i"):
                mapped(SAME, SQUARE, *specs)(torch.ones(4, 4))

    def test_an_axis_that_the_mesh_lacks(self) -> None:
        for specs in ((P("k"), P()), (P(), P("k"))):
            with complains(ValueError, "k"):
                mapped(SAME, SQUARE, *specs)(torch.ones(4, 4))
        with complains(ValueError, "k"):
            mapped(SAME, SQUARE, P(), P(), axis_names=("k",))(torch.ones(4, 4))


class TestTypes:
    @EACH_WAY
    def test_T2_a_carry_that_swaps_a_varying_and_an_invarying_leaf(self, run: Any) -> None:
        def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
            body = lambda carry, _: ((carry[1], carry[0]), None)
            return pfx.scan(body, (x, y), torch.zeros(4))[0]

        with complains(TypeError, "pcast", "'i'", "varying"):
            run(mapped(fn, FOUR, (P("i"), P()), (P("i"), P("i"))), FOUR, draw(8), draw(2))

    @EACH_WAY
    def test_T2_after_the_cast_it_runs(self, run: Any) -> None:
        def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
            body = lambda carry, _: ((carry[1], carry[0]), None)
            start = (x, lax.pcast(y, "i", to="varying"))
            return pfx.scan(body, start, torch.zeros(3))[0]

        x, y = draw(8), draw(2)
        specs = (P("i"), P("i"))
        found = run(mapped(fn, FOUR, (P("i"), P()), specs), FOUR, x, y)
        assert_close(found, (y.repeat(4), x))

    @EACH_WAY
    def test_T2_a_carry_that_stops_varying(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> Any:
            return pfx.scan(lambda c, _: (lax.psum(c, "i"), None), x, torch.zeros(3))[0]

        with complains(TypeError, "'i'"):
            run(mapped(fn, FOUR, P("i"), P("i")), FOUR, draw(8))

    def test_T4_an_if_on_a_fully_reduced_value(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return 2 * x if lax.psum(x.sum(), ("i", "j")) > 0 else -x

        g = mapped(fn, SQUARE, P(("i", "j")), P(("i", "j")))
        x = torch.arange(4.0)
        assert torch.equal(g(x), 2 * x) and torch.equal(g(-x), x)
        assert pfx.grad(lambda x: g(x).sum())(x).tolist() == [2.0] * 4

    @pytest.mark.parametrize(
        "test",
        [lambda x: x.sum() > 0, lambda x: lax.psum(x.sum(), "i") > 0, lambda x: x.amax() > 0],
    )
    def test_T4_an_if_on_a_varying_value(self, test: Any) -> None:
        fn = mapped(lambda x: x if test(x) else -x, SQUARE, P(("i", "j")), P(("i", "j")))
        with complains((TypeError, ValueError), "'j'"):
            fn(torch.ones(4))

    @EACH_WAY
    def test_mixed_operands_are_cast_to_varying(self, run: Any) -> None:
        def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            both = torch.cat([x * y, torch.where(x > 0, y, x)])
            return both + lax.pcast(y, "i", to="reduced").repeat(2)

        x, y = draw(8), draw(2)
        found = run(mapped(fn, FOUR, (P("i"), P()), P("i")), FOUR, x, y)
        blocks = [torch.cat([b * y, torch.where(b > 0, y, b)]) + y.repeat(2) for b in x.chunk(4)]
        assert_close(found, torch.cat(blocks))

    def test_strictly_each_cast_must_be_written(self) -> None:
        x, y = draw(8), draw(2)
        specs = (P("i"), P()), P("i")
        with complains((TypeError, ValueError), "pcast", "'i'", "varying"):
            mapped(lambda x, y: x * y, FOUR, *specs, strict=True)(x, y)
        fn = lambda x, y: x * lax.pcast(y, "i", to="varying")
        assert_close(mapped(fn, FOUR, *specs, strict=True)(x, y), x * y.repeat(4))


ALLOWED = {
    ("varying", "unreduced"), ("invarying", "varying"), ("invarying", "reduced"),
    ("reduced", "varying"),
}  # fmt: skip
MADE = {
    "varying": lambda x: lax.pcast(x, "i", to="varying"),
    "invarying": lambda x: x,
    "reduced": lambda x: lax.pcast(x, "i", to="reduced"),
    "unreduced": lambda x: lax.pcast(lax.pcast(x, "i", to="varying"), "i", to="unreduced"),
}


class TestCast:
    @pytest.mark.parametrize("to", ["varying", "unreduced", "reduced"])
    @pytest.mark.parametrize("source", list(MADE))
    def test_is_what_moves_nothing(self, source: str, to: str) -> None:
        cast = lambda x: lax.pcast(MADE[source](x), "i", to=to)
        if (source, to) in ALLOWED:
            finish = {
                "varying": lambda x: lax.psum(cast(x), "i"),
                "unreduced": lambda x: lax.psum(cast(x), "i"),
                "reduced": lambda x: lax.psum(lax.pcast(cast(x), "i", to="varying"), "i"),
            }
            found = mapped(finish[to], FOUR, P(), P())(torch.ones(2))
            assert found.tolist() == [4.0, 4.0]
        elif source != to:
            with complains((TypeError, ValueError), "'i'"):
                mapped(cast, FOUR, P(), P("i"))(torch.ones(2))

    @EACH_WAY
    def test_a_sum_of_addends_is_their_value(self, run: Any) -> None:
        x = draw(8, 3)
        whole = lambda x: lax.psum(lax.pcast(x, "i", to="unreduced"), "i")
        assert_close(run(mapped(whole, FOUR, P("i"), P()), FOUR, x), x.reshape(4, 2, 3).sum(0))
        part = lambda x: lax.psum_scatter(lax.pcast(x, "i", to="unreduced"), "i", tiled=True)
        x = draw(16, 3)
        assert_close(run(mapped(part, FOUR, P("i"), P("i")), FOUR, x), x.reshape(4, 4, 3).sum(0))

    def test_addends_are_no_operands(self) -> None:
        unreduced = MADE["unreduced"]
        for fn in (torch.sin, lambda u: u * u, lambda u: u + 1.0, torch.abs, lambda u: u.amax()):
            with complains((TypeError, ValueError), "'i'", "unreduced"):
                mapped(lambda x, fn=fn: lax.psum(fn(unreduced(x)), "i"), FOUR, P(), P())(draw(2))


@pytest.mark.parametrize("run", [alone])
def test_unreduced_specs_hand_addends_out_and_in(run: Any) -> None:
    addends = mapped(SAME, FOUR, P("i"), P(unreduced="i"))
    total = mapped(lambda u: lax.psum(u, "i"), FOUR, P(unreduced="i"), P())
    x = draw(8, 3)
    assert_close(run(lambda x: total(addends(x)), FOUR, x), x.reshape(4, 2, 3).sum(0))
