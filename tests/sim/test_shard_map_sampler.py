"""Random manual regions against a plain reference: values, types, derivatives, vmap, compiled.

The reference (`tests.sim.lockstep`) cuts every input into blocks, runs the program's text for all
devices in lockstep on numpy arrays, and puts the blocks together. On torch tensors the same reference
is a plain function of the global values, which torch.func differentiates without any of pfx.

Run more of them, and others, with ``HYPOTHESIS_PROFILE=explore pytest --hypothesis-seed=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings

import pfx
from pfx.errors import PfxError
from tests.sim.sampler import Case, cases

Tensors = tuple[torch.Tensor, ...]
CASES = settings(max_examples=2 * settings().max_examples)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_drawn_region_means_what_its_devices_do(axes: int) -> None:
    @CASES
    @given(cases(axes))
    def law(case: Case) -> None:
        check_values(case)
        check_derivatives(case)
        check_each_argument_mapped(case)
        check_refusals(case)

    law()


def check_values(case: Case) -> None:
    want = expected(case, case.args)
    agree("values", case.fn(*case.args), want)
    if case.jit:
        step = pfx.jit(case.fn, mesh=case.mesh, check=True)
        agree("compiled", pfx.device_get(step(*case.args)), want)


def check_derivatives(case: Case) -> None:
    args = case.args
    weights = [torch.from_numpy(like(out, 1)) for out in expected(case, args)]
    directions = case.drawn(100)
    plain = derivatives(case.reference(torch), weights, directions)
    found = derivatives(case.fn, weights, directions)
    want = plain["gradient"](*args), plain["reverse over reverse"](*args)
    agree("gradient", found["gradient"](*args), want[0])
    for order_two in ("reverse over reverse", "forward over reverse"):
        agree(order_two, found[order_two](*args), want[1])
    if case.jit:
        step = pfx.jit(found["gradient"], mesh=case.mesh, check=True)
        agree("compiled gradient", pfx.device_get(step(*args)), want[0])


def derivatives(
    fn: Callable[..., Tensors], weights: Sequence[torch.Tensor], directions: Tensors
) -> dict[str, Callable[..., Tensors]]:
    """The gradient of a weighted sum of the results, and its derivative along a direction twice."""
    every = tuple(range(len(directions)))

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return sum(
            ((w * y).sum() for w, y in zip(weights, fn(*args), strict=True)), torch.zeros(())
        )

    gradient = torch.func.grad(loss, every)

    def slope(*args: torch.Tensor) -> torch.Tensor:
        pairs = zip(gradient(*args), directions, strict=True)
        return sum(((g * d).sum() for g, d in pairs), torch.zeros(()))

    return {
        "gradient": gradient,
        "reverse over reverse": torch.func.grad(slope, every),
        "forward over reverse": lambda *args: torch.func.jvp(gradient, args, directions)[1],
    }


def check_each_argument_mapped(case: Case) -> None:
    """`vmap` over one argument at a time is the loop over it."""
    for i, other in enumerate(case.drawn(200)):
        both = [case.args[i], other]
        dim = (i + len(case.lines)) % (other.ndim + 1)
        in_dims = tuple(dim if k == i else None for k in range(len(case.args)))
        args = [torch.stack(both, dim) if k == i else x for k, x in enumerate(case.args)]
        rows = [expected(case, [*case.args[:i], x, *case.args[i + 1 :]]) for x in both]
        want = [numpy.stack(column) for column in zip(*rows, strict=True)]
        agree(f"vmap over argument {i}", pfx.vmap(case.fn, in_dims)(*args), want)


def check_refusals(case: Case) -> None:
    """What the types forbid is an error of pfx."""
    for wrong in case.wrong:
        try:
            wrong.fn(*wrong.args)
        except PfxError:
            continue
        pytest.fail(f"accepted, and should not be:{wrong}")


def expected(case: Case, args: Sequence[torch.Tensor]) -> Sequence[numpy.ndarray]:
    return case.reference(numpy)(*(x.numpy() for x in args))


def like(out: Any, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).standard_normal(out.shape)


def agree(what: str, found: Sequence[Any], want: Sequence[Any]) -> None:
    """Equal to 1e-9 of the largest element."""
    assert len(found) == len(want), what
    for i, (got, right) in enumerate(zip(found, want, strict=True)):
        right = right if isinstance(right, torch.Tensor) else torch.from_numpy(right.copy())
        assert got.shape == right.shape, f"{what} {i}: {got.shape} is not {right.shape}"
        limit = 1e-9 * max(1.0, float(right.abs().max()))
        gap = float((got - right).abs().max())
        assert gap <= limit, f"{what} {i}: off by {gap:.3g}\nfound {got}\nright {right}"
