"""The work of a block: torch's own counter of operations, and bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pfx
from pfx import P
from pfx.compiler.work import Work, work_of

ONE = pfx.make_mesh(x=1)
TWO = pfx.make_mesh(x=2)


def work(fn: Callable[..., Any], *args: torch.Tensor) -> Work:
    return work_of(pfx.jit(fn, mesh=ONE).lower(*args))


def draw(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


QKV = (draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 8))
CASES = [
    (torch.matmul, (draw(3, 4), draw(4, 5))),
    (torch.bmm, (draw(2, 3, 4), draw(2, 4, 5))),
    (torch.addmm, (draw(5), draw(3, 4), draw(4, 5))),
    (torch.baddbmm, (draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5))),
    (F.linear, (draw(2, 6, 4), draw(5, 4), draw(5))),
    (F.conv2d, (draw(2, 4, 6, 6), draw(8, 4, 3, 3))),
    (attention, QKV),
]


@pytest.mark.parametrize(("fn", "args"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_operations_are_those_that_torch_counts(fn: Any, args: tuple[torch.Tensor, ...]) -> None:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        fn(*args)  # attention as its two products: those of its CPU kernel torch does not count
    assert work(fn, *args).flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("fn, args", [CASES[0], CASES[5]])
def test_so_are_those_of_gradients(fn: Any, args: tuple[torch.Tensor, ...]) -> None:
    """Of a sum whose value is asked for too, so that no forward is left out."""

    def both(*args: torch.Tensor) -> Any:
        return pfx.value_and_grad(lambda *args: fn(*args).square().sum(), argnums=(0, 1))(*args)

    leaves = [arg.clone().requires_grad_() for arg in args]
    with FlopCounterMode(display=False) as counter:
        fn(*leaves).square().sum().backward()
    assert work(both, *args).flops == counter.get_total_flops()


def test_the_gradient_of_attention_makes_the_scores_again() -> None:
    """Two products forwards; backwards the scores again, and four more."""

    def both(*args: torch.Tensor) -> Any:
        return pfx.value_and_grad(lambda *args: attention(*args).sum(), argnums=(0, 1, 2))(*args)

    assert 2 * work(both, *QKV).flops == 7 * work(attention, *QKV).flops


def test_causal_attention_is_half() -> None:
    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    square = (draw(2, 3, 8, 4),) * 3
    assert 2 * work(causal, *square).flops == work(attention, *square).flops > 0


def test_loops_are_multiplied_out() -> None:
    def deep(x: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        return pfx.scan(lambda h, w: (torch.tanh(h @ w), None), x, ws)[0]

    once = work(lambda x, w: torch.tanh(x @ w), draw(3, 4), draw(4, 4))
    assert work(deep, draw(3, 4), draw(6, 4, 4)) == once * 6
    assert once == Work(flops=2 * 3 * 4 * 4, bytes=2 * 4 * 3 * 4, calls=2)


def test_other_calls_move_bytes_and_views_do_nothing() -> None:
    assert work(torch.add, draw(5, 6), draw(5, 6)) == Work(bytes=3 * 4 * 30, calls=1)
    assert work(torch.sum, draw(5, 6)) == Work(bytes=4 * 31, calls=1)
    assert work(lambda x: x.reshape(30).view(6, 5).t(), draw(5, 6)) == Work()


def test_a_lookup_reads_what_it_writes() -> None:
    table, rows = draw(1000, 8), torch.zeros(3, dtype=torch.int64)
    assert work(lambda table, rows: F.embedding(rows, table), table, rows) == Work(
        bytes=2 * 4 * 3 * 8, calls=1
    )


def test_a_device_has_its_part_and_the_collective() -> None:
    """Contracted over two devices: half of the product, then a sum of what all have."""
    step = pfx.jit(torch.matmul, mesh=TWO, in_specs=(P(None, "x"), P("x")))
    program = step.lower(draw(3, 8), draw(8, 5))
    assert [c.op for c in program.collectives()] == ["all_reduce"]
    assert work_of(program) == Work(flops=3 * 8 * 5, bytes=2 * 4 * 3 * 5, calls=2)
