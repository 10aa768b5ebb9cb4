"""`assert_transposes` and `assert_gradients`: right rules pass, each wrong one fails its own law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
import pfx.testing
from pfx import P
from pfx.errors import TraceError
from pfx.testing import assert_gradients, assert_transposes

MESH = pfx.make_mesh(x=2, y=3)
X = pfx.testing.values((4, 6), torch.float64, 0)
W = pfx.testing.values((6, 6), torch.float64, 1)


def mlp(x: torch.Tensor, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": torch.tanh(x @ params["w"]) ** 2, "n": (x > 0).sum(0)}


def failure_of(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        call(*args, **named)
    return str(caught.value)


class WrongBackward(torch.autograd.Function):
    """Twice x, with three times the cotangent, and four times the tangent."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return 3 * cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return 4 * tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return 2 * x + info.batch_size, in_dims[0]


def wrong_backward(x: torch.Tensor) -> torch.Tensor:
    return WrongBackward.apply(x)


# assert_transposes.

LINEAR: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (lambda x: W @ x, (pfx.ShapeDtype((6, 2)),)),
    "views": (lambda x: x.reshape(3, 8).T[1:].flip(0), (X,)),
    "two arguments": (lambda x, t: {"s": x + t["w"].sum(), "t": x.T @ W[:4]}, (X, {"w": W})),
    "an index is held fixed": (lambda x, i: x[i], (X, torch.tensor([2, 0, 2]))),
    "complex": (lambda z: torch.fft.fft(z) * (1 + 2j), (torch.zeros(4, dtype=torch.complex64),)),
    "constrain": (lambda x: pfx.constrain(x, P("x")).cumsum(1), (X,)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_pass(name: str) -> None:
    fn, args = LINEAR[name]
    assert_transposes(fn, *args)


def test_a_jitted_function_passes() -> None:
    fn = pfx.jit(lambda x: x @ W, mesh=MESH, in_specs=(P("x"),))
    assert_transposes(fn, X)


WRONG = ["transpose", "jvp", "transpose of the transpose", "vmap", "vmap of the transpose"]


@pytest.mark.parametrize("fn", [lambda x: x + 1, lambda x: x * x, torch.tanh, torch.abs])
def test_a_function_that_is_not_linear_fails(fn: Any) -> None:
    assert ": linear: output is wrong." in failure_of(assert_transposes, fn, X)


@pytest.mark.parametrize("law", ["transpose", "jvp", "transpose of the transpose", "vmap"])
def test_a_wrong_rule_fails_its_law(law: str) -> None:
    others = [other for other in WRONG if other != law]
    text = failure_of(assert_transposes, wrong_backward, X, skip=others)
    assert text.startswith(f"assert_transposes(wrong_backward): {law}")
    if law == "transpose":
        assert "⟨x, Aᵀ(y)⟩ for x = x is wrong" in text


def test_a_wrong_batching_rule_of_the_transpose_fails() -> None:
    class Wrong(WrongBackward):
        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return WrongBackward.apply(cotangent)

    skip = [law for law in WRONG if law != "vmap of the transpose"]
    text = failure_of(assert_transposes, Wrong.apply, X, skip=skip)
    assert ": vmap of the transpose over output:" in text


def test_the_wrong_argument_is_named() -> None:
    fn = lambda x, t: x + wrong_backward(t["w"])
    text = failure_of(assert_transposes, fn, X, {"w": X})
    assert ": transpose: ⟨x, Aᵀ(y)⟩ for x = t['w'] is wrong." in text


def test_what_a_transform_raises_fails_its_law() -> None:
    class NoForward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return 2 * cotangent

    text = failure_of(assert_transposes, NoForward.apply, X)
    assert ": jvp: raised " in text and 'skip=("jvp",)' in text
    assert_transposes(NoForward.apply, X, skip=["jvp"])


def test_unknown_laws_and_functions_of_no_float_are_errors() -> None:
    with pytest.raises(ValueError, match="names no law"):
        assert_transposes(lambda x: x, X, skip=["jpv"])
    with pytest.raises(TraceError, match="needs a float tensor as argument"):
        assert_transposes(lambda i: i, torch.arange(2))
    with pytest.raises(TraceError, match="needs a float tensor as result"):
        assert_transposes(lambda x: x > 0, X)


# (what each device does, in_specs, out_specs)
COLLECTIVES: dict[str, tuple[Callable[..., Any], P, P]] = {
    "psum": (lambda x: pfx.lax.psum(x, "x"), P("x"), P()),
    "all_gather": (lambda x: pfx.lax.all_gather(x, "y", dim=1, tiled=True), P("x", "y"), P("x", "y")),
    "psum_scatter": (lambda x: pfx.lax.psum_scatter(x, "x", tiled=True), P(None, "x"), P("x")),
    "all_to_all": (lambda x: pfx.lax.all_to_all(x, "x", 1, 0, tiled=True), P("x"), P(None, "x")),
    "ppermute": (lambda x: pfx.lax.ppermute(x, "y", [(0, 1), (1, 2)]), P(None, "y"), P(None, "y")),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_transpose(name: str) -> None:
    body, in_spec, out_spec = COLLECTIVES[name]
    assert_transposes(pfx.shard_map(body, mesh=MESH, in_specs=(in_spec,), out_specs=out_spec), X)


# assert_gradients.


def test_right_gradients_pass() -> None:
    assert_gradients(mlp, X, {"w": W})
    assert_gradients(pfx.jit(mlp, mesh=MESH, in_specs=(P("x"), P("y"))), X, {"w": W})
    total = lambda x: pfx.scan(lambda c, r: (torch.tanh(c + r), None), x[0], x)[0]
    assert_gradients(total, X, modes=["reverse"])
    assert_gradients(lambda z: (z * z.conj()).real.log(), pfx.ShapeDtype((3,), torch.complex64))
    assert_gradients(torch.sin, X, order=3)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_a_wrong_derivative_fails(mode: str) -> None:
    fn = lambda x, y: x * wrong_backward(torch.tanh(y))
    text = failure_of(assert_gradients, fn, X, X, modes=[mode])
    about = {"reverse": ": ⟨d(y), t⟩ is wrong.", "forward": " along y: d(output) is wrong."}[mode]
    assert f"the {mode} derivative{about}" in text


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_a_wrong_second_derivative_fails(mode: str) -> None:
    class Square(torch.autograd.Function):
        """x² with right first derivatives, which are constants to a second one."""

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * ctx.saved_tensors[0].detach() * 2

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return tangent * ctx.saved_tensors[0].detach() * 2

    assert_gradients(Square.apply, X, order=1)
    text = failure_of(assert_gradients, Square.apply, X, modes=[mode])
    assert f"the {mode} over {mode} derivative" in text


def test_a_derivative_is_taken_in_every_pair_of_modes() -> None:
    class Twice(torch.autograd.Function):
        """2x with a right backward and a wrong jvp."""

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return 2 * cotangent

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return 4 * tangent

    class Square(torch.autograd.Function):
        """x² whose backward is wrong only when it is itself differentiated in forward mode."""

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * Twice.apply(ctx.saved_tensors[0])

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return tangent * ctx.saved_tensors[0] * 2

    assert_gradients(Square.apply, X, modes=["reverse"])
    text = failure_of(assert_gradients, Square.apply, X)
    assert "the forward over reverse derivative along argument 0: d(d(argument 0)) is wrong" in text


def test_a_gradient_that_raises_fails() -> None:
    text = failure_of(assert_gradients, torch.floor_divide, X, X)
    assert "derivative" in text
    with pytest.raises(ValueError, match="ask for nothing known"):
        assert_gradients(torch.sin, X, modes=["backward"])
