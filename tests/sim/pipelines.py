"""Pipelined training runs: drawn at random, and what two runs have in common bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

import pfx
from pfx.compiler.ir import PipelineInstr, Stage
from pfx.compiler.program import Program
from pfx.schedules.build import FAMILIES as SCHEDULES
from tests.common import Case, State

# Of every schedule that trains, the stages per device it may have.
VIRTUAL: Mapping[str, Sequence[int]] = {
    name: (1, 2, 3) if family.virtual is None else (family.virtual,)
    for name, family in SCHEDULES.items()
    if name != "forward"
}


@st.composite
def pipelined(draw: st.DrawFn, *families: str, dtypes: Sequence[torch.dtype]) -> Case:
    """Training runs under a pipeline: any schedule and size, beside any of the other axes."""
    size = lambda *sizes: draw(st.sampled_from(sizes))
    schedule = size(*VIRTUAL)
    plan: dict[str, Any] = {
        "pp": size(2, 3, 4, 1),
        "schedule": schedule,
        "virtual": size(*VIRTUAL[schedule]),
        "microbatches": draw(st.integers(1, 8)),
        "dp": size(1, 2),
        "tp": size(1, 2),
        "sequence_parallel": draw(st.booleans()),
        "zero": draw(st.integers(0, 3)),
    }
    stages = plan["pp"] * plan["virtual"]
    layers = draw(st.integers(1, 9))
    if draw(st.booleans()):
        some = st.lists(st.integers(0, 2), min_size=stages, max_size=stages).filter(any)
        plan["stage_layers"] = tuple(draw(some))
        layers = sum(plan["stage_layers"])
    config: dict[str, Any] = {"num_layers": layers, "remat": size(None, "full")}
    family = size(*families)
    if family == "llama":
        config["tied"] = draw(st.booleans())
    else:
        config["dropout"] = size(0.0, 0.3)
    optimizer, masked = size("sgd", "adamw"), size(0.3, 0.0, 0.9)
    return Case(family, config, plan, optimizer, size(*dtypes), size(1, 2), 6, masked)


def assert_same_bits(found: Sequence[State], expected: Sequence[State], *but: str) -> None:
    """Assert that two runs agree bit for bit, in metrics, parameters and optimizer state.

    Args:
        but: the metrics and parameters that may differ by rounding.
    """
    for (state, metrics), (state_, metrics_) in zip(found, expected, strict=True):
        pairs, _ = pfx.tree.flatten_with_path((state, metrics))
        for (path, got), want in zip(pairs, pfx.tree.leaves((state_, metrics_)), strict=True):
            where = pfx.tree.path_string(path)
            if any(name in where for name in but):
                torch.testing.assert_close(got, want)
            else:
                assert torch.equal(got, want), where


def pipeline_of(program: Program) -> PipelineInstr:
    """The one pipeline of a program."""
    (found,) = (i for i in program.instrs if isinstance(i, PipelineInstr))
    return found


def stages_of(program: Program) -> tuple[Stage, ...]:
    """The stages of the one pipeline of a program."""
    return pipeline_of(program).stages
