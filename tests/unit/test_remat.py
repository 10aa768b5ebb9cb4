"""`remat`: the same bits as the function it wraps, under every transform, inside and around a scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

import pfx
from tests.unit.test_scan import Fn, assert_same, inputs, plain, unrolled


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sin(x @ w[0]) @ w[1] + b) * x


@pytest.mark.parametrize(
    "transform", ["grad", "grad of grad", "vmap of grad", "grad of vmap", "jacrev"]
)
def test_remat_of_a_function_changes_no_bit(transform: str) -> None:
    x, w, b = inputs()

    def loss(f: Any) -> Fn:
        return lambda x, w: (f(x, w, b) ** 2).sum()  # b is closed over below

    forms: dict[str, Callable[[Fn], Any]] = {
        "grad": lambda f: grad(f, (0, 1))(x, w),
        "grad of grad": lambda f: grad(lambda w: grad(f)(x, w).sin().sum())(w),
        "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (0, None))(x[:, None], w),
        "grad of vmap": lambda f: grad(lambda w: vmap(f, (0, None))(x[:, None], w).sum())(w),
        "jacrev": lambda f: jacrev(f)(x, w),
    }
    apply = forms[transform]
    again = lambda x, w, b: pfx.remat(lambda x, w: block(x, w, b))(x, w)
    expected = apply(loss(block))
    for a, b_ in zip(pfx.tree.leaves(apply(loss(again))), pfx.tree.leaves(expected), strict=True):
        assert b_.abs().max() > 0
        torch.testing.assert_close(
            a, b_, rtol=1e-13 if "of" in transform else 0, atol=1e-14 if "of" in transform else 0
        )


def test_remat_reaches_what_the_function_closes_over() -> None:
    x, w, b = inputs()
    loss = lambda f: lambda b: f(lambda x: block(x, w, b))(x).sum()
    assert torch.equal(grad(loss(pfx.remat))(b), grad(loss(lambda f: f))(b))


def test_remat_inside_a_scan_and_around_one() -> None:
    x, w, b = inputs()

    def inside(x: Any, w: Any) -> Any:
        body = pfx.remat(lambda c, w: (torch.tanh(c @ w + b), None))
        return (pfx.scan(body, x, w)[0] ** 2).sum()

    around = lambda x, w: pfx.remat(lambda x: plain(pfx.scan, None, x, w, b))(x)
    for found, expected in (
        (
            inside,
            lambda x, w: (unrolled(lambda c, w: (torch.tanh(c @ w + b), None), x, w)[0] ** 2).sum(),
        ),
        (around, lambda x, w: plain(unrolled, None, x, w, b)),
    ):
        assert_same(grad(found, (0, 1))(x, w), grad(expected, (0, 1))(x, w))


def test_remat_keeps_the_structure_of_the_result() -> None:
    out = pfx.remat(lambda d: {"y": (d["x"] * 2, None), "n": d["n"] + 1})(
        {"x": torch.ones(2), "n": torch.tensor(3)}
    )
    assert out["y"][1] is None and int(out["n"]) == 4 and out["y"][0].tolist() == [2.0, 2.0]
