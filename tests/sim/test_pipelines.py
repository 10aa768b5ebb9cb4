"""A step under any pipeline equals the step on one device, and every schedule gives the same bits.

`PFX_EXAMPLES=100 pytest tests/sim/test_pipelines.py` draws more.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import pfx
from tests.common import IGNORED, Case, assert_same_run, run, tolerance
from tests.sim import toy
from tests.sim.pipelines import pipelined

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "7"))
F32, F64 = torch.float32, torch.float64


def assert_equality_law(case: Case, steps: int = 3, **options: Any) -> None:
    """Compare a run under the case's plan with the run on one device."""
    train = case.train(**options)
    alone = train.on_one_device()
    assert_same_run(run(train, case, steps), run(alone, case, steps), tolerance(case.dtype))


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(pipelined("toy", dtypes=(F64, F32)))
@hypothesis.settings(max_examples=EXAMPLES)
def test_any_pipeline(case: Case) -> None:
    assert_equality_law(case)


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(pipelined("gpt", "llama", dtypes=(F64,)))
@hypothesis.settings(max_examples=max(EXAMPLES // 6, 1))
def test_any_pipeline_of_a_model(case: Case) -> None:
    assert_equality_law(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", {"num_layers": 3}, {"pp": 2, "microbatches": 3, "dp": 2}, "adamw"),
        Case("llama", {"num_layers": 5, "tied": True, "qk_norm": True},
             {"pp": 2, "microbatches": 2, "schedule": "zb-v", "tp": 2}, "adamw"),
    ],
    ids=["at two devices", "at one device"],
)  # fmt: skip
def test_tied_embeddings_stay_equal(case: Case) -> None:
    assert_equality_law(case, steps=10)


# Labels that do not count ---------------------------------------------------------------------------

PLANS = [
    {"pp": 2, "microbatches": 4},
    {"pp": 4, "microbatches": 4, "schedule": "zb-h1"},
    {"pp": 2, "microbatches": 4, "schedule": "interleaved", "virtual": 2, "dp": 2},
]


def masked_case(plan: Any, counted: list[int]) -> tuple[Case, dict[str, torch.Tensor]]:
    """A case, and a batch in which row i has `counted[i]` labels."""
    case = Case("toy", {"num_layers": 4}, plan, rows=8 // (4 * plan.get("dp", 1)))
    batch = case.batch(0)
    for row, n in enumerate(counted):
        batch["labels"][row, n:] = IGNORED
    return case, batch


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_token_weighs_the_same_in_every_microbatch(plan: Any) -> None:
    """Row i is in microbatch i % 4: they have 8, 1, 0 and 4 labels."""
    case, batch = masked_case(plan, [6, 0, 0, 1, 2, 1, 0, 3])
    train = case.train()
    state = train.init(pfx.random.key(0))
    params = pfx.tree.map(lambda p: p.requires_grad_(), pfx.device_get(state.params))
    state, metrics = train.step(state, batch)
    logits = toy.apply(params, batch["tokens"], case.model)
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)
    assert float(pfx.device_get(metrics["weight"])) == 13.0
    torch.testing.assert_close(pfx.device_get(metrics["loss"]), loss.detach(), rtol=1e-12, atol=0)
    guessed = (logits.flatten(0, 1).argmax(-1) == labels).sum()
    assert torch.equal(pfx.device_get(metrics["guessed"]), guessed)
    leaves = pfx.tree.leaves(params)
    grads = torch.autograd.grad(loss, leaves)
    norm = torch.nn.utils.get_total_norm(grads)
    torch.testing.assert_close(pfx.device_get(metrics["grad_norm"]), norm, rtol=1e-12, atol=0)
    for now, was, grad in zip(
        pfx.tree.leaves(pfx.device_get(state.params)), leaves, grads, strict=True
    ):
        torch.testing.assert_close(now, was.detach() - 0.1 * grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("plan", PLANS[1:], ids=str)
def test_every_label_masked_gives_loss_zero_and_exactly_zero_gradients(plan: Any) -> None:
    case, batch = masked_case(plan, [0] * 8)
    train = case.train()
    state = train.init(pfx.random.key(0))
    before = pfx.tree.leaves(pfx.device_get(state.params))
    state, metrics = train.step(state, batch)
    assert float(metrics["loss"]) == float(metrics["weight"]) == float(metrics["grad_norm"]) == 0.0
    momentum = pfx.tree.leaves(pfx.device_get(state.opt_state))
    assert all(not leaf.any() for leaf in momentum if leaf.ndim)
    after = pfx.tree.leaves(pfx.device_get(state.params))
    assert all(map(torch.equal, after, before))
