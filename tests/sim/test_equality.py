"""The equality law: k steps on any mesh, under any plan, equal k steps of the function on one device.

Compared after every step: the loss and the other metrics, the gradients' norm, every parameter and
every leaf of the optimizer's state. With momentum that state after the first step is the gradient
itself, and with Adam the gradient times 1 - b1, so every gradient is seen as the step made it; and
`test_gradients` takes them on their own. The oracle is `TrainStep.pure_step` run by torch, nothing
compiled, and at the end of the file a training loop written with torch alone.

`PFX_EXAMPLES=200 pytest tests/sim/test_equality.py` draws more.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import pfx
from tests.common import (
    FAMILIES,
    IGNORED,
    Case,
    assert_close,
    assert_same_run,
    cases,
    run,
    run_eagerly,
    tolerance,
)

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "5"))


def assert_equality_law(case: Case, steps: int = 3, **options: Any) -> None:
    """Compare a run under the case's plan with plain torch."""
    train = case.train(**options)
    assert_same_run(run(train, case, steps), run_eagerly(train, case, steps), tolerance(case.dtype))


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(cases())
@hypothesis.settings(max_examples=EXAMPLES)
def test_any_plan(case: Case) -> None:
    assert_equality_law(case)


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(cases(max_devices=6))
@hypothesis.settings(max_examples=max(EXAMPLES // 2, 1))
def test_one_device_compiled_is_an_oracle_too(case: Case) -> None:
    train = case.train()
    alone = train.on_one_device()
    assert alone.mesh.size == 1
    assert_same_run(run(train, case), run(alone, case), tolerance(case.dtype))


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(cases(max_devices=6))
@hypothesis.settings(max_examples=max(EXAMPLES // 2, 1))
def test_all_copies_agree_bit_for_bit(case: Case) -> None:
    """`check=True` computes every device's copy and compares those that the layouts call equal."""
    train = case.train(check=True)
    assert_same_run(run(train, case, 2), run(case.train(), case, 2), 0.0)


@hypothesis.given(cases())
@hypothesis.settings(max_examples=max(EXAMPLES // 2, 1))
def test_gradients(case: Case) -> None:
    """Of the loss alone, compiled with the plan's specs and names, against torch.autograd."""
    train, batch, key = case.train(), case.batch(0), pfx.random.key(7)
    params = case.init(pfx.random.key(0))
    loss = lambda params, batch: case.loss_fn(params, batch, key)[0]
    compiled = pfx.jit(
        torch.func.grad(loss),
        mesh=train.mesh,
        in_specs=(train.placement.computed, train.batch_specs(batch)),
        names=train.plan.logical_names,
    )
    found = pfx.device_get(compiled(params, batch))
    leaves, structure = pfx.tree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(loss(pfx.tree.unflatten(structure, leaves), batch), leaves)
    assert_close(found, pfx.tree.unflatten(structure, list(grads)), tolerance(case.dtype), "grads")


# Examples that nothing should ever drop ------------------------------------------------------------

EXPLICIT = {
    "GPT-2's vocabulary": Case(
        config={"vocab_size": 50257, "embed_dim": 8, "num_layers": 1},
        plan={"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True},
    ),
    "a vocabulary of one token": Case(config={"vocab_size": 1}, plan={"tp": 4}),
    "kv heads do not divide by tp": Case(
        "llama", {"num_heads": 6, "num_kv_heads": 3}, {"dp": 2, "tp": 2}, "adamw"
    ),
    "fewer kv heads than tp": Case(
        "llama", {"num_heads": 8, "num_kv_heads": 2, "qk_norm": True}, {"tp": 4, "zero": 1}
    ),
    "biases of kv heads that do not divide by tp": Case(
        "llama", {"num_heads": 6, "num_kv_heads": 3, "qkv_bias": True},
        {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, "adamw",
    ),
    "nothing divides": Case(
        config={"num_heads": 3, "embed_dim": 15, "mlp_dim": 7, "max_seq_len": 7},
        plan={"dp": 2, "tp": 4, "zero": 3, "sequence_parallel": True},
        seq=7,
    ),
    "three axes": Case(
        "llama",
        plan={"dp": 2, "tp": 2, "zero": 3, "axes": {"x": 2}, "microbatches": 2,
              "names": {"batch": ("dp", "x"), "mlp": ("tp", "x")}},
        optimizer="adamw",
    ),
    "ZeRO over an axis that the parameters use too": Case(
        plan={"dp": 2, "zero": 3, "names": {"embed": "dp"}}, optimizer="adamw"
    ),
    "dropout": Case(
        config={"dropout": 0.4},
        plan={"dp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 3, "zero": 2},
    ),
    "dropout of a sequence of prime length": Case(
        config={"dropout": 0.4}, plan={"dp": 3, "tp": 2}, seq=7, rows=3
    ),
    "most labels masked": Case(plan={"dp": 4, "microbatches": 4}, masked=0.95),
    "one layer": Case("llama", {"num_layers": 1}, {"dp": 2, "tp": 2, "zero": 3}, "adamw"),
}  # fmt: skip


IN_FLOAT32 = ("three axes", "dropout", "nothing divides")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in EXPLICIT), *((n, torch.float32) for n in IN_FLOAT32)],
    ids=str,
)
def test_explicit(name: str, dtype: torch.dtype) -> None:
    case = EXPLICIT[name]
    assert_equality_law(Case(**{**vars(case), "dtype": dtype}))


def test_what_does_not_divide_is_reported() -> None:
    report = EXPLICIT["kv heads do not divide by tp"].train().report
    assert report == [
        """params['blocks']['wk']: "kv_heads" (size 3) does not divide by tp=2: whole""",
        """params['blocks']['wv']: "kv_heads" (size 3) does not divide by tp=2: whole""",
    ]


# Labels that do not count ----------------------------------------------------------------------------


def masked_batch(case: Case, counted: Any) -> dict[str, torch.Tensor]:
    """A batch in which row i has `counted[i]` labels."""
    batch = case.batch(0)
    for row, n in enumerate(counted):
        batch["labels"][row, n:] = IGNORED
    return batch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_label_masked_gives_loss_zero_and_exactly_zero_gradients(
    family: str, microbatches: int
) -> None:
    """Megatron-LM#1764: 0/0 on a rank, or on all of them, must not become NaN."""
    case = Case(family, plan={"dp": 2, "tp": 2, "microbatches": microbatches, "zero": 1}, rows=2)
    train = case.train()
    state = train.init(pfx.random.key(0))
    before = pfx.device_get(state.params)
    state, metrics = train.step(state, masked_batch(case, [0] * 4 * microbatches))
    assert float(metrics["loss"]) == float(metrics["weight"]) == float(metrics["grad_norm"]) == 0.0
    momentum = pfx.device_get(state.opt_state)
    assert all(not leaf.any() for leaf in pfx.tree.leaves(momentum) if leaf.ndim)
    for was, now in zip(
        pfx.tree.leaves(before), pfx.tree.leaves(pfx.device_get(state.params)), strict=True
    ):
        assert torch.equal(was, now)


@pytest.mark.parametrize(
    "plan", [{"dp": 2}, {"microbatches": 2}, {"dp": 2, "microbatches": 2}], ids=str
)
def test_a_token_weighs_the_same_wherever_it_is(plan: dict[str, int]) -> None:
    """transformers#34191: not a mean of the microbatches' or the ranks' means.

    All labels of the last row are masked too: a rank, or a microbatch, without any.
    """
    case = Case(plan=plan, rows=4 // (plan.get("dp", 1) * plan.get("microbatches", 1)))
    batch = masked_batch(case, [1, 6, 3, 0])
    train = case.train()
    state = train.init(pfx.random.key(0))
    params = pfx.device_get(state.params)
    _, metrics = train.step(state, batch)
    logits = FAMILIES[case.family].apply(params, batch["tokens"], case.model)
    expected = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
    )
    assert float(metrics["weight"]) == 10.0
    torch.testing.assert_close(pfx.device_get(metrics["loss"]), expected, rtol=1e-7, atol=0)


# Torch alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_loop_in_torch_alone(family: str, optimizer: str) -> None:
    """Autograd, torch.optim, torch's own cross-entropy and clipping; nothing of pfx but the model."""
    case = Case(
        family,
        plan={"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "microbatches": 2},
        optimizer=optimizer,
        masked=0.3,
    )
    train = case.train()
    params = pfx.device_get(train.init(pfx.random.key(0)).params)
    leaves = [leaf.requires_grad_() for leaf in pfx.tree.leaves(params)]
    if optimizer == "sgd":
        torch_optimizer: Any = torch.optim.SGD(leaves, 1e-1, momentum=0.9)
    else:
        torch_optimizer = torch.optim.AdamW(leaves, 1e-2, eps=1e-6, weight_decay=1e-2)
    for i, (state, metrics) in enumerate(run(train, case)):
        batch = case.batch(i)
        logits = FAMILIES[family].apply(params, batch["tokens"], case.model)
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
        )
        torch_optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([leaf.grad for leaf in leaves])
        if optimizer == "adamw":  # clip_grad_norm_ divides by norm + 1e-6
            for leaf in leaves:
                leaf.grad *= min(1.0, 1.0 / float(norm))
        torch_optimizer.step()
        now = pfx.tree.map(lambda p: p.detach().clone(), params)
        assert_close(metrics["loss"], loss.detach(), 1e-10, f"step {i}: loss")
        assert_close(metrics["grad_norm"], norm, 1e-10, f"step {i}: norm")
        assert_close(state.params, now, 1e-10, f"step {i}: params")
