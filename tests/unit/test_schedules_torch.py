"""The built-in schedules compute in the order of torch's own generators, for the sizes it has."""

from __future__ import annotations

from itertools import product

import pytest

from pfx.schedules.build import build
from pfx.schedules.interleaved import rounds

pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops


def torch_order(name: str, p: int, m: int, virtual: int | None = None) -> list[list[str]]:
    """The computations of torch's generator, an overlapped pair as its parts."""
    rows = get_schedule_ops(name, p, m, virtual)
    flat = ([b for a in row if a is not None for b in a.sub_actions or (a,)] for row in rows)
    return [[str(a) for a in row if a.computation_type.value in "FBIW"] for row in flat]


def ours(name: str, p: int, m: int, virtual: int = 1) -> list[list[str]]:
    schedule = build(name, stages=p, microbatches=m, virtual=virtual)
    return [[str(action) for action in row] for row in schedule.devices]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 3), (4, 8)])
def test_torch_agrees_on_gpipe(p: int, m: int) -> None:
    assert ours("gpipe", p, m) == torch_order("GPipe", p, m)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (6, 9)])
def test_torch_agrees_on_1f1b(p: int, m: int) -> None:
    """On all devices but the last, whose first forward torch 2.13's picture numbers 1, not 0."""
    mine, theirs = ours("1f1b", p, m), torch_order("1F1B", p, m)
    assert mine[:-1] == theirs[:-1]
    assert [a[:2] for a in mine[-1]] == [a[:2] for a in theirs[-1]]


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_torch_agrees_on_interleaved(p: int, virtual: int) -> None:
    """Wherever the rounds are equal; torch refuses other numbers of microbatches."""
    sizes = [m for m in range(1, 10) if len(set(rounds(p, m))) == 1]
    assert len(sizes) >= 5
    for m in sizes:
        theirs = torch_order("Interleaved1F1B", p, m, virtual)
        assert ours("interleaved", p, m, virtual) == theirs


@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 3, 4), (1, 2, 5, 8))])
def test_torch_agrees_on_zb_v(p: int, m: int) -> None:
    assert ours("zb-v", p, m, 2) == torch_order("ZBVZeroBubble", p, m, 2)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (1, 5), (2, 4), (3, 6), (3, 9), (4, 8), (6, 12)])
def test_torch_agrees_on_dualpipe_v(p: int, m: int) -> None:
    assert ours("dualpipe-v", p, m, 2) == torch_order("DualPipeV", p, m, 2)
