"""Pipelines whose stages are real gloo processes; one start of four runs all checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.launch import run_checks

CHECKS = [
    *("one_f_one_b", "few_microbatches", "all_forward_first", "several_stages_a_device"),
    *("a_v_with_empty_stages", "evaluation", "a_measured_run", "other_order", "a_stage_dies"),
]


@pytest.mark.timeout(300)
def test_pipelines(tmp_path: Path) -> None:
    failures = run_checks(CHECKS, tmp_path, size=4, torchrun=False)
    assert not failures, "\n".join(failures)
