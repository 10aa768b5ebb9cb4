"""Buffers are overwritten only where nobody can tell."""

from __future__ import annotations

import torch

import pfx
from pfx import P
from pfx.compiler.ir import Compute

MESH = pfx.make_mesh(x=2)


def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sqrt((a * b + 1) * 2) / 3


def in_place_calls(program: pfx.compiler.program.Program) -> list[str]:
    return [
        str(i.target)
        for i in program.instrs
        if isinstance(i, Compute) and max(i.over, default=-1) >= 0
    ]


def test_a_chain_of_elementwise_calls_runs_in_the_memory_of_its_first_result() -> None:
    step = pfx.jit(chain, mesh=MESH, in_specs=(P("x"), P("x")))
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    assert torch.equal(pfx.device_get(step(a, b)), chain(a, b))
    calls = in_place_calls(step.lower(a, b))
    assert len(calls) == 4 and calls[0].startswith("aten.add")


def test_a_donated_array_is_overwritten_and_gone_and_the_tensor_it_came_from_is_not() -> None:
    step = pfx.jit(chain, mesh=MESH, in_specs=(P("x"), P("x")), donate=(0,))
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    kept, want = a.clone(), chain(a, b)
    given = pfx.device_put(a, MESH, P("x"))
    memory = given.parts[0].data_ptr()
    out = step(given, b)
    assert torch.equal(pfx.device_get(out), want)
    assert out.parts[0].data_ptr() == memory
    assert given.parts == ()
    assert torch.equal(a, kept)
    whole = pfx.jit(chain, mesh=MESH, donate=(0,))
    whole(pfx.device_put(a, MESH), b)
    whole(a, b)
    assert torch.equal(a, kept)


def test_without_donation_no_argument_changes() -> None:
    step = pfx.jit(chain, mesh=MESH, in_specs=(P("x"), P("x")))
    a = pfx.device_put(torch.rand(4, 3), MESH, P("x"))
    before = pfx.device_get(a).clone()
    step(a, a)
    assert torch.equal(pfx.device_get(a), before)


def test_an_array_donated_twice_is_still_two_values() -> None:
    step = pfx.jit(lambda p, q: (p + 1, q * 2), mesh=MESH, donate=(0, 1))
    x = torch.rand(5)
    array = pfx.device_put(x, MESH)
    out = step(array, array)
    assert torch.equal(pfx.device_get(out[0]), x + 1)
    assert torch.equal(pfx.device_get(out[1]), x * 2)


def test_results_that_share_memory_are_separated_so_that_each_can_be_donated() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.t(), y, x

    x = torch.rand(2, 3)
    outs = pfx.jit(views, mesh=MESH)(x)
    step = pfx.jit(lambda p, q: (p * 10, q + 0), mesh=MESH, donate=(0,))
    for i in range(4):
        others = [pfx.device_get(o).clone() for j, o in enumerate(outs) if j > i]
        step(outs[i], torch.zeros(1))
        for now, before in zip([o for j, o in enumerate(outs) if j > i], others, strict=True):
            assert torch.equal(pfx.device_get(now), before)
    assert torch.equal(pfx.device_get(outs[3]) if outs[3].parts else x, x)


def test_a_value_is_not_overwritten_while_a_view_of_it_is_read_later() -> None:
    def late(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y.t()
        z = y + 1
        return z.t() + view

    x = torch.rand(4, 4)
    for specs in (P(), P("x"), P(None, "x")):
        got = pfx.jit(late, mesh=MESH, in_specs=(specs,))(x)
        torch.testing.assert_close(pfx.device_get(got), late(x))


def test_a_value_is_not_overwritten_by_a_call_that_also_reads_its_transpose() -> None:
    def symmetric(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + y.t()

    x = torch.rand(4, 4)
    got = pfx.jit(symmetric, mesh=MESH)(x)
    assert torch.equal(pfx.device_get(got), symmetric(x))
