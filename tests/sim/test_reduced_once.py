"""Layers in a scan inside microbatches in a scan: one reduction for each parameter and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax
from tests.sim.manual import assert_close, draw

MESH = pfx.make_mesh(dp=2)
WIDE = pfx.make_mesh(dp=2, tp=2)
LAYERS, WIDTH, MICROBATCHES, ROWS = 3, 4, 5, 8
Tree = dict[str, torch.Tensor]


def layers(params: Tree, x: torch.Tensor) -> torch.Tensor:
    layer = lambda h, p: (torch.tanh(h @ p["w"] + p["b"]), None)
    return pfx.scan(layer, x, params)[0]


def loss(params: Tree, x: torch.Tensor) -> torch.Tensor:
    return layers(params, x).square().sum()


def dense(params: Tree, xs: torch.Tensor) -> torch.Tensor:
    return torch.stack([loss(params, x) for x in xs]).sum()


def total(params: Tree, xs: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The loss of all microbatches, one after the other."""
    return pfx.scan(lambda sum_, x: (sum_ + loss(params, x), None), start, xs)[0]


def accumulated(params: Tree, xs: torch.Tensor, zeros: Tree) -> Tree:
    """The gradient of each microbatch, added up."""
    add = lambda sum_, x: (pfx.tree.map(torch.add, sum_, pfx.grad(loss)(params, x)), None)
    return pfx.scan(add, zeros, xs)[0]


def region(
    fn: Callable[..., Any], params: Any, out: Any, mesh: pfx.Mesh = MESH, **more: Any
) -> Any:
    return pfx.shard_map(fn, mesh=mesh, in_specs=(params, P(None, "dp")), out_specs=out, **more)


def outside(params: Tree, xs: torch.Tensor) -> Tree:
    """The loss is summed inside; the gradient is taken outside, by parameters that come in reduced."""

    def local(params: Tree, xs: torch.Tensor) -> torch.Tensor:
        start = lax.pcast(xs.new_zeros(()), "dp", to="varying")
        return lax.psum(total(params, xs, start), "dp")

    return pfx.grad(region(local, P(reduced="dp"), P()))(params, xs)


def cast_inside(params: Tree, xs: torch.Tensor) -> Tree:
    """The gradient is taken outside, and the parameters are cast to reduced inside."""

    def local(params: Tree, xs: torch.Tensor) -> torch.Tensor:
        start = lax.pcast(xs.new_zeros(()), "dp", to="varying")
        return lax.psum(total(lax.pcast(params, "dp", to="reduced"), xs, start), "dp")

    return pfx.grad(region(local, P(), P()))(params, xs)


def carried(params: Tree, xs: torch.Tensor) -> Tree:
    """Gradients are taken in the loop, and its carry holds their addends."""

    def local(params: Tree, xs: torch.Tensor) -> Tree:
        zeros = lax.pcast(pfx.tree.map(torch.zeros_like, params), "dp", to="varying")
        zeros = lax.pcast(zeros, "dp", to="unreduced")
        return lax.psum(accumulated(lax.pcast(params, "dp", to="reduced"), xs, zeros), "dp")

    return region(local, P(), P())(params, xs)


def left_unreduced(params: Tree, xs: torch.Tensor) -> Tree:
    """The loop is outside; each turn's region is left with addends."""
    one = pfx.shard_map(
        pfx.grad(loss), mesh=MESH, in_specs=(P(reduced="dp"), P("dp")), out_specs=P(unreduced="dp")
    )
    add = lambda sum_, x: (pfx.tree.map(torch.add, sum_, one(params, x)), None)
    return pfx.scan(add, pfx.tree.map(torch.zeros_like, params), xs)[0]


def annotated(params: Tree, xs: torch.Tensor) -> Tree:
    """No region at all: the same loops, and specs for the arguments."""
    return accumulated(params, xs, pfx.tree.map(torch.zeros_like, params))


def data() -> tuple[Tree, torch.Tensor]:
    params = {"w": draw(LAYERS, WIDTH, WIDTH) / 2, "b": draw(LAYERS, WIDTH, seed=1)}
    return params, draw(MICROBATCHES, ROWS, WIDTH, seed=2)


@pytest.mark.parametrize("step", [outside, cast_inside, carried, left_unreduced, annotated])
def test_each_parameter_is_reduced_once(step: Callable[..., Tree]) -> None:
    params, xs = data()
    expected = pfx.grad(dense)(params, xs)
    assert_close(step(params, xs), expected)
    compiled = pfx.jit(step, mesh=MESH, in_specs=(P(), P(None, "dp")), out_specs=P(), check=True)
    assert_close(pfx.device_get(compiled(params, xs)), expected)
    found = Counter((c.op, c.shape, c.count) for c in compiled.lower(params, xs).collectives())
    assert found == {("all_reduce", tuple(p.shape), 1): 1 for p in params.values()}


def test_with_invarying_parameters_it_is_once_an_iteration() -> None:
    """What `reduced` saves: an invarying parameter's gradient is summed each time it is taken."""
    params, xs = data()
    step = region(annotated, P(), P())
    assert_close(step(params, xs), pfx.grad(dense)(params, xs))
    program = pfx.jit(step, mesh=MESH).lower(params, xs)
    assert sum(c.count for c in program.collectives()) == LAYERS * MICROBATCHES * len(params)


def test_the_compiler_does_so_around_a_region_of_other_axes() -> None:
    """A block by hand over tp, in loops that the compiler splits over dp."""
    up, down = draw(WIDTH, 8), draw(8, WIDTH, seed=1)
    xs = draw(MICROBATCHES, ROWS, WIDTH, seed=2)
    block = lambda up, down, x: lax.psum(torch.tanh(x @ up) @ down, "tp")
    specs = (P(None, "tp"), P("tp"), P())
    by_hand = pfx.shard_map(block, mesh=WIDE, in_specs=specs, out_specs=P(), axis_names=("tp",))

    def step(up: torch.Tensor, down: torch.Tensor, xs: torch.Tensor) -> Any:
        one = lambda params, x: by_hand(*params, x).square().sum()
        add = lambda sum_, x: (
            pfx.tree.map(torch.add, sum_, pfx.grad(one)((up, down), x)),
            None,
        )
        return pfx.scan(add, (torch.zeros_like(up), torch.zeros_like(down)), xs)[0]

    compiled = pfx.jit(
        step,
        mesh=WIDE,
        in_specs=(P(None, "tp"), P("tp"), P(None, "dp")),
        out_specs=(P(None, "tp"), P("tp")),
        check=True,
    )
    whole = lambda params, xs: sum(
        (torch.tanh(x @ params[0]) @ params[1]).square().sum() for x in xs
    )
    assert_close(pfx.device_get(compiled(up, down, xs)), pfx.grad(whole)((up, down), xs))
    over_dp = [c for c in compiled.lower(up, down, xs).collectives() if c.axes == ("dp",)]
    assert [(c.op, c.count) for c in over_dp] == [("all_reduce", 1)] * 2
