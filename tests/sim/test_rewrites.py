"""Rewrites of a graph that spare communication, and change no value."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import pfx
from pfx import P
from pfx.compiler.ir import LoopInstr

MESH = pfx.make_mesh(dp=2, tp=2)
HEADS = P("dp", "tp")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhmk,bhnk->bhmn", q, k)
    return torch.einsum("bhmn,bhnk->bhmk", torch.softmax(scores / 2, -1), v)


def draws(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


@pytest.mark.parametrize("fn", [attention, by_einsum])
def test_heads_and_batch_split_over_two_axes_need_no_communication(fn) -> None:
    gradient = pfx.grad(lambda *qkv: (fn(*qkv) ** 2).sum(), (0, 1, 2))
    args = draws((4, 4, 8, 6), (4, 4, 5, 6), (4, 4, 5, 6))
    specs = (HEADS,) * 3
    step = pfx.jit(gradient, mesh=MESH, in_specs=specs, out_specs=specs, check=True)
    assert not step.lower(*args).collectives()
    for found, expected in zip(pfx.device_get(step(*args)), gradient(*args), strict=True):
        torch.testing.assert_close(found, expected)


def test_products_with_broadcast_or_merged_batches() -> None:
    functions = (
        lambda a, b: a @ b[:, :1],
        lambda a, b: a @ b[0],
        lambda a, b: (a.flatten(0, 1) @ b.flatten(0, 1)).sum(0),
        lambda a, b: torch.einsum("bhmk,bhkn->hbnm", a, b),
        lambda a, b: a[:, 0] @ b[:, 0],
    )
    args = draws((4, 2, 3, 6), (4, 2, 6, 5))
    for fn in functions:
        for specs in ((HEADS, HEADS), (P("dp"), P(None, "tp")), (P("tp", "dp"), HEADS)):
            found = pfx.jit(fn, mesh=MESH, in_specs=specs, check=True)(*args)
            torch.testing.assert_close(pfx.device_get(found), fn(*args))


def projections(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    return (x * 2 + torch.tanh(x @ w["a"]) @ w["d"] + (x @ w["b"]) * (x @ w["c"]) @ w["d"]).sum()


def test_the_cotangents_of_one_activation_are_reduced_once() -> None:
    x, *weights = draws((6, 4), (4, 8), (4, 8), (4, 8), (8, 4))
    w = dict(zip("abcd", weights, strict=True))
    column, row = P(None, "tp"), P("tp")
    specs = (P("dp"), {"a": column, "b": column, "c": column, "d": row})
    gradient = pfx.grad(projections)
    step = pfx.jit(gradient, mesh=MESH, in_specs=specs, out_specs=P("dp"), check=True)
    torch.testing.assert_close(pfx.device_get(step(x, w)), gradient(x, w))
    found = Counter(c.axes for c in step.lower(x, w).collectives())
    assert found == {("tp",): 1}


def test_values_are_numbered_in_the_order_of_their_definition() -> None:
    def step(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        loss = lambda w: pfx.scan(lambda c, x: (torch.tanh(c @ w + x), None), xs[0], xs)[0].sum()
        return w - pfx.grad(loss)(w)

    w, xs = draws((4, 4), (3, 8, 4))
    program = pfx.jit(step, mesh=MESH, in_specs=(P(None, "tp"), P(None, "dp"))).lower(w, xs)

    def check(block) -> None:
        made = list(block.inputs)
        for instr in block.instrs:
            made += [value for value in instr.outs if value is not None]
            if isinstance(instr, LoopInstr):
                check(instr.body)
        assert [value.number for value in made] == list(range(1, len(made) + 1))

    check(program)
