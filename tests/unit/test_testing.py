"""`pfx.testing`: right code passes every assertion, wrong code fails the one that is about it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
import pfx.testing
from pfx import P
from pfx.errors import MeshError, TraceError
from pfx.testing import assert_parallel_equal
from pfx.testing.compare import RTOL, difference

MESH = pfx.make_mesh(x=2, y=3)
X = pfx.testing.values((4, 6), torch.float64, 0)
W = pfx.testing.values((6, 6), torch.float64, 1)


def mlp(x: torch.Tensor, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": torch.tanh(x @ params["w"]) ** 2, "n": (x > 0).sum(0)}


def failure_of(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        call(*args, **named)
    return str(caught.value)


# assert_parallel_equal.


@pytest.mark.parametrize("grad", [False, True, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("order", [1, 2])
def test_equal_functions_pass(grad: Any, order: int) -> None:
    assert_parallel_equal(
        mlp, (X, {"w": W}), mesh=MESH, in_specs=(P("x", "y"), P("y")),
        out_specs={"y": P("x"), "n": P()}, grad=grad, order=order,
    )  # fmt: skip


def test_arrays_names_and_integers_are_arguments() -> None:
    rows = torch.tensor([3, 1])

    def fn(x: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
        return pfx.constrain(x, "batch _")[rows] * scale

    x = pfx.device_put(X, MESH, P(None, "y"))
    assert_parallel_equal(fn, (x, rows, 0.5), mesh=MESH, names={"batch": "x"}, grad=True)


def test_arguments_that_the_reference_changes_stay_as_they_were() -> None:
    x = X.clone()
    assert_parallel_equal(lambda x: x * 2, (x,), mesh=MESH, reference=lambda x: x.mul_(2))
    assert torch.equal(x, X)


@pytest.mark.parametrize("dtype", RTOL)
def test_each_float_dtype_has_a_tolerance(dtype: torch.dtype) -> None:
    x, w = (pfx.testing.values((6, 6), dtype, seed) for seed in (0, 1))
    specs = (P("x"), P(None, "y"))
    assert_parallel_equal(torch.matmul, (x, w), mesh=MESH, in_specs=specs, grad=True)
    off = lambda x, w: x @ w * (1 + 3 * RTOL[dtype])
    assert_parallel_equal(torch.matmul, (x, w), mesh=MESH, reference=off, rtol=4 * RTOL[dtype])
    failure_of(assert_parallel_equal, torch.matmul, (x, w), mesh=MESH, reference=off)


def test_a_failure_says_what_where_and_how_to_repeat_it() -> None:
    def reference(x: torch.Tensor, params: Any) -> Any:
        out = mlp(x, params)
        out["y"] = out["y"].index_put(
            (torch.tensor(3), torch.tensor(4)), torch.tensor(5.0).double()
        )
        return out

    text = failure_of(
        assert_parallel_equal, mlp, (X, {"w": W}), mesh=MESH, in_specs=(P("x"), P(None, "y")),
        out_specs={"y": P("x", "y"), "n": P()}, reference=reference, grad=True,
    )  # fmt: skip
    got = float(mlp(X, {"w": W})["y"][3, 4])
    lines = text.splitlines()
    assert lines[0] == "assert_parallel_equal(mlp): output['y'] is not what one device gives."
    assert lines[1].startswith(
        f"  largest difference {5 - got:.3g}, {1 - got / 5:.3g} of the scale 5"
    )
    assert lines[2].startswith("  at index (3, 4): 0.") and "5.0 on one device" in lines[2]
    assert "1 of 24 elements differ" in lines[2]
    assert lines[3:] == [
        "  layout: f64[4/x, 6/y] on x=2 y=3, spec P('x', 'y')",
        "  held by the devices at x=1 y=2.",
        "  mesh: x=2 y=3",
        "  args: x: f64[4, 6], params['w']: f64[6, 6]",
        "  again: assert_parallel_equal(mlp, args, mesh=pfx.make_mesh(x=2, y=3), in_specs=(P('x'), "
        "P(None, 'y')), out_specs={'y': P('x', 'y'), 'n': P()}, grad=True, reference=reference)",
    ]


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_factor_of_an_axis_is_recognized(factor: float) -> None:
    text = failure_of(
        assert_parallel_equal, mlp, (X, {"w": W}), mesh=MESH,
        reference=lambda x, p: {**mlp(x, p), "y": mlp(x, p)["y"] * factor},
    )  # fmt: skip
    assert (
        f"every element is {1 / factor:.6g} times one device's: is a sum over 'y', missing" in text
    )


def test_a_factor_of_two_axes_is_recognized_in_a_scalar() -> None:
    text = failure_of(
        assert_parallel_equal, torch.sum, (X,), mesh=MESH, reference=lambda x: x.sum() * 6
    )
    assert "every element is 0.166667 times one device's: is a sum over 'x' and 'y', m" in text
    text = failure_of(
        assert_parallel_equal, torch.sum, (X,), mesh=MESH, reference=lambda x: x.sum() * 7
    )
    assert "times one device's" not in text


def test_a_large_output_excuses_no_other() -> None:
    fn = lambda x: {"mask": x * 1e9, "loss": x.sum()}
    off = lambda x: {"mask": x * 1e9, "loss": x.sum() + 1e-6}
    text = failure_of(assert_parallel_equal, fn, (X,), mesh=MESH, reference=off)
    assert "output['loss'] is not" in text
    assert_parallel_equal(fn, (X,), mesh=MESH, reference=off, atol=1e-5)
    assert_parallel_equal(fn, (X,), mesh=MESH, reference=off, atol={torch.float64: 1e-5})


def test_a_gradient_that_is_rounding_alone_passes() -> None:
    """A bias that shifts every score of a softmax alike."""
    attend = lambda x, bias: torch.softmax(x @ (x + bias).T, -1) @ x
    args = (X, torch.zeros(6, dtype=torch.float64))
    assert float(torch.func.grad(lambda *a: attend(*a)[0, 0], 1)(*args).abs().max()) < 1e-14
    assert_parallel_equal(attend, args, mesh=MESH, in_specs=(P("x", "y"), P("y")), grad=True)


def test_other_wrong_leaves_are_named() -> None:
    other = lambda x, p: pfx.tree.map(lambda leaf: leaf + 1, mlp(x, p))
    text = failure_of(assert_parallel_equal, mlp, (X, {"w": W}), mesh=MESH, reference=other)
    assert "output['n'] is not" in text and "so it is with output['y']." in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: {**out, "y": out["y"].float()}, "float64[4, 6] on the mesh, float32[4, 6]"),
        (lambda out: {**out, "y": out["y"][:2]}, "float64[4, 6] on the mesh, float64[2, 6]"),
        (lambda out: {"y": out["y"]}, "the mesh gives the leaves: ['n'], ['y']"),
        (lambda out: {**out, "n": out["n"] + (torch.arange(6) == 2)}, "output['n'] is not"),
        (lambda out: {**out, "y": out["y"] * torch.nan}, "24 of 24 elements differ"),
    ],
)
def test_other_results_fail(change: Any, said: str) -> None:
    reference = lambda x, p: change(mlp(x, p))
    text = failure_of(assert_parallel_equal, mlp, (X, {"w": W}), mesh=MESH, reference=reference)
    assert said in text


def test_equal_values_with_another_gradient_fail() -> None:
    args = (X, {"w": W})
    stopped = lambda x, p: mlp(x, {"w": p["w"].detach()})
    assert_parallel_equal(mlp, args, mesh=MESH, reference=stopped)
    assert_parallel_equal(mlp, args, mesh=MESH, reference=stopped, grad=0)
    text = failure_of(assert_parallel_equal, mlp, args, mesh=MESH, reference=stopped, grad=True)
    assert "the gradient with respect to params['w'] is not what one device gives" in text
    assert "grad=True" in text


def test_equal_gradients_with_another_second_derivative_fail() -> None:
    class Cube(torch.autograd.Function):
        """x³ whose gradient is right, and whose gradient's gradient is zero."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * 3 * ctx.saved_tensors[0].detach() ** 2

    named = {"mesh": MESH, "in_specs": (P("x"),), "reference": Cube.apply, "grad": True}
    assert_parallel_equal(lambda x: x**3, (X,), **named)
    text = failure_of(assert_parallel_equal, lambda x: x**3, (X,), order=2, **named)
    assert "the Hessian-vector product with respect to x is not" in text


def test_a_wrong_runtime_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled side is what is run, not the function again."""
    from pfx.api import Jitted

    call = Jitted.__call__
    monkeypatch.setattr(Jitted, "__call__", lambda self, *a: pfx.tree.map(_nudged, call(self, *a)))
    text = failure_of(assert_parallel_equal, torch.tanh, (X,), mesh=MESH, in_specs=(P("x"),))
    assert "24 of 24 elements differ" in text


def _nudged(leaf: Any) -> Any:
    object.__setattr__(leaf, "parts", tuple(part + 1e-6 for part in leaf.parts))
    return leaf


def test_copies_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check=True` is part of the assertion, unless it is turned off."""
    asked = []
    jit = pfx.testing.equality.jit
    spy = lambda *a, check, **named: asked.append(check) or jit(*a, check=check, **named)
    monkeypatch.setattr(pfx.testing.equality, "jit", spy)
    assert_parallel_equal(torch.tanh, (X,), mesh=MESH)
    assert_parallel_equal(torch.tanh, (X,), mesh=MESH, check=False)
    assert asked == [False, True, False]


def test_nothing_to_differentiate_is_an_error() -> None:
    with pytest.raises(TraceError, match="needs a float tensor among the args"):
        assert_parallel_equal(lambda i: i + 1, (torch.arange(2),), mesh=MESH, grad=True)
    with pytest.raises(TraceError, match="needs a float output"):
        assert_parallel_equal(lambda x: x > 0, (X,), mesh=MESH, grad=True)
    with pytest.raises(ValueError, match="names no argument"):
        assert_parallel_equal(torch.tanh, (X,), mesh=MESH, grad=1)


def test_calls_that_mean_nothing_are_errors() -> None:
    with pytest.raises(TraceError, match="args is the tuple"):
        assert_parallel_equal(torch.tanh, X, mesh=MESH)
    with pytest.raises(MeshError, match="an abstract mesh runs nothing"):
        assert_parallel_equal(torch.tanh, (X,), mesh=pfx.make_mesh("abstract", x=2))
    with pytest.raises(ValueError, match="neither 1 nor 2"):
        assert_parallel_equal(torch.tanh, (X,), mesh=MESH, grad=True, order=3)


def test_infinities_and_nans_are_values() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert difference(x, x.clone(), 0.0, 1.0) is None
    for i, other in [(0, -torch.inf), (1, torch.nan), (2, 0.0), (3, torch.nan)]:
        changed = x.clone()
        changed[i] = other
        found = difference(changed, x, 1e3, 1.0)
        assert found is not None and found.index == (i,) and found.wrong == 1


# With shard_map.


def blocked(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return pfx.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def row_parallel(times: int) -> Callable[..., Any]:
    """x @ w with the contracted dim over x, whose partial products are summed, `times` over."""
    return blocked(lambda x, w: times * pfx.lax.psum(x @ w, "x"), (P("y", "x"), P("x")), P("y"))


def test_a_function_per_device_equals_its_reference() -> None:
    args = (pfx.testing.values((6, 4), torch.float64, 0), X)
    assert_parallel_equal(
        row_parallel(1), args, mesh=MESH, reference=torch.matmul, grad=True, order=2
    )
    inside = lambda x, w: row_parallel(1)(torch.tanh(x), w).cumsum(0)
    dense = lambda x, w: (torch.tanh(x) @ w).cumsum(0)
    assert_parallel_equal(
        inside, args, mesh=MESH, in_specs=(P("x"), P()), reference=dense, grad=True, order=2
    )


def test_a_sum_made_twice_is_recognized() -> None:
    args = (pfx.testing.values((6, 4), torch.float64, 0), X)
    text = failure_of(
        assert_parallel_equal, row_parallel(2), args, mesh=MESH, reference=torch.matmul
    )
    assert (
        "every element is 2 times one device's: is a sum over 'x', missing or made twice?" in text
    )


# Packaging.


def test_hypothesis_is_asked_for_only_by_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert_parallel_equal(torch.tanh, (X,), mesh=MESH)
    for draw in (pfx.testing.meshes, pfx.testing.programs, lambda: pfx.testing.tensors((2,))):
        with pytest.raises(ImportError, match=r"pip install 'pfx\[test\]'"):
            draw()


def test_it_is_not_imported_by_pfx_and_loads_no_hypothesis() -> None:
    code = (
        "import sys, pfx; print('pfx.testing' in sys.modules)\n"
        "import pfx.testing; print('hypothesis' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_region_is_no_reference_for_itself() -> None:
    """A statistic of one device's rows agrees with itself on any mesh; it is wrong all the same."""
    mesh, x = pfx.make_mesh(dp=2), torch.randn(8, dtype=torch.float64)
    inner = lambda x: pfx.lax.pmean(x.std(), "dp")
    local = pfx.shard_map(inner, mesh=mesh, in_specs=P("dp"), out_specs=P())
    looped = lambda x: pfx.scan(lambda c, _: (c + local(x), None), x.sum(), x)[0]
    for fn in (local, looped):
        with pytest.raises(TypeError, match="reference="):
            assert_parallel_equal(fn, (x,), mesh=mesh)
    with pytest.raises(AssertionError, match="is not what one device gives"):
        assert_parallel_equal(local, (x,), mesh=mesh, reference=torch.std)
