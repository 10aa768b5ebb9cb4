"""Large products go to oneDNN, with their bias: the same function, whatever its operands look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import pfx
from pfx import P, _torch
from pfx.compiler import products
from pfx.compiler.ir import Compute
from pfx.compiler.work import work_of

MESH = pfx.make_mesh(x=2)
pytestmark = pytest.mark.skipif(not _torch.has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def every_product_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(products, "LARGE", 1)
    yield


def compiled(fn: Callable[..., Any], *args: torch.Tensor, specs: Any = None, mesh: Any = MESH):
    """What a function returns when compiled, and the names of what its program calls."""
    step = pfx.jit(fn, mesh=mesh, in_specs=specs or (P(),) * len(args))
    text = str(step.lower(*args))
    return pfx.device_get(step(*args)), text


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(batch, seq, width) times (width, ...)."""
    return (x.flatten(0, 1) @ w.flatten(1)).reshape(*x.shape[:2], *w.shape[1:])


def affine(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return dot(x, w) + b


@hypothesis.given(
    st.tuples(*(st.integers(1, 9),) * 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([P(), P("x")]),
    st.booleans(),
)
def test_a_product_with_its_bias_is_the_function(sizes, outs, spec, first):
    rows, seq, width = sizes
    draw = torch.Generator().manual_seed(rows + 100 * width)
    x = torch.randn(2 * rows, seq, width, generator=draw)
    w, b = (torch.randn(s, generator=draw) for s in ((width, *outs), tuple(outs)))
    fn = affine if first else lambda x, w, b: b + dot(x, w)
    found, text = compiled(fn, x, w, b, specs=(spec, P(), P()))
    close(found, affine(x, w, b))
    assert "aten.mm" not in text
    assert "linear(" in text


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.data())
def test_operands_may_lie_in_memory_in_any_way(m, k, n, data):
    """As they are, transposed, every other row or column, one row for all, or not at a cache line."""
    ways = {
        "plain": lambda a, b: torch.randn(a, b),
        "turned": lambda a, b: torch.randn(b, a).t(),
        "columns": lambda a, b: torch.randn(a, 2 * b)[:, ::2],
        "rows": lambda a, b: torch.randn(2 * a, b)[::2],
        "part": lambda a, b: torch.randn(a, b + 3)[:, 1:-2],
        "one row": lambda a, b: torch.randn(1, b).expand(a, b),
        "one column": lambda a, b: torch.randn(a, 1).expand(a, b),
        "shifted": lambda a, b: torch.randn(a * b + 1)[1:].view(a, b),
    }
    way = st.sampled_from(sorted(ways))
    a, b = ways[data.draw(way)](m, k), ways[data.draw(way)](k, n)
    bias = data.draw(
        st.sampled_from([torch.randn(n), torch.randn(2 * n)[::2], torch.ones(1).expand(n)])
    )
    close(products.product(a, b), a @ b)
    close(products.linear(a, b, bias), a @ b + bias)


@pytest.mark.parametrize(("m", "k", "n"), [(128, 384, 1536), (77, 1000, 33), (1, 300, 70)])
def test_a_bias_added_on_the_way_gives_the_bits_of_one_added_later(m, k, n):
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    assert torch.equal(products.linear(a, b, bias), products.product(a, b) + bias)


def test_a_product_with_another_reader_keeps_its_bias_apart():
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = (x @ w).reshape(2, 3, 5)
        return (y + b) * y

    x, w, b = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)
    found, text = compiled(fn, x, w, b)
    close(found, fn(x, w, b))
    assert "product(" in text and "linear(" not in text


@pytest.mark.parametrize("bias", [torch.randn(1, 5), torch.randn(3, 5), torch.randn(1)])
def test_what_is_no_row_is_added_as_it_was(bias):
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ w).reshape(2, 3, 5) + b

    x, w = torch.randn(6, 4), torch.randn(4, 5)
    found, text = compiled(fn, x, w, bias)
    close(found, fn(x, w, bias))
    assert "product(" in text and "linear(" not in text


def test_a_scaled_bias_is_added_as_it_was():
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.add((x @ w).reshape(2, 3, 5), b, alpha=3)

    x, w, b = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)
    found, text = compiled(fn, x, w, b)
    close(found, fn(x, w, b))
    assert "linear(" not in text


def test_a_bias_waits_for_the_sum_over_devices():
    """A product of split columns and rows is partial: its bias is added once, after the sum."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ w).reshape(2, 3, 5) + b

    x, w, b = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)
    found, text = compiled(fn, x, w, b, specs=(P(None, "x"), P("x"), P()))
    close(found, fn(x, w, b))
    assert "product(" in text and "linear(" not in text and "all_reduce" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay(dtype):
    x, w = torch.randn(6, 4, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    found, text = compiled(lambda x, w: x @ w, x, w)
    torch.testing.assert_close(found, x @ w)
    assert "aten.mm" in text


def test_the_gradient_of_a_weight_stays():
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.grad(lambda x, w: (x @ w).square().sum(), argnums=(0, 1))(x, w)

    x, w = torch.randn(6, 4), torch.randn(4, 5)
    found, text = compiled(fn, x, w)
    for one, expected in zip(found, fn(x, w), strict=True):
        close(one, expected)
    assert text.count("product(") == 2 and text.count("aten.mm(") == 1


def test_small_ones_and_a_torch_without_stay(monkeypatch: pytest.MonkeyPatch):
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    lower = lambda: str(pfx.jit(lambda x, w: x @ w, mesh=MESH).lower(x, w))
    monkeypatch.setattr(products, "LARGE", 6 * 4 * 5 + 1)
    assert "aten.mm(" in lower()
    monkeypatch.setattr(products, "LARGE", 6 * 4 * 5)
    assert "product(" in lower()
    monkeypatch.setattr(_torch, "has_onednn", lambda: False)
    assert "aten.mm(" in lower()


def test_the_size_that_counts_is_a_devices(monkeypatch: pytest.MonkeyPatch):
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    lower = lambda spec: str(
        pfx.jit(lambda x, w: x @ w, mesh=MESH, in_specs=(spec, P())).lower(x, w)
    )
    monkeypatch.setattr(products, "LARGE", 6 * 4 * 5)
    assert "product(" in lower(P())
    assert "aten.mm(" in lower(P("x"))


def test_what_follows_runs_in_the_memory_of_a_product():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) * 2

    x, w = torch.randn(6, 4), torch.randn(4, 5)
    step = pfx.jit(fn, mesh=MESH)
    made, *rest = [i for i in step.lower(x, w).instrs if isinstance(i, Compute)]
    assert made.target is products.product
    assert [max(i.over, default=-1) for i in rest] == [0, 0]
    close(pfx.device_get(step(x, w)), fn(x, w))


def test_its_work_is_that_of_a_product(monkeypatch: pytest.MonkeyPatch):
    x, w, b = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)
    work = lambda: work_of(pfx.jit(affine, mesh=MESH).lower(x, w, b))
    ours = work()
    monkeypatch.setattr(products, "LARGE", 1 << 30)
    assert ours.flops == work().flops == 2 * 6 * 4 * 5
    assert ours.calls == work().calls - 1
