"""Precision policies under plans: what is computed, what is communicated, what is skipped.

`PFX_EXAMPLES=100 pytest tests/sim/test_precision.py` draws more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import pfx
from pfx import checkpoint
from pfx.precision import loss_scale, master_weights
from tests.common import Case, State, cases, differences, run, run_eagerly
from tests.sim.pipelines import pipelined

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "2"))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Of a dtype with 16 bits: how far a rounded number lies from its own, relative to it.
ROUNDOFF: Mapping[str, float] = MappingProxyType({"bf16": 2.0**-8, "fp16": 2.0**-11})


def with_precision(case: Case, precision: str) -> Case:
    return replace(case, plan={**case.plan, "precision": precision})


def distance(found: State, expected: State) -> float:
    """The largest difference of parameters, moments and losses, relative to each leaf's size."""
    (state, metrics), (state_, metrics_) = found, expected
    inner = lambda opt_state: pfx.tree.leaves(getattr(opt_state, "inner", opt_state))
    pairs = [
        (state.params, state_.params),
        (inner(state.opt_state), inner(state_.opt_state)),
        *(({name: metrics[name]}, {name: metrics_[name]}) for name in ("loss", "grad_norm")),
    ]
    return max(max(differences(got, want).values()) for got, want in pairs)


any_plan = st.one_of(cases(max_devices=6, dtypes=(F32,)), pipelined("gpt", "llama", dtypes=(F32,)))


# The casts and the scale, where rounding is out of the way: computed in float64.


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(
    any_plan,
    st.sampled_from(
        [
            ("params=f32,compute=f64,reduce=f64,master=f64,loss_scale=dynamic", 1e-7),
            ("params=f32,compute=f64,reduce=f32,loss_scale=4096", 1e-5),
            ("params=f64,compute=f64", 1e-9),
        ]
    ),
)
@hypothesis.settings(max_examples=EXAMPLES)
def test_a_policy_means_the_same_under_any_plan(case: Case, policy: tuple[str, float]) -> None:
    train = with_precision(case, policy[0]).train()
    for found, expected in zip(run(train, case, 2), run_eagerly(train, case, 2), strict=True):
        assert distance(found, expected) <= policy[1]


# 16 bits. A device rounds its part of a sum and one device the whole of it, in every layer.

# A scale at which no gradient of these models overflows: 2**16 is too much for a llama of 7 layers,
# whose first steps are then skipped, as they should be.
SIXTEEN_BITS = ["bf16", "bf16-master", "fp16,loss_scale=256", "fp16-master,loss_scale=256"]


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(any_plan, st.sampled_from(SIXTEEN_BITS))
@hypothesis.settings(max_examples=EXAMPLES)
def test_16_bits_under_any_plan_are_within_roundings_of_one_device(
    case: Case, precision: str
) -> None:
    train = with_precision(case, precision).train()
    (found,), (expected,) = run(train, case, 1), run_eagerly(train, case, 1)
    roundings = 8 + 4 * case.model.num_layers  # they pile up from layer to layer
    roundoff = ROUNDOFF["bf16" if "bf16" in precision else "fp16"]
    assert distance(found, expected) <= roundings * roundoff
    kinds = {a.dtype for a in pfx.tree.leaves(found[0].params)}
    assert kinds == {F32 if "-" not in precision else BF16 if "bf16" in precision else F16}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_wrong_sum_is_not_within_roundings(precision: str) -> None:
    """What the bound of the law above would say of a batch whose last row was not summed up."""
    case = Case("gpt", {}, {"precision": precision, "dp": 2}, "sgd", F32, rows=4)
    train = case.train().on_one_device()
    state, batch = pfx.device_get(train.init(pfx.random.key(0))), case.batch(0)
    short = {**batch, "labels": batch["labels"].clone()}
    short["labels"][-1] = -100
    found, expected = train.pure_step(state, short), train.pure_step(state, batch)
    assert distance(found, expected) > 2 * 16 * ROUNDOFF[precision]


@pytest.mark.parametrize(
    ("family", "precision"), [("gpt", "bf16"), ("llama", "fp16,loss_scale=256")]
)
def test_one_device_is_a_loop_over_plain_torch(family: str, precision: str) -> None:
    """Cast the parameters, run the model, widen its gradients, step: no autocast, no transform."""
    case = Case(family, {}, {"precision": precision}, "adamw", F32, rows=4, masked=0.3)
    optimizer = pfx.optim.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    train = replace(case.train(), optimizer=optimizer)
    state, batches = train.init(pfx.random.key(0)), [case.batch(i) for i in range(3)]
    leaves, treedef = pfx.tree.flatten(pfx.device_get(state.params))
    kept = [torch.nn.Parameter(leaf.clone()) for leaf in leaves]
    torch_step = torch.optim.AdamW(kept, lr=1e-2, eps=1e-3, weight_decay=0.1)
    narrow, scale = (BF16, 1.0) if precision == "bf16" else (F16, 256.0)
    for batch in batches:
        state, metrics = train.step(state, batch)
        computed = [leaf.detach().to(narrow).requires_grad_() for leaf in kept]
        loss, weight, _ = case.loss_fn(pfx.tree.unflatten(treedef, computed), batch, None)
        assert loss.dtype == F32
        grads = torch.autograd.grad(loss * scale / 16, computed)  # 16: about the weight
        for leaf, grad in zip(kept, grads, strict=True):
            leaf.grad = grad.float() * 16 / scale / weight
        torch_step.step()
        assert metrics["loss"].dtype == metrics["grad_norm"].dtype == F32
        torch.testing.assert_close(metrics["loss"].item(), (loss / weight).item())
        norm = torch.stack([leaf.grad.norm() for leaf in kept]).norm()
        torch.testing.assert_close(metrics["grad_norm"].item(), norm.item(), rtol=1e-5, atol=0.0)
    for got, want in zip(pfx.tree.leaves(pfx.device_get(state.params)), kept, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)


# A small model: what its steps cost, skip and look like.

LAYERS = 3


def toy_loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """Layers with noise; a row's "poison" is nothing in the forward part, its square in a gradient."""

    def layer(carry: Any, weights: Any) -> tuple[Any, None]:
        x, poison = carry
        at = (poison * weights["here"]).sum(-1, keepdim=True)
        none = weights["bias"] - pfx.lax.stop_gradient(weights["bias"])
        return (torch.tanh(x @ weights["w"]) + at * (at * none), poison), None

    dtype = params["head"].dtype
    noise = 1 + 0.01 * pfx.random.normal(key, batch["x"].shape)
    start = (batch["x"] * noise).to(dtype), batch["poison"].to(dtype)
    here = torch.eye(LAYERS, dtype=dtype)
    (x, _), _ = pfx.scan(layer, start, {**params["blocks"], "here": here})
    losses = ((x @ params["head"]).float() - batch["target"]).square() * batch["counted"]
    return losses.sum(), batch["counted"].sum(), {}


def toy_train(optimizer: Any = None, **plan: Any) -> pfx.TrainStep:
    def init(key: torch.Tensor) -> Any:
        w = pfx.random.normal(key, (LAYERS, 4, 4)) * 0.5
        return {"blocks": {"w": w, "bias": torch.zeros(LAYERS, 4)}, "head": torch.ones(4)}

    axes = {"blocks": {"w": "layers embed mlp", "bias": "layers embed"}, "head": "embed"}
    chosen = optimizer or pfx.optim.chain(pfx.optim.clip_by_global_norm(1.0), pfx.optim.adamw(1e-2))
    return pfx.make_train_step(toy_loss, chosen, pfx.Plan(**plan), init=init, axes=axes)


def toy_batch() -> dict[str, torch.Tensor]:
    """Row r of a microbatch of two goes to device r of "dp": rows 2 and 3 to the second."""
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    return {
        "x": x,
        "poison": torch.zeros(4, LAYERS),
        "target": torch.zeros(4),
        "counted": torch.ones(4),
    }


def bill(train: pfx.TrainStep) -> Counter[tuple[str, str]]:
    """How often each (op, dtype) runs, numbers left out; from stage 2 on each layer scatters its own."""
    found: Counter[tuple[str, str]] = Counter()
    for c in train.lower(toy_batch()).collectives():
        assert train.plan.zero < 2 or c.op != "reduce_scatter" or c.shape[0] != LAYERS, c
        if c.shape:
            found[c.op, c.dtype] += c.count
    return found


@pytest.mark.parametrize(
    ("precision", "zero", "gathered"),
    [
        ("bf16", 3, "bf16"),
        ("fp16-master", 3, "f16"),
        ("bf16", 2, "f32"),
        ("bf16-master", 2, "bf16"),
        ("bf16-master", 1, "bf16"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_gathers_two_bytes_and_reduces_four(
    precision: str, zero: int, gathered: str, microbatches: int
) -> None:
    """Stage 3 gathers what it computes with; stages 1 and 2 gather what the optimizer made."""
    found = bill(toy_train(dp=2, zero=zero, precision=precision, microbatches=microbatches))
    # Of 3 leaves two are stacked; the backward part needs one of those again.
    gathers = {1: 3, 2: 3, 3: (2 * LAYERS + LAYERS + 1) * microbatches}
    scatters = {1: 3, 2: (2 * LAYERS + 1) * microbatches, 3: (2 * LAYERS + 1) * microbatches}
    assert found.pop(("all_gather", gathered)) == gathers[zero]
    assert found == {("reduce_scatter", "f32"): scatters[zero]}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", "f32"), ("bf16-master", "f32"), ("bf16,reduce=bf16", "bf16")],
)
def test_gradients_are_reduced_in_the_dtype_of_the_policy(
    precision: str, microbatches: int, dtype: str
) -> None:
    found = bill(toy_train(dp=2, precision=precision, microbatches=microbatches))
    in_loops = dtype == "bf16" and microbatches == 1  # a sum that must not be widened first
    assert found == {("all_reduce", dtype): 2 * LAYERS + 1 if in_loops else 3}


def test_the_bill_of_a_bf16_model_without_a_policy_reduces_in_float32() -> None:
    case = Case("llama", {"dtype": BF16}, {"dp": 2}, "adamw", F32)
    program = case.train().lower(case.batch(0))
    assert {c.dtype for c in program.collectives()} == {"f32"}


def test_guards_ask_for_no_norm_of_their_own() -> None:
    """Scale, guard, clip and metric read one norm: one reduction."""
    guarded = pfx.optim.skip_spikes(toy_train().optimizer)
    plan = {"dp": 2, "zero": 2}
    few = toy_train(**plan, precision="bf16").lower(toy_batch()).collectives()
    more = toy_train(guarded, **plan, precision="fp16").lower(toy_batch()).collectives()
    assert len(few) == len(more)


GUARDED = {
    "adamw": (lambda: pfx.optim.skip_nonfinite(pfx.optim.adamw(1e-2)), "adamw_if"),
    "sgd": (lambda: pfx.optim.skip_nonfinite(pfx.optim.sgd(1e-2)), "add_scaled_if"),
    "momentum": (
        lambda: pfx.optim.skip_spikes(pfx.optim.sgd(1e-2, momentum=0.9, nesterov=True)),
        "sgd_if",
    ),
    "scaled": (lambda: loss_scale.dynamic(pfx.optim.adam(1e-2)), "adamw_if"),
    "waiting": (lambda: pfx.optim.accumulate(pfx.optim.adamw(1e-2), 2), "adamw_if"),
    "masters": (
        lambda: pfx.optim.skip_nonfinite(
            master_weights(pfx.optim.sgd(1e-2, momentum=0.9), dtype=torch.float64)
        ),
        "where",
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_update_is_one_kernel_that_runs_or_does_not(name: str) -> None:
    make, kernel = GUARDED[name]
    train = toy_train(make(), dp=2)
    text = train.lower(toy_batch()).text()
    assert text.count(f"{kernel}(") >= 3 if kernel != "where" else "_if(" not in text
    state = pfx.device_get(train.init(pfx.random.key(0)))
    spread = pfx.device_put(state, train.mesh, train.state_specs)
    for bad in (False, True, False, False):
        batch = toy_batch()
        batch["target"][3] = torch.nan if bad and name != "waiting" else 1.0
        before, found = pfx.device_get(spread), train.step(spread, batch)[0]
        spread, found = found, pfx.device_get(found)
        state, _ = train.pure_step(state, batch)
        if bad and name != "waiting":
            assert same_bits(found.params, before.params)
            assert same_bits(found.opt_state.inner, before.opt_state.inner)
        assert max(differences(found.params, state.params).values()) < 1e-5
        assert max(differences(found.opt_state.inner, state.opt_state.inner).values()) < 1e-5


def test_floats_of_a_batch_are_as_they_came() -> None:
    seen = []

    def loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        seen.append((params["w"].dtype, batch["x"].dtype, batch["at"].dtype))
        out = (batch["x"].to(params["w"].dtype) @ params["w"]).square().sum()
        return out, torch.tensor(4.0, dtype=BF16), {"out": out}

    train = pfx.make_train_step(
        loss, pfx.optim.sgd(0.1), pfx.Plan(dp=2, microbatches=2, precision="bf16"),
        init=lambda key: {"w": torch.ones(3)}, axes={"w": "embed"},
    )  # fmt: skip
    batch = {"x": torch.ones(4, 3), "at": torch.zeros(4, dtype=torch.int64)}
    _, metrics = train.step(train.init(pfx.random.key(0)), batch)
    assert set(seen) == {(BF16, F32, torch.int64)}
    assert metrics["loss"].dtype == metrics["weight"].dtype == metrics["out"].dtype == F32
    assert metrics["out"].item() == 36.0 and metrics["weight"].item() == 8.0


# Skipping, the same everywhere.


def same_bits(left: Any, right: Any) -> bool:
    pairs = zip(pfx.tree.leaves(left), pfx.tree.leaves(right), strict=True)
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


@pytest.mark.parametrize("plan", [{"dp": 2, "pp": 2}, {"dp": 2, "zero": 3}])
def test_all_devices_skip_what_one_of_them_sees(plan: dict[str, int]) -> None:
    # B50: ColossalAI#1175, WeatherGenerator#2724, mmf#1073; B52: accelerate#4242, pytorch#55585
    optimizer = loss_scale.dynamic(
        pfx.optim.skip_spikes(pfx.optim.adam(lambda k: (k + 1) / 100), warmup=1), hysteresis=1
    )
    train = replace(toy_train(optimizer, **plan, microbatches=2), check=True)
    state, metrics = train.step(train.init(pfx.random.key(1)), toy_batch())
    assert metrics["skipped"].item() == 0 and metrics["finite"].item()
    batches = [toy_batch() for _ in range(3)]
    batches[0]["poison"][2, 0] = 1e30  # the gradient of layer 0 on the second data-parallel device
    batches[1]["target"][3] = 200.0  # a finite loss, a hundred times as high, there alone
    batches[2]["target"][0] = torch.nan  # on the first
    for i, batch in enumerate(batches):
        before = pfx.device_get(state)
        state, metrics = train.step(state, batch)
        after, seen = pfx.device_get(state), pfx.device_get(metrics)
        assert same_bits(after.params, before.params), f"step {i}"
        assert same_bits(after.opt_state.inner.inner, before.opt_state.inner.inner)
        assert seen["skipped"] == i + 1 and bool(seen["finite"]) == (i == 1)
        assert seen["lr"].item() == pytest.approx(0.01) and after.step == i + 2
        assert after.opt_state.scale == 2.0 ** (16 - (1, 1, 2)[i])
        assert torch.isfinite(seen["loss"]) == (i < 2) and torch.isfinite(seen["grad_norm"]) == (
            i == 1
        )
    _, metrics = train.step(state, toy_batch())
    assert metrics["skipped"].item() == 3 and metrics["lr"].item() == pytest.approx(0.02)


def test_a_step_without_weight_moves_nothing_and_is_not_skipped() -> None:
    train = toy_train(dp=2, precision="fp16")
    state = train.init(pfx.random.key(0))
    before = pfx.device_get(state.params)
    state, metrics = train.step(state, {**toy_batch(), "counted": torch.zeros(4)})
    assert metrics["weight"].item() == 0 == metrics["grad_norm"].item() == metrics["loss"].item()
    assert metrics["skipped"].item() == 0 and metrics["finite"].item()
    after = pfx.tree.leaves(pfx.device_get(state.params))
    for a, b in zip(after, pfx.tree.leaves(before), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=0.0)  # weight decay alone


def test_an_overflow_of_fp16_lowers_the_scale_until_the_run_goes_on() -> None:
    """A real one: gradients of activations beyond 65504, not numbers put in by hand."""
    optimizer = loss_scale.dynamic(pfx.optim.sgd(1e-6), initial=2.0**24, hysteresis=1)
    train = toy_train(optimizer, dp=2, precision="fp16")
    state = train.init(pfx.random.key(0))
    scales, skipped = [], []
    for _ in range(14):
        state, metrics = train.step(state, toy_batch())
        scales.append(metrics["loss_scale"].item())
        skipped.append(metrics["skipped"].item())
    last = skipped[-1]
    assert 0 < last < 14 and skipped == [min(i + 1, last) for i in range(14)]
    assert scales == [2.0 ** (24 - min(i, last)) for i in range(14)]


# Running a step again, and looking at it.

PLANS = [
    {"dp": 2, "tp": 2, "zero": 3, "precision": "bf16"},
    {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "precision": "bf16-master"},
    {"dp": 4, "precision": "fp16"},
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_runs_again_with_the_same_bits(plan: dict[str, Any], deterministic: bool) -> None:
    train = replace(toy_train(**plan), deterministic=deterministic)
    batches = [toy_batch(), {**toy_batch(), "target": torch.ones(4)}]
    state, _ = train.step(train.init(pfx.random.key(0)), batches[0])
    first = pfx.device_get(train.rerun(state, batches[1]))
    again = pfx.device_get(train.rerun(state, batches[1]))
    last = pfx.device_get(train.step(state, batches[1]))  # and this one uses the state up
    assert same_bits(_numbers(first), _numbers(again)) and same_bits(
        _numbers(first), _numbers(last)
    )


def _numbers(value: Any) -> list[torch.Tensor]:
    """bf16 as float32, which numpy knows."""
    return [x.float() if x.dtype == BF16 else x for x in pfx.tree.leaves(value)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_diagnosis_is_that_of_one_device(plan: dict[str, Any]) -> None:
    train = toy_train(**plan)
    state, batch = train.init(pfx.random.key(0)), toy_batch()
    found = pfx.device_get(train.diagnose(state, batch))
    whole = pfx.device_get(state)
    expected = train.on_one_device().pure_diagnosis(whole, batch)
    narrow = 16 * ROUNDOFF["fp16" if "fp" in plan["precision"] else "bf16"]
    for path, leaf in found["params"].items():
        for name, value in leaf.items():
            torch.testing.assert_close(value, expected["params"][path][name], rtol=1e-5, atol=1e-6)
    largest = max(float(leaf["norm"]) for leaf in expected["gradients"].values())
    for path, leaf in found["gradients"].items():
        for name in ("norm", "layers", "largest"):
            if name in leaf:
                want = expected["gradients"][path][name]
                assert float((leaf[name] - want).abs().max()) <= narrow * largest, (path, name)
    grads, _ = train.on_one_device()._mean_gradients(whole, batch)
    scale = 1 if "fp" not in plan["precision"] else 2.0**16
    up = pfx.device_get(found["gradients"]["['blocks']['w']"])
    want = grads["blocks"]["w"] / scale
    torch.testing.assert_close(up["layers"], want.norm(dim=(1, 2)), rtol=narrow, atol=1e-6)
    torch.testing.assert_close(up["std"], want.std(correction=0), rtol=narrow, atol=1e-6)
    assert set(found) == {"loss", "weight", "grad_norm", "gradients", "params"}
    total = torch.stack([leaf["norm"] for leaf in found["gradients"].values()]).norm()
    torch.testing.assert_close(found["grad_norm"], total, rtol=1e-4, atol=0.0)
    train.step(state, batch)  # the state was kept


@pytest.mark.parametrize("precision", ["bf16-master", "fp16-master"])
def test_masters_and_scale_are_in_a_checkpoint(precision: str, tmp_path: Path) -> None:
    # B43: OpenTau#185, DeepSpeed#7786, #4141, Megatron-LM#1359
    train = replace(toy_train(dp=2, zero=1, precision=precision), donate=False)
    state, _ = train.step(train.init(pfx.random.key(0)), toy_batch())
    checkpoint.save(tmp_path, 1, state)
    back = checkpoint.restore(tmp_path, like=train.shapes, mesh=train.mesh, specs=train.state_specs)
    inner = back.opt_state if precision == "bf16-master" else back.opt_state.inner
    assert {leaf.dtype for leaf in pfx.tree.leaves(inner.masters)} == {F32}
    expected, found = (pfx.device_get(train.step(s, toy_batch())) for s in (state, back))
    assert same_bits(_numbers(expected), _numbers(found))


def test_parameters_loaded_alone_are_what_the_next_step_starts_from() -> None:
    # B43: DeepSpeed#7786, OpenTau#185
    train = toy_train(dp=2, zero=1, precision="bf16-master")
    state, _ = train.step(train.init(pfx.random.key(0)), toy_batch())
    loaded = pfx.device_get(train.init(pfx.random.key(9)).params)
    moments = pfx.device_get(state.opt_state.inner)
    fresh = train.with_params(state, pfx.tree.map(lambda p: p.float() + 1e-4, loaded))
    assert same_bits(pfx.device_get(fresh.opt_state.inner), moments) and fresh.step.item() == 1
    _assert_rounded(fresh, expected=loaded)
    _assert_rounded(train.step(fresh, toy_batch())[0])


def _assert_rounded(state: pfx.TrainState, expected: Any = None) -> None:
    """Parameters are their masters rounded; and those that are expected."""
    params, masters = pfx.device_get((state.params, state.opt_state.masters))
    for p, m in zip(pfx.tree.leaves(params), pfx.tree.leaves(masters), strict=True):
        assert p.dtype == BF16 and m.dtype == F32 and torch.equal(p, m.to(BF16))
    for p, want in zip(pfx.tree.leaves(params), pfx.tree.leaves(expected), strict=False):
        torch.testing.assert_close(p, want, rtol=0.01, atol=2e-4)
