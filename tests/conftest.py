"""What every test runs under: one torch thread, repeatable examples, a GPU only if there is one."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from pfx import api
from pfx.compiler.lower import Lowered, lower
from pfx.compiler.program import verify

torch.set_num_threads(1)

# Tracing is slow next to what hypothesis expects of a test, and a shared machine is slower still.
_SLOW = (hypothesis.HealthCheck.too_slow,)
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=20, suppress_health_check=_SLOW
)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=200, print_blob=True, suppress_health_check=_SLOW
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def _lower_and_verify(*args: object, **options: object) -> Lowered:
    """Compile, and check that what is read has been made: every program that a test compiles."""
    lowered = lower(*args, **options)  # type: ignore[arg-type]
    verify(lowered.program)
    return lowered


api.lower = _lower_and_verify

_TESTS = Path(__file__).parent
_TIERS = ("unit", "sim", "dist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder's tier, and skip what needs a GPU where there is none."""
    no_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs CUDA")
    for item in items:
        tier = item.path.relative_to(_TESTS).parts[0]
        if tier in _TIERS:
            item.add_marker(tier)
        if tier == "dist":
            item.add_marker(pytest.mark.timeout(300))  # several processes share the cores
        if no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
