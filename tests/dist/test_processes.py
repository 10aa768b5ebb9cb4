"""Real gloo processes compute what the simulated mesh computes, bit for bit.

A process takes seconds to start, so each group of them is started once and runs many checks (functions
of `checks.py` and `region_checks.py`). Both ways to be started are used: torch's launcher, and its
variables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.launch import run_checks

TWO = [
    *("put_and_get", "moves_one_axis", "moves_large", "carried_dtypes", "training_steps"),
    *("dealt_rows",),
    *("logic_and_integers", "sharded_init", "unreduced", "manual_moves"),
    *("weights_in_and_out", "weights_that_fail"),
    *("different_programs", "late_rank", "dead_rank"),
]
FOUR = [
    *("moves_one_axis", "moves_two_axes", "moves_native", "moves_large", "buckets"),
    *("put_and_get", "training_steps", "gpt_steps", "logic_and_integers", "sharded_init"),
    *("sums_of_scattered", "unreduced", "manual_moves", "dealt_rows"),
    *("weights_in_and_out", "weights_that_fail"),
    *("different_programs", "late_rank", "dead_rank"),
]
REGIONS = [
    *("every_collective", "dtypes", "every_gradient", "not_numbers", "groups", "orders_of_axes"),
    *("loops", "owed_across_steps", "some_axes", "an_if", "the_simulated_tests"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "torchrun", "checks"),
    [(2, True, TWO), (4, False, FOUR), (4, False, REGIONS)],
    ids=["2", "4", "4-regions"],
)
def test_processes(size: int, torchrun: bool, checks: list[str], tmp_path: Path) -> None:
    failures = run_checks(checks, tmp_path, size=size, torchrun=torchrun)
    assert not failures, "\n".join(failures)
