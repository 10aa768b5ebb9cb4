"""What a pipelined program holds: the traffic along its axis, each stage's own work, what is kept.

Counted, not timed; every expectation about the axis is the whole bill of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import pfx
from pfx import P
from pfx.compiler.ir import Block, Compute, LoopInstr, PipelineInstr, Stage
from pfx.compiler.program import Program, target_name, verify
from pfx.runtime.pipeline import StageRunner
from pfx.schedules import peak_activations
from pfx.spec import layout_of, local_bytes
from tests.common import FAMILIES, Case, run
from tests.sim.pipelines import VIRTUAL, stages_of

SEQ = 6
PLANS: Mapping[str, Any] = {
    "1f1b": {"pp": 3, "microbatches": 4},
    "zb-h1, dp": {"pp": 3, "microbatches": 4, "schedule": "zb-h1", "dp": 2, "zero": 1},
    "interleaved": {"pp": 2, "microbatches": 3, "schedule": "interleaved", "virtual": 3},
    "zb-v": {"pp": 2, "microbatches": 2, "schedule": "zb-v"},
    "dualpipe-v, uneven": {"pp": 2, "microbatches": 5, "schedule": "dualpipe-v",
                           "stage_layers": (3, 0, 2, 1)},
    "gpipe, sequence parallel": {"pp": 2, "microbatches": 2, "schedule": "gpipe", "tp": 2,
                                 "sequence_parallel": True, "dp": 2, "zero": 3},
}  # fmt: skip


def case_of(plan: Any, family: str = "toy", **config: Any) -> Case:
    return Case(family, {"num_layers": 6, **config}, plan, "adamw", seq=SEQ)


def program_of(case: Case) -> Program:
    return case.train().lower(case.batch(0))


# Along the pipeline's axis ------------------------------------------------------------------------


def bill(program: Program) -> Counter[tuple[str, tuple[int, ...], int]]:
    """How often each (op, local shape, bytes) runs along an axis set with "pp" in it."""
    found: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    for c in program.collectives():
        if "pp" in c.axes:
            found[c.op, tuple(c.shape) if c.op == "send" else (), c.bytes * bool(c.shape)] += (
                c.count
            )
    return found


def parameters(case: Case) -> Iterator[tuple[int, bool]]:
    """The local bytes of every parameter that is no stack of layers, and whether stages split it."""
    train = case.train()
    leaves = pfx.tree.leaves(train.shapes.params)
    used, kept = (
        pfx.tree.leaves(specs, lambda node: isinstance(node, P))
        for specs in (train.placement.computed, train.state_specs.params)
    )
    for leaf, spec, between in zip(leaves, used, kept, strict=True):
        if "pp" not in spec.axes:
            split = "pp" in between.axes
            layout = layout_of(between if split else spec, leaf.shape, train.mesh, "parameter")
            part = local_bytes(leaf.shape, leaf.dtype, layout, train.mesh)  # with padding
            yield part * (train.plan.pp if split else 1), split


def expected_bill(case: Case, scalars: int) -> Counter[tuple[str, tuple[int, ...], int]]:
    """Activations and gradients over every boundary; each shared parameter once there and back."""
    plan = pfx.Plan(**case.plan)
    place = plan.pipeline.place
    crossed = sum(a != b for a, b in zip(place, place[1:], strict=False))
    seq = SEQ // plan.tp if plan.sequence_parallel else SEQ
    shape = (case.rows, seq, case.model.embed_dim)
    found = Counter({("send", shape, math.prod(shape) * 8): 2 * crossed * plan.microbatches})
    for size, split in parameters(case):
        for op in ("all_gather", "reduce_scatter") if split else ("all_reduce",):
            found[op, (), size] += 1
    found["all_reduce", (), 0] = scalars
    return found


@pytest.mark.parametrize("name", [name for name in PLANS if "zero" not in PLANS[name]])
def test_sends_one_reduction_a_parameter_and_scalars_are_all(name: str) -> None:
    """The scalars: the loss, its weight, the metric, and the stages' share of the norm.

    Where stages share what they cannot split, its squares are not added to those of the layers.
    """
    case = case_of(PLANS[name])
    whole = any(not split for _, split in parameters(case))
    assert bill(program_of(case)) == expected_bill(case, scalars=4 + whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_sends_of_a_model(family: str) -> None:
    case = case_of({"pp": 2, "microbatches": 4, "schedule": "zb-h1"}, family)
    assert bill(program_of(case)) == expected_bill(case, scalars=3)


@pytest.mark.parametrize("name", [name for name in PLANS if "zero" in PLANS[name]])
def test_only_what_stages_share_is_gathered_along_the_pipeline(name: str) -> None:
    """Beside ZeRO a gradient's sum over stages may be a scatter over the data axis as well."""
    case = case_of(PLANS[name])
    plan, program = pfx.Plan(**case.plan), program_of(case)
    along = [c for c in program.collectives() if "pp" in c.axes]
    count = lambda *ops: sum(c.count for c in along if c.op in ops and c.shape)
    assert {c.op for c in along} <= {"send", "all_reduce", "reduce_scatter", "all_gather"}
    assert count("send") == 2 * (plan.pp - 1) * plan.microbatches
    shared = list(parameters(case))
    assert count("all_reduce", "reduce_scatter") == len(shared)
    assert count("all_gather") == sum(split for _, split in shared)


# What a stage does --------------------------------------------------------------------------------


def ops(block: Block) -> Counter[str]:
    """The calls of a block, those in loops included, once each."""
    found: Counter[str] = Counter()
    for instr in block.instrs:
        if isinstance(instr, Compute):
            found[target_name(instr.target)] += 1
        elif isinstance(instr, LoopInstr):
            found += ops(instr.body)
    return found


EMBEDDING = {"aten.embedding", "aten.embedding_dense_backward"}
HEAD = {"aten.amax", "aten.gather", "aten.bitwise_and.Tensor"}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_does_what_its_outputs_need(schedule: str) -> None:
    plan = {"pp": 3, "microbatches": 2, "schedule": schedule}
    first, middle, last = stages_of(program_of(case_of(plan)))

    def all_ops(stage: Stage) -> set[str]:
        return {name for phase in stage.phases.values() for name in ops(phase.block)}

    assert all_ops(first) >= EMBEDDING and not HEAD & all_ops(first)
    assert not EMBEDDING & all_ops(middle) and not HEAD & all_ops(middle)
    assert not EMBEDDING & all_ops(last) and all_ops(last) >= HEAD
    assert len(middle.phases["F"].sends) == 1 and not last.phases["F"].sends
    names = {"1f1b": ["F", "B"], "zb-h1": ["F", "I", "W"]}[schedule]
    for stage in first, middle, last:
        assert sorted(stage.phases) == sorted(names)
    back = middle.phases[names[1]]
    assert len(back.sends) == 1 and not first.phases[names[1]].sends
    if schedule == "zb-h1":
        # The input's gradient and the weights': a product each for every matrix.
        assert ops(back.block)["aten.mm"] == 2
        late = ops(middle.phases["W"].block)
        assert sum(n for name, n in late.items() if "mm" in name or "product" in name) == 2


def test_a_batch_leaf_goes_only_where_it_is_read() -> None:
    first, middle, last = stages_of(program_of(case_of({"pp": 3, "microbatches": 2})))
    integers = [
        sum(v.dtype == torch.int64 for v in stage.phases["F"].block.inputs)
        for stage in (first, middle, last)
    ]
    assert integers == [1, 0, 1]  # the tokens, nothing, the labels


# How large a program is ---------------------------------------------------------------------------


def size(block: Block) -> int:
    """The instructions of a program, bodies included; stages are cut from the body."""
    bodies = (i.body for i in block.instrs if isinstance(i, (LoopInstr, PipelineInstr)))
    return len(block.instrs) + sum(map(size, bodies))


def own_phases(program: Program) -> int:
    return len({id(stage.phases) for stage in stages_of(program)})


def test_size_does_not_grow_with_layers_microbatches_or_stages() -> None:
    plans = [
        (4, {"pp": 2, "microbatches": 2}),
        (64, {"pp": 2, "microbatches": 32}),
        (64, {"pp": 8, "microbatches": 16}),
    ]
    programs = [program_of(case_of(plan, num_layers=n, embed_dim=8)) for n, plan in plans]
    assert len({size(program) for program in programs}) == 1
    assert [own_phases(program) for program in programs] == [2, 2, 3]


@pytest.mark.parametrize("name", PLANS)
def test_programs_verify_and_show_their_stages(name: str) -> None:
    case = case_of(PLANS[name], dropout=0.1)
    program, plan = program_of(case), pfx.Plan(**PLANS[name])
    verify(program)
    assert not program.report
    text, schedule = program.text(), plan.pipeline
    assert f"pipeline over pp, schedule {schedule.name}, {plan.microbatches} microbatches" in text
    for number, stage in enumerate(stages_of(program)):
        at = f"stage {number} on pp={schedule.place[number]}, layers {stage.start}:{stage.stop}"
        assert at in text


def test_an_embedding_split_over_its_rows_is_no_stack_of_layers() -> None:
    case = Case("gpt", {"num_layers": 1}, {"tp": 2, "microbatches": 2}, "adamw")
    assert program_of(case).report == []


# What is kept ---------------------------------------------------------------------------------------


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[StageRunner]:
    """Every stage runner, as they are made."""
    found: list[StageRunner] = []
    begin = StageRunner.__init__
    monkeypatch.setattr(
        StageRunner, "__init__", lambda self, *args: (found.append(self), begin(self, *args))[1]
    )
    return found


def kept(runner: StageRunner) -> int:
    """For how many microbatches a stage holds what its backward pass needs."""
    needed = set(runner.kept["F"]) | set(runner.kept.get("I", ()))
    came = {v.number for values in runner.stage.receives.values() for v in values}
    return sum(not (needed - came).isdisjoint(values) for values in runner.held.values())


@pytest.mark.parametrize("schedule", VIRTUAL)
def test_residuals_live_as_long_as_the_schedule_says(
    schedule: str, runners: list[StageRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"pp": 2, "microbatches": 6, "schedule": schedule, "virtual": VIRTUAL[schedule][-1]}
    peaks = [0, 0]
    call = StageRunner.__call__

    def watched(self: StageRunner, *args: Any) -> Any:
        made = call(self, *args)
        for device in range(2):
            now = sum(kept(one) for one in runners if one.stage.device == device)
            peaks[device] = max(peaks[device], now)
        return made

    monkeypatch.setattr(StageRunner, "__call__", watched)
    case = case_of(plan, num_layers=12)
    run(case.train(seed=1), case, 1)
    assert tuple(peaks) == peak_activations(pfx.Plan(**plan).pipeline)
    assert runners and not any(runner.held for runner in runners)
