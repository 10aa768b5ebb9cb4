"""Pipelines on processes: training by every kind of schedule, evaluation, and what goes wrong."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from typing import Any

import torch

import pfx
from models import gpt
from pfx import P
from pfx.errors import RuntimeMismatchError
from pfx.schedules import build

RANK = int(os.environ["RANK"])
CONFIG = gpt.Config(
    num_layers=4, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, max_seq_len=8
)


@functools.cache
def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of 24 rows."""
    tokens = torch.randint(50, (count, 24, 9), generator=torch.Generator().manual_seed(4))
    return [{"tokens": t[:, :-1].clone(), "labels": t[:, 1:].clone()} for t in tokens]


def trained(train: pfx.TrainStep, steps: int) -> Any:
    """The parameters after some steps, and the metrics of each."""
    state, told = train.init(pfx.random.key(0)), []
    for batch in batches(steps):
        state, metrics = train.step(state, batch)
        told.append(pfx.device_get(metrics))
    return pfx.device_get(state.params), told


@functools.cache
def oracle(steps: int) -> Any:
    """The same on one device; how the batch is cut does not matter."""
    return trained(step_of(pfx.Plan(microbatches=2), "simulated"), steps)


def step_of(plan: pfx.Plan, kind: str) -> pfx.TrainStep:
    """The training step of a plan."""
    return pfx.make_train_step(
        gpt.loss_fn(CONFIG), pfx.optim.adamw(1e-2), plan, mesh=plan.mesh(kind=kind),
        init=lambda key: gpt.init(CONFIG, key), axes=gpt.axes(CONFIG), deterministic=True,
    )  # fmt: skip


def assert_trains(plan: pfx.Plan, steps: int = 2) -> None:
    """As on one device to rounding, and as on a simulated mesh bit for bit."""
    got = trained(step_of(plan, "process"), steps)
    if RANK:
        return  # every rank has the same whole values; one compares them
    want = trained(step_of(plan, "simulated"), steps)
    for (path, a), b, c in zip(
        pfx.tree.flatten_with_path(got)[0],
        pfx.tree.leaves(want),
        pfx.tree.leaves(oracle(steps)),
        strict=True,
    ):
        where = f"{plan}: {pfx.tree.path_string(path)}"
        assert torch.equal(a, b), f"{where} differs from the simulated mesh by {a - b}"
        torch.testing.assert_close(a, c, rtol=2e-4, atol=2e-4, msg=lambda m, w=where: f"{w}: {m}")


def one_f_one_b() -> None:
    """Data parallel and ZeRO-1 in each stage."""
    assert_trains(pfx.Plan(pp=2, dp=2, microbatches=4, zero=1))


def few_microbatches() -> None:
    """Fewer than stages: of the zero-bubble family, whose backward passes come in halves."""
    assert_trains(pfx.Plan(pp=4, microbatches=3, schedule="zb-h1"))


def all_forward_first() -> None:
    """Tensor and sequence parallel in each stage."""
    assert_trains(pfx.Plan(pp=2, tp=2, sequence_parallel=True, microbatches=4, schedule="gpipe"))


def several_stages_a_device() -> None:
    """Messages go around, and of one device to another there are two kinds both ways."""
    assert_trains(pfx.Plan(pp=2, dp=2, microbatches=3, schedule="interleaved", virtual=2))


def a_v_with_empty_stages() -> None:
    """The turn of the V is on one device; half of the stages have no layer."""
    assert_trains(pfx.Plan(pp=4, microbatches=2, schedule="zb-v"))


def evaluate(x: torch.Tensor, ws: torch.Tensor) -> Any:
    """Layers on microbatches: the carry is of two dtypes; results are added up, and stacked."""

    def layer(carry: Any, w: torch.Tensor) -> Any:
        h, count = carry
        return (torch.tanh(h @ w), count + (h > 0).sum(-1)), None

    def one(total: torch.Tensor, x: torch.Tensor) -> Any:
        h, count = pfx.scan(layer, (x, torch.zeros_like(x[:, 0], dtype=torch.int64)), ws)[0]
        return total + h.sum(), count

    return pfx.scan(one, x.new_zeros(()), x)


@functools.cache
def operands() -> list[torch.Tensor]:
    """Five microbatches, and four layers."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3, 7), (4, 7, 7))]


def evaluator(schedule: pfx.schedules.Schedule | None = None) -> Any:
    """A pipeline that has only a forward pass."""
    specs = (P(), P("pp"))
    return pfx.jit(evaluate, mesh=pfx.make_mesh(pp=4), in_specs=specs, schedule=schedule)


def evaluation() -> None:
    """Forward only; what travels is of two dtypes."""
    run = evaluator()
    assert "pipeline over pp" in run.lower(*operands()).text()
    (total, counts), (want, want_counts) = pfx.device_get(run(*operands())), evaluate(*operands())
    torch.testing.assert_close(total, want)
    assert torch.equal(counts, want_counts)


def a_measured_run() -> None:
    """Every rank gets the same times of all devices; the step is what it was."""
    plan = pfx.Plan(pp=2, dp=2, microbatches=4)
    train, batch = step_of(plan, "process"), batches(1)[0]
    key = pfx.random.key(0)
    want, _ = train.step(train.init(key), batch)
    (got, _), run = train.timed(train.init(key), batch)
    for a, b in zip(
        *(pfx.tree.leaves(pfx.device_get(state.params)) for state in (got, want)), strict=True
    ):
        assert torch.equal(a, b)
    everyone: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everyone, run)
    assert everyone == [run] * 4
    assert (run.schedule, run.unit) == (plan.pipeline, "s")
    assert min(row[0] for row in run.start) == 0
    for starts, ends in zip(run.start, run.end, strict=True):
        times = [t for span in zip(starts, ends, strict=True) for t in span]
        assert times == sorted(times), "actions of one device overlap"
    ends = {str(row.action): row.end for row in run.rows()}
    for row in run.rows():  # to what a barrier can set clocks by, on a busy machine
        stage, kind, microbatch = row.action.stage, row.action.kind, row.action.microbatch
        need = f"{stage - 1 if kind == 'F' else stage + 1}{kind}{microbatch}"
        assert row.start > ends.get(need, 0.0) - 0.5, row
    assert all(end - start > 0 for _, _, start, end in run.rows())


def other_order() -> None:
    """One rank takes the microbatches in another order: an error before anything could hang."""
    schedule = build("forward", stages=4, microbatches=5)
    if RANK == 2:
        schedule = replace(schedule, devices=tuple(row[::-1] for row in schedule.devices))
    text = caught(lambda: evaluator(schedule)(*operands()))
    assert "rank 2 differs from rank 0." in text, text
    assert "device 0: 0F0 0F1" in text, text
    assert "device 0: 0F4 0F3" in text, text


def a_stage_dies() -> None:
    """A rank ends between two steps: its neighbours are told, and no other hangs."""
    run = evaluator()
    run(*operands())
    if RANK == 1:
        return  # the last check: this process ends, and its connections with it
    began = time.monotonic()
    text = caught(lambda: run(*operands()))
    assert time.monotonic() - began < 60, text
    where, members, *_, fix = text.splitlines()
    ends = {0: "from 0 to 1", 2: "from 1 to 2", 3: "from 2 to 3"}[RANK]
    assert where == f"process mesh: a message {ends} of pp of pp=4 did not complete.", text
    assert members == f"  ranks 0, 1, 2, 3 take part; this is rank {RANK}.", text
    assert fix == "  fix: read what the other ranks printed: one of them failed first, or is late"


def caught(call: Any) -> str:
    try:
        call()
    except RuntimeMismatchError as error:
        return str(error)
    raise AssertionError("no error")
