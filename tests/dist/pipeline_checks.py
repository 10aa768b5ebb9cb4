"""Pipelines on processes: training by every kind of schedule, evaluation, and what goes wrong."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch

import pfx
from models import gpt
from pfx import P
from pfx.errors import RuntimeMismatchError

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
def oracle(microbatches: int, steps: int) -> Any:
    """The same on one device."""
    return trained(step_of(pfx.Plan(microbatches=microbatches), "simulated"), steps)


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
        pfx.tree.leaves(oracle(plan.microbatches, steps)),
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


def evaluation() -> None:
    """Forward only; the carry is of two dtypes, and what a microbatch makes is stacked or added."""

    def layer(carry: Any, w: torch.Tensor) -> Any:
        h, count = carry
        return (torch.tanh(h @ w), count + (h > 0).sum(-1)), None

    def evaluate(x: torch.Tensor, ws: torch.Tensor) -> Any:
        def one(total: torch.Tensor, x: torch.Tensor) -> Any:
            h, count = pfx.scan(layer, (x, torch.zeros_like(x[:, 0], dtype=torch.int64)), ws)[0]
            return total + h.sum(), count

        return pfx.scan(one, x.new_zeros(()), x)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 7, generator=generator)
    ws = torch.randn(4, 7, 7, generator=generator)
    mesh = pfx.make_mesh(pp=4)
    run = pfx.jit(evaluate, mesh=mesh, in_specs=(P(), P("pp")), deterministic=True)
    assert "pipeline over pp" in run.lower(x, ws).text()
    (total, counts), (want, want_counts) = pfx.device_get(run(x, ws)), evaluate(x, ws)
    torch.testing.assert_close(total, want)
    assert torch.equal(counts, want_counts)


def other_schedule() -> None:
    """One rank has another schedule for the same program: an error before anything could hang."""
    plan = pfx.Plan(pp=4, microbatches=4, schedule="gpipe" if RANK == 2 else "1f1b")
    train = step_of(plan, "process")
    text = caught(lambda: train.step(train.init(pfx.random.key(0)), batches(1)[0]))
    assert "rank 2 differs from rank 0." in text, text


def a_stage_dies() -> None:
    """A rank ends in the middle of a step: its neighbour is told of it, and all of them end."""
    plan = pfx.Plan(pp=4, microbatches=4)
    train = step_of(plan, "process")
    state, _ = train.step(train.init(pfx.random.key(0)), batches(1)[0])
    if RANK == 3:
        return  # the last check: this process ends, and its connections with it
    began = time.monotonic()
    text = caught(lambda: train.step(state, batches(1)[0]))
    assert time.monotonic() - began < 60, text
    if RANK == 2:
        assert "process mesh: a message from " in text and "did not complete." in text, text
        assert "ranks 0, 1, 2, 3 take part; this is rank 2." in text, text


def caught(call: Any) -> str:
    try:
        call()
    except RuntimeMismatchError as error:
        return str(error)
    raise AssertionError("no error")
