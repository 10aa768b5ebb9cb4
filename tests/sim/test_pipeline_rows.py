"""Pipelines whose sizes coincide with the number of layers, and sums that several outputs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pfx
from pfx import Deal, P, make_mesh
from pfx.compiler.program import verify

DOUBLE = torch.float64


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, None]:
    return x + torch.tanh(x @ w), None


def loss(w: Tensor, x: Tensor) -> Tensor:
    return pfx.scan(layer, x, w)[0].square().sum()


def total(of_one: Callable[..., Tensor], *zeros: Tensor) -> Callable[..., Any]:
    """The sum over microbatches of what a function makes of one."""

    def fn(*args: Tensor) -> Any:
        *weights, xs = args
        return pfx.scan(lambda c, x: (c + of_one(*weights, x), None), zeros[0], xs)[0]

    return fn


def assert_pipelined(
    fn: Callable[..., Any], *args: Tensor, stacks: int = 1, devices: int = 2
) -> Any:
    """Compare a function with itself as a pipeline, whole backward and in halves."""
    specs = (*(P("pp") for _ in range(stacks)), *(P() for _ in args[stacks:]))
    for schedule in ("1f1b", "zb-h1"):
        jitted = pfx.jit(
            fn, mesh=make_mesh(pp=devices), in_specs=specs, check=True, schedule=schedule
        )
        program = jitted.lower(*args)
        assert len(program.pipelines()) == 1, program.report
        verify(program)
        got, want = pfx.device_get(jitted(*args)), fn(*args)
        for a, b in zip(pfx.tree.leaves(got), pfx.tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=DOUBLE) / 2 for shape in shapes]


def test_one_gradient_in_two_sums() -> None:
    def fn(w: Tensor, xs: Tensor) -> Any:
        def one(c: Any, x: Tensor) -> Any:
            g = pfx.grad(loss)(w, x)
            return (c[0] + g, c[1] + g, c[2] + 2 * g), None

        return pfx.scan(one, tuple(torch.zeros_like(w) for _ in range(3)), xs)[0]

    assert_pipelined(fn, *drawn((4, 3, 3), (3, 2, 3)))


def test_a_stack_that_is_summed_and_read_backward() -> None:
    def of_one(w: Tensor, x: Tensor) -> Any:
        def emitting(x: Tensor, w: Tensor) -> Any:
            y = torch.tanh(x @ w)
            return x + y, y

        out, ys = pfx.scan(emitting, x, w)
        return out.square().sum() + ys.square().sum(), ys

    def fn(w: Tensor, xs: Tensor) -> Any:
        def one(c: Any, x: Tensor) -> Any:
            g, ys = torch.func.grad(of_one, has_aux=True)(w, x)
            return (c[0] + g, c[1] + ys), None

        zeros = torch.zeros_like(w), torch.zeros(4, *xs.shape[1:], dtype=DOUBLE)
        return pfx.scan(one, zeros, xs)[0]

    assert_pipelined(fn, *drawn((4, 3, 3), (3, 2, 3)))


OF_STACKS = {
    "the largest along dim 2": lambda w: w / (1 + w.amax(2, keepdim=True).abs()),
    "a mean over dim 2": lambda w: w - w.mean(2, keepdim=True),
    "rolled by as many as there are layers": lambda w: w.roll(w.shape[0], 1),
    "a norm of as many features": lambda w: F.layer_norm(w, (w.shape[2],)),
    "padded and cut": lambda w: F.pad(w, (w.shape[0], 0))[..., w.shape[0] :],
    "reshaped": lambda w: w.reshape(w.shape[0], -1).sin().reshape(w.shape),
    "scaled by positions": lambda w: (
        w * torch.arange(w.shape[0], dtype=DOUBLE)[:, None, None].sin()
    ),
}


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("name", OF_STACKS)
def test_sizes_equal_to_the_number_of_layers(name: str, layers: int) -> None:
    of = OF_STACKS[name]
    w, xs = drawn((layers, layers, layers), (3, 2, layers))
    one = lambda w, x: pfx.grad(lambda w: loss(of(w), x))(w)
    assert_pipelined(total(one, torch.zeros_like(w)), w, xs)


@pytest.mark.parametrize("name", ["mm", "linear", "addmm"])
def test_a_matrix_with_as_many_rows_as_layers(name: str) -> None:
    biases, m, w, xs = drawn((4, 4), (4, 4), (4, 4, 4), (3, 2, 4))
    mixed = {
        "mm": lambda b, m: b @ m,
        "linear": lambda b, m: F.linear(b, m, m[0]),
        "addmm": lambda b, m: torch.addmm(m[1], b, m),
    }[name]

    def one(w: Tensor, b: Tensor, m: Tensor, x: Tensor) -> Tensor:
        step = lambda x, both: (torch.tanh(x @ both[0] + both[1]), None)
        return pfx.scan(step, x, (w, mixed(b, m)))[0].square().sum()

    assert_pipelined(total(one, torch.zeros((), dtype=DOUBLE)), w, biases, m, xs, stacks=2)


def test_an_op_that_needs_the_place_of_a_row_gathers_them() -> None:
    biases, w, xs = drawn((4, 4), (4, 4, 4), (3, 2, 4))

    def one(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        step = lambda x, both: (torch.tanh(x @ both[0] + both[1]), None)
        return pfx.scan(step, x, (w, b.tril()))[0].square().sum()

    fn = total(one, torch.zeros((), dtype=DOUBLE))
    jitted = pfx.jit(fn, mesh=make_mesh(pp=2), in_specs=(P("pp"), P("pp"), P()))
    torch.testing.assert_close(pfx.device_get(jitted(w, biases, xs)), fn(w, biases, xs))
    assert jitted.lower(w, biases, xs).report


def test_shares_of_stages_add_up_in_one_order() -> None:
    """A sum of per-layer values is the same bits in any order that a schedule takes the stages in."""
    w, xs = (value.float() for value in drawn((8, 5, 5), (4, 3, 5)))

    def one(w: Tensor, x: Tensor) -> Tensor:
        step = lambda x, w: (torch.tanh(x @ w), (x @ w).square().mean())
        out, each = pfx.scan(step, x, w)
        return out.sum() + each.sum()

    mesh = make_mesh(pp=2, deals={"pp": Deal((0, 1, 0, 1))})
    orders = (
        "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3\n1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3",
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3\n1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    )
    fn = total(one, torch.zeros(()))
    made = [
        pfx.device_get(
            pfx.jit(fn, mesh=mesh, in_specs=(P("pp"), P()), schedule=pfx.schedules.parse(order))(
                w, xs
            )
        )
        for order in orders
    ]
    assert torch.equal(*made)
    torch.testing.assert_close(made[0], fn(w, xs))


def test_an_owed_output_may_be_donated() -> None:
    w, head, xs = drawn((4, 4, 4), (4, 3), (2, 3, 4))
    mesh, owed = make_mesh(pp=2), P(unreduced="pp")
    one = lambda w, h, x: pfx.grad(lambda h: (pfx.scan(layer, x, w)[0] @ h).square().sum())(h)
    fn = total(one, torch.zeros_like(head))
    grads = pfx.jit(fn, mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=owed)(w, head, xs)
    half = pfx.jit(lambda g: g * 0.5, mesh=mesh, in_specs=owed, out_specs=owed, donate=(0,))(grads)
    torch.testing.assert_close(pfx.device_get(half), fn(w, head, xs) / 2)


def test_a_device_without_layers_may_write_over_its_part_of_a_stack() -> None:
    w, xs = drawn((3, 4, 4), (4, 2, 4))
    mesh = make_mesh(pp=4, deals={"pp": Deal((0, 1, 2, 3))})
    fn = total(lambda w, x: pfx.grad(loss)(w, x), torch.zeros_like(w))
    step = lambda w, xs: w - fn(w, xs) * 0.1
    jitted = pfx.jit(step, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"))
    torch.testing.assert_close(pfx.device_get(jitted(w, xs)), step(w, xs), rtol=1e-9, atol=1e-9)
