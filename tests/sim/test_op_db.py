"""The equality law, op by op: under any specs, jit computes what plain torch computes.

Every op of torch's database that can be traced runs with its gradient on two meshes, with its tensors
split in several ways. Half of the runs compute every device's copy and compare those bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

import pfx
from pfx import P
from pfx.errors import TraceError
from tests.sim import op_samples
from tests.sim.op_samples import Case, cases, difference

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples provoke torch's warnings

PAIR = pfx.make_mesh(x=2)
GRID = pfx.make_mesh(x=2, y=2)
Choice = dict[tuple[int, int], Any]  # (tensor, dim): axes

NAMES = sorted(set(op_samples.operators()) - op_samples.UNTRACEABLE)


def test_most_ops_are_covered() -> None:
    assert len(NAMES) >= 550


@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_torch(name: str) -> None:
    ran = 0
    for case in cases(name, 4 if op_samples.EVERYTHING else 1):
        try:
            check_case(case.with_gradient(), case)
        except (RuntimeError, TraceError):  # torch has no derivative here, or one that reads values
            check_case(case.fn, case)
        ran += 1
    assert ran, "no sample ran"


@pytest.mark.parametrize("name", sorted(op_samples.RANDOM))
def test_global_random_numbers_are_refused(name: str) -> None:
    for case in cases(name, 25):  # some samples draw nothing: dropout with training=False
        try:
            pfx.jit(case.fn, mesh=PAIR).lower(*case.tensors)
        except TraceError as error:
            assert "draws from torch's global random number generator" in str(error)
            return
    pytest.fail("no sample was refused")


def check_case(fn: Any, case: Case) -> None:
    """Compare jit with torch under a few splits; every other run checks all copies."""
    want = [t.detach() for t in fn(*[t.clone() for t in case.tensors])]
    for number, (mesh, choice) in enumerate(choices(case)):
        specs = tuple(spec_of(i, t.ndim, choice) for i, t in enumerate(case.tensors))
        step = pfx.jit(fn, mesh=mesh, in_specs=specs, check=number % 2 == 0)
        got = pfx.device_get(step(*case.tensors))
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            problem = difference(a, b)
            assert not problem, f"{case}: result {k} on {mesh} with {specs}: {problem}"


def choices(case: Case) -> Iterator[tuple[pfx.Mesh, Choice]]:
    """A few ways to split a case's tensors, fixed by its name."""
    draw = random.Random(case.name)
    each = 6 if op_samples.EVERYTHING else 1
    alone = [{slot: "x"} for slot in case.slots]
    both = [{slot: ("y", "x")} for slot in case.slots if case.size(slot) % 4 == 0]
    pairs = [{a: "x", b: "y"} for a, b in itertools.permutations(case.slots, 2)]
    yield from ((PAIR, choice) for choice in draw.sample(alone, min(each, len(alone))))
    yield from ((GRID, choice) for choice in draw.sample(pairs, min(each, len(pairs))))
    if op_samples.EVERYTHING or not pairs:
        yield from ((GRID, choice) for choice in draw.sample(both, min(each, len(both))))
    if not alone:
        yield PAIR, {}


def spec_of(tensor: int, ndim: int, choice: Choice) -> P:
    return P(*(choice.get((tensor, dim)) for dim in range(ndim)))
