"""What each collective of a manual region computes, alone and compiled, against its dense meaning.

The number in a test's name is a case that JAX 0.10 agrees with; the laws after them take every collective
over every axis, dim and mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax
from tests.sim.manual import (
    EACH_WAY,
    EXTREMA,
    LINEAR,
    Case,
    assert_close,
    complains,
    draw,
    mapped,
    ring,
)

FOUR = pfx.make_mesh(i=4)
SQUARE = pfx.make_mesh(i=2, j=2)
OBLONG = pfx.make_mesh(i=4, j=2)
CUBE = pfx.make_mesh(i=2, j=3, k=2)
AXES = ("i", "j", ("i", "j"), ("j", "i"))
NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


def over(fn: Any, axis: Any = "i", **options: Any) -> Any:
    """The function with the axis, and its options, filled in."""
    return lambda x: fn(x, axis, **options)


class TestSum:
    @EACH_WAY
    def test_C1_psum_adds_the_blocks(self, run: Any) -> None:
        x = torch.arange(16.0)
        found = run(mapped(over(lax.psum), FOUR, P("i"), P()), FOUR, x)
        assert found.tolist() == x.reshape(4, 4).sum(0).tolist()

    @EACH_WAY
    def test_C2_over_one_axis_of_two(self, run: Any) -> None:
        x = torch.arange(16.0).reshape(4, 4)
        found = run(mapped(over(lax.psum), SQUARE, P("i", "j"), P(None, "j")), SQUARE, x)
        assert torch.equal(found, x[:2] + x[2:])

    @EACH_WAY
    @pytest.mark.parametrize("axis", [("i", "j"), ("j", "i")])
    def test_C2_over_both_axes(self, run: Any, axis: Any) -> None:
        x = torch.arange(16.0).reshape(4, 4)
        found = run(mapped(over(lax.psum, axis), SQUARE, P("i", "j"), P()), SQUARE, x)
        assert torch.equal(found, x[:2, :2] + x[:2, 2:] + x[2:, :2] + x[2:, 2:])

    @EACH_WAY
    def test_C3_psum_of_a_number_is_a_number(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            found = (lax.psum(1, "i"), lax.psum(1, ("i", "j")), lax.psum(2.5, "j"))
            assert found == (4, 8, 5.0) and [type(n) for n in found] == [int, int, float]
            return x * found[1]

        assert run(mapped(fn, OBLONG, P("i"), P("i")), OBLONG, torch.ones(4)).tolist() == [8.0] * 4

    @EACH_WAY
    def test_C5_a_psum_of_booleans_counts_in_int32(self, run: Any) -> None:
        x = torch.tensor([True, False, True, True])
        found = run(mapped(over(lax.psum), FOUR, P("i"), P()), FOUR, x)
        assert found.tolist() == [3] and found.dtype == torch.int32

    @EACH_WAY
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
    def test_C5_a_pmean_of_booleans_or_integers_is_a_float(self, run: Any, dtype: Any) -> None:
        x = torch.tensor([1, 0, 1, 1]).to(dtype)
        found = run(mapped(over(lax.pmean), FOUR, P("i"), P()), FOUR, x)
        assert found.tolist() == [0.75] and found.dtype == torch.float32

    @EACH_WAY
    def test_C6_extrema_are_elementwise(self, run: Any) -> None:
        x = draw(8, 3)
        for fn, method in ((lax.pmax, torch.amax), (lax.pmin, torch.amin)):
            found = run(mapped(over(fn), FOUR, P("i"), P()), FOUR, x)
            assert torch.equal(found, method(x.reshape(4, 2, 3), 0))

    @EACH_WAY
    @pytest.mark.parametrize("dtype", [*NUMBERS, torch.bool])
    def test_C6_extrema_keep_the_dtype(self, run: Any, dtype: Any) -> None:
        x = torch.tensor([1, 0, 1, 0]).to(dtype)
        most = run(mapped(over(lax.pmax), FOUR, P("i"), P()), FOUR, x)
        least = run(mapped(over(lax.pmin), FOUR, P("i"), P()), FOUR, x)
        assert (most.dtype, least.dtype) == (dtype, dtype)
        assert (int(most), int(least)) == (1, 0)

    @EACH_WAY
    @pytest.mark.parametrize("fn", [lax.psum, lax.pmax, lax.pmin])
    def test_C6_pytrees_keep_their_dtypes(self, run: Any, fn: Any) -> None:
        tree = {
            "a": (torch.arange(4.0), torch.arange(8, dtype=torch.int32)),
            "b": [torch.ones(4, dtype=torch.float64), None],
        }
        found = run(mapped(over(fn), FOUR, P("i"), P()), FOUR, tree)
        assert found["b"][1] is None
        dtypes = [x.dtype for x in (*found["a"], found["b"][0])]
        assert dtypes == [torch.float32, torch.int32, torch.float64]
        assert [tuple(x.shape) for x in found["a"]] == [(1,), (2,)]

    @EACH_WAY
    def test_a_value_that_does_not_vary_is_counted_once_a_device(self, run: Any) -> None:
        x = torch.tensor([1.0, 2.0])
        for fn, want in ((lax.psum, 4 * x), (lax.pmean, x), (lax.pmax, x), (lax.pmin, x)):
            assert torch.equal(run(mapped(over(fn), FOUR, P(), P()), FOUR, x), want)

    @EACH_WAY
    def test_a_value_that_varies_over_one_axis_is_summed_over_two(self, run: Any) -> None:
        x = torch.arange(4.0)
        found = run(mapped(over(lax.psum, ("i", "j")), OBLONG, P("i"), P()), OBLONG, x)
        assert found.tolist() == [12.0]

    @EACH_WAY
    def test_over_an_axis_of_size_one(self, run: Any) -> None:
        mesh, x = pfx.make_mesh(i=1, j=2), torch.arange(4.0)
        for fn in (lax.psum, lax.pmax, lax.all_gather):
            options: dict[str, Any] = {"tiled": True, "to": "invarying"}
            made = over(fn, **options) if fn is lax.all_gather else over(fn)
            assert torch.equal(run(mapped(made, mesh, P("i"), P()), mesh, x), x)


class TestGather:
    @EACH_WAY
    def test_C8_tiled_gives_each_device_the_whole(self, run: Any) -> None:
        x = torch.arange(16.0).reshape(8, 2)
        found = run(mapped(over(lax.all_gather, tiled=True), FOUR, P("i"), P("i")), FOUR, x)
        assert torch.equal(found, x.repeat(4, 1))

    @EACH_WAY
    def test_C8_untiled_stacks_a_new_dim(self, run: Any) -> None:
        x = torch.arange(16.0).reshape(8, 2)
        found = run(mapped(over(lax.all_gather), FOUR, P("i"), P("i")), FOUR, x)
        assert torch.equal(found, x.reshape(4, 2, 2).repeat(4, 1, 1))

    @EACH_WAY
    def test_C8_a_scalar_is_stacked(self, run: Any) -> None:
        fn = lambda x: lax.all_gather(x.sum(), "i", to="invarying")
        found = run(mapped(fn, FOUR, P("i"), P()), FOUR, torch.arange(8.0))
        assert found.tolist() == [1.0, 5.0, 9.0, 13.0]

    @EACH_WAY
    def test_C10_its_result_still_varies(self, run: Any) -> None:
        gather = mapped(over(lax.all_gather, tiled=True), FOUR, P("i"), P())
        with complains((TypeError, ValueError), "i", "psum"):
            run(gather, FOUR, torch.arange(4.0))

    @EACH_WAY
    def test_C10_unless_it_is_said_not_to(self, run: Any) -> None:
        gather = mapped(over(lax.all_gather, tiled=True, to="invarying"), FOUR, P("i"), P())
        x = torch.arange(4.0)
        assert torch.equal(run(gather, FOUR, x), x)
        found = run(pfx.grad(lambda x: gather(x).sum()), FOUR, x)
        assert found.tolist() == [1.0] * 4

    @EACH_WAY
    def test_C13_a_gather_of_a_scatter_is_a_sum(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            part = lax.psum_scatter(x, "i", dim=-1, tiled=True)
            return lax.all_gather(part, "i", dim=-1, tiled=True, to="invarying")

        x = draw(4, 3, 8)
        assert_close(run(mapped(fn, FOUR, P("i"), P()), FOUR, x), x.sum(0, keepdim=True))

    @EACH_WAY
    def test_C11_psum_scatter_of_a_partial_matmul(self, run: Any) -> None:
        fn = lambda a, b: lax.psum_scatter(a @ b, "i", tiled=True)
        a, b = draw(8, 12), draw(12, 5, seed=1)
        found = run(mapped(fn, FOUR, (P(None, "i"), P("i")), P("i")), FOUR, a, b)
        assert_close(found, a @ b)

    @EACH_WAY
    @pytest.mark.parametrize("dim", [3, -4])
    def test_C13_a_dim_that_there_is_not(self, run: Any, dim: int) -> None:
        gather = mapped(over(lax.all_gather, tiled=True, dim=dim), FOUR, P("i"), P("i"))
        with complains((ValueError, IndexError), str(dim)):
            run(gather, FOUR, draw(4, 2, 2))

    @EACH_WAY
    @pytest.mark.parametrize("tiled", [False, True])
    def test_C11_a_dim_that_does_not_divide(self, run: Any, tiled: bool) -> None:
        scatter = mapped(over(lax.psum_scatter, tiled=tiled), FOUR, P("i"), P("i"))
        with complains(ValueError, "3", "4", "psum_scatter"):
            run(scatter, FOUR, draw(12, 2))


class TestPermute:
    @EACH_WAY
    @pytest.mark.parametrize("n", [2, 4, 8])
    def test_C14_a_ring_permute_is_a_roll(self, run: Any, n: int) -> None:
        mesh, x = pfx.make_mesh(i=n), torch.arange(2.0 * n)
        found = run(mapped(over(lax.ppermute, perm=ring(n)), mesh, P("i"), P("i")), mesh, x)
        assert torch.equal(found, x.roll(2))

    @EACH_WAY
    def test_C14_who_is_sent_nothing_has_zeros(self, run: Any) -> None:
        x = torch.arange(1.0, 9.0)
        fn = mapped(over(lax.ppermute, perm=[(0, 1), (1, 2)]), FOUR, P("i"), P("i"))
        assert run(fn, FOUR, x).tolist() == [0, 0, 1, 2, 3, 4, 0, 0]

    @EACH_WAY
    @pytest.mark.parametrize("dtype", [*NUMBERS, torch.bool])
    def test_C14_of_every_dtype(self, run: Any, dtype: Any) -> None:
        x = torch.ones(4).to(dtype)
        found = run(mapped(over(lax.ppermute, perm=[(0, 1)]), FOUR, P("i"), P("i")), FOUR, x)
        assert found.dtype == dtype and found.tolist() == [0, 1, 0, 0]

    @EACH_WAY
    @pytest.mark.parametrize("perm", [[(0, 1), (0, 2)], [(0, 1), (2, 1)]])
    def test_C16_a_source_or_destination_used_twice(self, run: Any, perm: Any) -> None:
        fn = mapped(over(lax.ppermute, perm=perm), FOUR, P("i"), P("i"))
        with complains(ValueError, "ppermute"):
            run(fn, FOUR, torch.ones(4))

    @EACH_WAY
    @pytest.mark.parametrize("perm", [[(0, 4)], [(4, 0)]])
    def test_C16_a_rank_that_there_is_not(self, run: Any, perm: Any) -> None:
        fn = mapped(over(lax.ppermute, perm=perm), FOUR, P("i"), P("i"))
        with complains((ValueError, IndexError), "4"):
            run(fn, FOUR, torch.ones(4))

    @EACH_WAY
    def test_a_shuffle_gives_each_device_the_value_of_the_one_listed(self, run: Any) -> None:
        x = torch.arange(4.0)
        fn = mapped(over(lax.pshuffle, perm=[2, 0, 3, 1]), FOUR, P("i"), P("i"))
        assert run(fn, FOUR, x).tolist() == [2, 0, 3, 1]
        fn = mapped(over(lax.pshuffle, perm=[2, 0, 2, 1]), FOUR, P("i"), P("i"))
        with complains(ValueError, "2"):
            run(fn, FOUR, x)


class TestExchange:
    @EACH_WAY
    def test_C17_split_1_concat_1(self, run: Any) -> None:
        mesh = pfx.make_mesh(x=8)
        a = torch.arange(64.0).reshape(8, 8)
        fn = lambda a: lax.all_to_all(a, "x", 1, 1, tiled=True)
        found = run(mapped(fn, mesh, P("x", None), P(None, "x")), mesh, a)
        assert torch.equal(found, a.T.reshape(1, 64))

    @EACH_WAY
    @pytest.mark.parametrize("n", [2, 4, 8])
    def test_C17_split_1_concat_0_only_reshards(self, run: Any, n: int) -> None:
        mesh = pfx.make_mesh(x=n)
        a = draw(8, 8)
        fn = lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True)
        assert torch.equal(run(mapped(fn, mesh, P("x"), P(None, "x")), mesh, a), a)

    @EACH_WAY
    def test_C17_untiled_a_split_dim_moves_to_another_place(self, run: Any) -> None:
        a = torch.arange(16.0).reshape(4, 4)
        fn = lambda a: lax.all_to_all(a, "i", 1, 0)
        found = run(mapped(fn, FOUR, P("i"), P(None, "i")), FOUR, a)
        assert torch.equal(found, a)

    @EACH_WAY
    @pytest.mark.parametrize("tiled", [False, True])
    def test_C17_a_dim_that_does_not_divide(self, run: Any, tiled: bool) -> None:
        fn = lambda a: lax.all_to_all(a, "i", 0, 1, tiled=tiled)
        with complains(ValueError, "3", "4", "all_to_all"):
            run(mapped(fn, FOUR, P("i"), P("i")), FOUR, draw(12, 4))


class TestIndex:
    @EACH_WAY
    @pytest.mark.parametrize("axis", [*AXES, ("k", "i"), ("k", "j", "i"), ("j", "k", "i")])
    def test_C19_is_row_major_in_the_order_given(self, run: Any, axis: Any) -> None:
        fn = lambda: lax.axis_index(axis).reshape(1, 1, 1)
        found = run(mapped(fn, CUBE, (), P("i", "j", "k")), CUBE)
        axes = (axis,) if isinstance(axis, str) else axis
        for place in CUBE.coordinates():
            want = 0
            for a in axes:
                want = want * CUBE.shape[a] + place[a]
            assert int(found[place["i"], place["j"], place["k"]]) == want

    @EACH_WAY
    def test_C19_the_size_is_a_number(self, run: Any) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            sizes = [lax.axis_size(axis) for axis in ("i", "j", ("j", "k"), ("i", "j", "k"))]
            assert sizes == [2, 3, 6, 12] and all(type(size) is int for size in sizes)
            return x

        run(mapped(fn, CUBE, P(), P()), CUBE, torch.ones(1))

    @EACH_WAY
    def test_C19_picks_a_devices_own_block(self, run: Any) -> None:
        x = draw(4, 3)
        for pick in (lambda x, k: x[k][None], lambda x, k: x.index_select(0, k[None])):
            fn = lambda x, pick=pick: pick(x, lax.axis_index("i"))
            assert torch.equal(run(mapped(fn, FOUR, P(), P("i")), FOUR, x), x)

    @EACH_WAY
    def test_C20_a_scan_that_carries_what_varies(self, run: Any) -> None:
        def fn(xs: torch.Tensor) -> torch.Tensor:
            start = lax.pcast(torch.zeros(1, dtype=torch.int64), "i", to="varying")
            body = lambda carry, x: (carry + lax.axis_index("i") + 1, None)
            return pfx.scan(body, start, xs)[0]

        found = run(mapped(fn, FOUR, P(), P("i")), FOUR, torch.zeros(10))
        assert found.tolist() == [10, 20, 30, 40]

    @EACH_WAY
    def test_C20_or_says_how_to_cast_it(self, run: Any) -> None:
        def fn(xs: torch.Tensor) -> torch.Tensor:
            body = lambda carry, x: (carry + lax.axis_index("i") + 1, None)
            return pfx.scan(body, torch.zeros(1, dtype=torch.int64), xs)[0]

        with complains(TypeError, "i", "pcast", "varying"):
            run(mapped(fn, FOUR, P(), P("i")), FOUR, torch.zeros(10))


class TestGroups:
    HALVES = (
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[3, 1, 2, 0], [7, 5, 6, 4]],
    )

    @EACH_WAY
    @pytest.mark.parametrize("groups", HALVES)
    @pytest.mark.parametrize("name", ["psum", "pmax", "all_gather-0-tiled-varying",
                                      "psum_scatter-0-tiled", "all_to_all-0-0-tiled"])  # fmt: skip
    def test_each_group_is_a_mesh_of_its_own(self, run: Any, groups: Any, name: str) -> None:
        mesh, size = pfx.make_mesh(i=8), len(groups[0])
        (case,) = (case for case in (*LINEAR, *EXTREMA) if case.name == name)
        calls = {
            "psum": lambda x: lax.psum(x, "i", groups=groups),
            "pmax": lambda x: lax.pmax(x, "i", groups=groups),
            "all_gather": lambda x: lax.all_gather(x, "i", tiled=True, groups=groups),
            "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True, groups=groups),
            "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True, groups=groups),
        }
        x = draw(8, *case.shape(size))
        fn = mapped(lambda x: calls[name.split("-")[0]](x[0])[None], mesh, P("i"), P("i"))
        want: list[Any] = [None] * 8
        for group in groups:
            for rank, part in zip(group, case.meaning([x[r] for r in group]), strict=True):
                want[rank] = part
        assert_close(run(fn, mesh, x), torch.stack(want))

    @EACH_WAY
    @pytest.mark.parametrize(
        "groups", [[[0, 1], [2]], [[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 4]]]
    )
    def test_must_hold_each_rank_once(self, run: Any, groups: Any) -> None:
        fn = mapped(lambda x: lax.all_gather(x, "i", groups=groups), FOUR, P("i"), P("i"))
        with complains(ValueError, "groups"):
            run(fn, FOUR, torch.ones(4))


class TestEveryCollective:
    """Each over one axis and two, in both orders, on meshes where the axes have different sizes."""

    @EACH_WAY
    @pytest.mark.parametrize("axis", AXES, ids=str)
    @pytest.mark.parametrize("case", (*LINEAR, *EXTREMA), ids=lambda case: case.name)
    def test_does_what_it_means(self, run: Any, case: Case, axis: Any) -> None:
        mesh = pfx.make_mesh(i=3, j=2)
        x = case.example(mesh, axis)
        assert_close(run(case.on(mesh, axis), mesh, x), case.dense(x, mesh, axis))

    @pytest.mark.parametrize("axis", ["j", ("k", "i"), ("k", "j", "i"), ("j", "k", "i")], ids=str)
    @pytest.mark.parametrize("case", (*LINEAR, *EXTREMA), ids=lambda case: case.name)
    def test_does_so_on_three_axes(self, case: Case, axis: Any) -> None:
        x = case.example(CUBE, axis)
        assert_close(case.on(CUBE, axis)(x), case.dense(x, CUBE, axis))

    @pytest.mark.parametrize("dtype", NUMBERS, ids=str)
    @pytest.mark.parametrize("case", (*LINEAR, *EXTREMA), ids=lambda case: case.name)
    def test_keeps_the_dtype(self, case: Case, dtype: torch.dtype) -> None:
        x = (case.example(SQUARE, "j") * 4).round().to(dtype)
        found = case.on(SQUARE, "j")(x)
        mean_of_integers = case.name == "pmean" and not dtype.is_floating_point
        assert found.dtype == (torch.float32 if mean_of_integers else dtype)
        assert torch.equal(found, case.dense(x, SQUARE, "j").to(found.dtype))
