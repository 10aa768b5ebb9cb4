"""Every schedule adds up in one order: the same bits, however the microbatches travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pfx
from pfx.compiler import products
from pfx.schedules import Schedule
from tests.common import Case, State, assert_same_run, differences, run, tolerance
from tests.sim.pipelines import VIRTUAL, assert_same_bits

LAYERS, MICROBATCHES = 8, 5
CONFIG = {"num_layers": LAYERS, "dropout": 0.2}


def run_of(schedule: Any, pp: int = 2, virtual: int = 1, **options: Any) -> list[State]:
    """Two steps of the toy model; with momentum, the first state holds the gradient."""
    plan = {"pp": pp, "virtual": virtual, "schedule": schedule, "microbatches": MICROBATCHES}
    plan |= {"dp": 2, **options.pop("plan", {})}
    case = Case("toy", CONFIG, plan, dtype=torch.float32, masked=0.4)
    return run(case.train(**options), case, 2)


@pytest.fixture(scope="module")
def flat() -> list[State]:
    """1F1B on two devices, one stage on each."""
    return run_of("1f1b")


@pytest.fixture(scope="module")
def v_shaped() -> list[State]:
    """ZB-V on two devices, two stages on each."""
    return run_of("zb-v", virtual=2)


@pytest.mark.parametrize("schedule", [name for name, counts in VIRTUAL.items() if 1 in counts])
def test_all_schedules_of_a_placement(schedule: str, flat: list[State]) -> None:
    assert_same_bits(run_of(schedule), flat)


def test_both_v_shaped_schedules(v_shaped: list[State]) -> None:
    assert_same_bits(run_of("dualpipe-v", virtual=2), v_shaped)


@pytest.fixture(scope="module")
def undivided() -> list[State]:
    """1F1B on two devices, the batch whole."""
    return run_of("1f1b", plan={"dp": 1})


@pytest.mark.parametrize(("schedule", "pp", "virtual"), [("interleaved", 2, 3), ("zb-h1", 4, 1)])
def test_other_placements(schedule: str, pp: int, virtual: int, undivided: list[State]) -> None:
    """Loss, gradients, parameters; the norm adds up the layers by device, so it rounds otherwise.

    So may a kernel that updates what stages share: of a part of another size it takes other elements
    one by one. The second step starts from there.
    """
    found = run_of(schedule, pp, virtual, plan={"dp": 1})
    shared = [f".params['{name}']" for name in ("table", "scale")]
    assert_same_bits(found[:1], undivided[:1], "grad_norm", *shared)
    apart = differences(found[1], undivided[1])
    assert max(apart.values()) <= tolerance(torch.float32)


def test_both_ends_at_one_device(undivided: list[State]) -> None:
    """There the tied table's gradient is added up before it is divided by the weight, not after."""
    found = run_of("zb-v", virtual=2, plan={"dp": 1})
    assert_same_bits(found[:1], undivided[:1], "grad_norm", "table")


def test_halves_of_a_backward_by_the_kernels_of_large_products(
    monkeypatch: pytest.MonkeyPatch, flat: list[State]
) -> None:
    """A half, a whole and a forward choose one kernel for a product, whatever else is beside it."""
    monkeypatch.setattr(products, "LARGE", 1)
    whole = run_of("1f1b")
    assert_same_bits(run_of("zb-h1"), whole)
    assert_same_run(whole, flat, tolerance(torch.float32))


def test_any_legal_order(flat: list[State], v_shaped: list[State]) -> None:
    assert_same_bits(run_of("zb-h2", seed=1), flat)
    assert_same_bits(run_of("zb-v", virtual=2, seed=2), v_shaped)


def test_all_copies_agree() -> None:
    plan = {"tp": 2, "zero": 3, "sequence_parallel": True}
    checked = run_of("zb-h1", plan=plan, check=True)
    assert_same_bits(checked, run_of("1f1b", plan=plan))


# A user's own order ----------------------------------------------------------------------------------


def own(rows: Sequence[str], name: str) -> Schedule:
    """A schedule from phases: "F: 0 1 2" is the forward of each of those microbatches in order."""
    lines = []
    for device, row in enumerate(rows):
        parts = (part.split(":") for part in row.split(";"))
        lines.append([f"{device}{kind.strip()}{m}" for kind, ms in parts for m in ms.split()])
    return pfx.schedules.parse("\n".join(" ".join(line) for line in lines), name=name)


ORDERS = {
    "last in, first out": own(["F: 0 1 2 3 4; B: 4 3 2 1 0"] * 2, "lifo"),
    "forward backwards": own(["F: 4 2 0 3 1; B: 1 3 0 2 4"] * 2, "odd"),
    "all W at the end, in no order": own(["F: 0 1 2 3 4; I: 2 0 1 4 3; W: 3 0 4 1 2"] * 2, "late W"),
    "one device splits its backward": own(
        ["F: 0 1 2 3 4; B: 4 2 0 3 1", "F: 0 1 2 3 4; I: 4 2 0 3 1; W: 1 3 0 2 4"], "half split"
    ),
    "some microbatches split theirs": own(
        ["F: 0 1 2 3 4; B: 4; I: 2 0; B: 3 1; W: 0 2", "F: 0 1 2 3 4; I: 4; B: 2 0; I: 3 1; W: 4 1 3"],
        "mixed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_a_users_own_order(name: str, flat: list[State]) -> None:
    assert_same_bits(run_of(ORDERS[name], seed=3), flat)
