"""Policies, masters and loss scales, without a mesh."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import pfx
from pfx import optim, tree
from pfx.errors import TreeError
from pfx.precision import (
    Policy,
    as_policy,
    loss_scale,
    master_weights,
    refresh_masters,
)
from pfx.precision.policy import DTYPES, NAMED

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPE = st.sampled_from([None, *DTYPES])


# Policies.


@given(DTYPE, DTYPE, DTYPE, st.sampled_from([None, "f64"]), st.sampled_from([None, "dynamic", 8]))
def test_a_policy_is_its_text(
    params: Any, compute: Any, reduce: Any, master: Any, scale: Any
) -> None:
    policy = Policy(params=params, compute=compute, reduce=reduce, master=master, loss_scale=scale)
    assert as_policy(str(policy)) == policy == as_policy(policy)


def test_the_named_policies() -> None:
    assert {name: str(as_policy(name)) for name in NAMED} == {
        "model": "model",
        "f32": "params=f32,compute=f32,reduce=f32",
        "bf16": "params=f32,compute=bf16,reduce=f32",
        "bf16-master": "params=bf16,compute=bf16,reduce=f32,master=f32",
        "fp16": "params=f32,compute=f16,reduce=f32,loss_scale=dynamic",
        "fp16-master": "params=f16,compute=f16,reduce=f32,master=f32,loss_scale=dynamic",
    }
    assert str(as_policy("fp16, loss_scale=1024")).endswith("loss_scale=1024")
    assert as_policy("bf16-master,master=none").master is None
    assert pfx.Plan().policy == Policy() and pfx.Plan(precision="bf16").policy.compute == BF16


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("bf61", "precision='bf61': 'bf61' is no policy."),
        (None, "precision=None: is no policy."),
        ("", "precision='': '' is no policy."),
        ("bf16,colour=red", "precision='bf16,colour=red': 'colour=red' is no field with a value."),
        ("params=f32,params=bf16", "precision='params=f32,params=bf16': 'params=bf16' is said twice."),
        ("bf16,reduce=", "precision='bf16,reduce=': 'reduce=' is no field with a value."),
        ("compute=f8", "Policy: compute='f8' is no dtype to train in."),
        ("params=f32,master=bf16", "Policy: master torch.bfloat16 is no dtype for masters."),
        ("params=f64,master=f32", "Policy: master=f32 cannot hold parameters in f64."),
        ("fp16,loss_scale=1000", "Policy: loss_scale='1000' is no power of two."),
        ("fp16,loss_scale=-2", "Policy: loss_scale='-2' is no power of two."),
    ],
)  # fmt: skip
def test_what_is_told_of_policies_that_are_none(text: Any, first: str) -> None:
    for make in (as_policy, lambda text: pfx.Plan(precision=text)):
        with pytest.raises(ValueError) as caught:
            make(text)
        lines = str(caught.value).splitlines()
        assert lines[0] == ("" if make is as_policy else "Plan: ") + first
        assert lines[-1].startswith("  fix: ")


def test_only_floats_are_cast() -> None:
    values = {"w": torch.ones(2), "steps": torch.ones(2, dtype=torch.int64)}
    computed = as_policy("bf16").computed(values)
    assert computed["w"].dtype == BF16 and computed["steps"].dtype == torch.int64
    assert as_policy("model").computed(values) is values
    grads = {"a": torch.ones(1, dtype=F16), "b": torch.ones(1, dtype=F64)}
    assert [g.dtype for g in tree.leaves(as_policy("model").reduced(grads))] == [F32, F64]
    assert [g.dtype for g in tree.leaves(as_policy("bf16").reduced(grads))] == [F32, F32]


# Masters.


def sgd_down(steps: int, optimizer: Any, state: Any, params: Any) -> tuple[Any, Any]:
    for _ in range(steps):
        updates, state = optimizer.update({"p": torch.tensor([-0.001])}, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def test_masters_survive_a_resume() -> None:
    # B43: OpenTau#185, DeepSpeed#7786, #4141, Megatron-LM#1359: wrong: p = 1.0, master 1.001
    optimizer = master_weights(optim.sgd(1.0))
    params = {"p": torch.ones(1, dtype=BF16)}
    params, state = sgd_down(3, optimizer, optimizer.init(params), params)
    leaves, treedef = tree.flatten((params, state))
    assert [leaf.dtype for leaf in leaves].count(F32) == 1  # the master is kept, and as it is
    params, state = tree.unflatten(treedef, [leaf.clone() for leaf in leaves])
    params, state = sgd_down(1, optimizer, state, params)
    assert params["p"].dtype == BF16 and params["p"].item() == 1.0078125
    assert state.masters["p"].item() == pytest.approx(1.004, abs=1e-6)
    # Only the parameters of another run are loaded: the masters have to follow.
    other = {"p": torch.full((1,), 3.0, dtype=BF16)}
    fresh = refresh_masters(state, other)
    assert fresh.masters["p"].item() == 3.0 and fresh.masters["p"].dtype == F32
    params, state = sgd_down(1, optimizer, fresh, other)
    assert state.masters["p"].item() == pytest.approx(3.001, abs=1e-6)


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([BF16, F16]),
    rate=st.sampled_from([1e-4, 1e-2, 1.0, 1e4]),
    name=st.sampled_from(["adamw", "sgd"]),
)
def test_a_parameter_is_its_master_rounded(seed: int, dtype: Any, rate: float, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    inner = {"adamw": lambda: optim.adamw(rate), "sgd": lambda: optim.sgd(rate, momentum=0.9)}[
        name
    ]()
    optimizer = master_weights(inner)
    params = {"narrow": (draw(4, 3) * 8).to(dtype), "wide": draw(5), "deep": draw(2).double()}
    plain = {"narrow": params["narrow"].float(), "wide": params["wide"], "deep": params["deep"]}
    state, plain_state = optimizer.init(params), inner.init(plain)
    assert state.masters["wide"] is None and state.masters["deep"] is None
    for _ in range(5):
        grads = tree.map(lambda p: draw(*p.shape) * 3, params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        plain_updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optim.apply_updates(plain, plain_updates)
        assert torch.equal(state.masters["narrow"], plain["narrow"])
        assert torch.equal(params["narrow"], plain["narrow"].to(dtype))
        assert torch.equal(params["wide"], plain["wide"]) and params["deep"].dtype == F64
        same = zip(tree.leaves(state.inner), tree.leaves(plain_state), strict=True)
        assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("target", [2.0**-22, 2.0**20, -0.0, 70000.0, 1e-45])
def test_no_new_parameter_is_out_of_reach_of_its_old_value(target: float, dtype: Any) -> None:
    """A difference could not say them: no number leads back from infinity, none from 1 to −0."""
    targets = iter([target, 2.0, target])
    jump = optim.stateless(lambda grads, masters: tree.map(lambda m: next(targets) - m, masters))
    params = {"p": torch.ones(1, dtype=dtype)}
    optimizer = master_weights(jump)
    state = optimizer.init(params)
    for wanted in (target, 2.0, target):
        updates, state = optimizer.update(params, state, params)
        params = optim.apply_updates(params, updates)
        assert state.masters["p"].item() == pytest.approx(wanted, abs=1e-7)
        assert torch.equal(params["p"], state.masters["p"].to(dtype))


def test_masters_inside_other_states() -> None:
    params = {"a": torch.ones(2, dtype=BF16), "b": torch.ones(2)}
    optimizer = optim.skip_nonfinite(master_weights(optim.chain(optim.adam(0.1))))
    state = optimizer.init(params)
    loaded = tree.map(lambda p: p * 3, params)
    fresh = refresh_masters({"opt": [state]}, loaded)["opt"][0]
    assert fresh.inner.masters["a"].tolist() == [3.0, 3.0] and fresh.inner.masters["b"] is None
    assert fresh.inner.inner is state.inner.inner
    plain = optim.adam(0.1).init(params)
    assert refresh_masters(plain, loaded) is plain
    with pytest.raises(TreeError):
        refresh_masters(state, {"a": loaded["a"]})
    # A step that is skipped leaves parameter and master alone.
    bad = tree.map(lambda p: torch.full_like(p, math.nan, dtype=F32), params)
    updates, after = optimizer.update(bad, state, params)
    new = optim.apply_updates(params, updates)
    assert all(torch.equal(new[k], params[k]) for k in params)
    assert torch.equal(after.inner.masters["a"], state.inner.masters["a"])


def test_what_scales_updates_does_not_scale_new_values() -> None:
    params = {"p": torch.ones(1, dtype=BF16)}
    wrong = optim.chain(master_weights(optim.sgd(0.1)), optim.scale(2.0))
    with pytest.raises((TypeError, AttributeError)):
        wrong.update({"p": torch.ones(1)}, wrong.init(params), params)


def test_what_is_told_of_wrong_masters() -> None:
    with pytest.raises(ValueError) as caught:
        master_weights(optim.sgd(0.1), dtype=BF16)
    assert str(caught.value) == (
        "master_weights: master torch.bfloat16 is no dtype for masters.\n"
        "  they hold what 16 bits round away.\n"
        "  fix: torch.float32"
    )
    optimizer = master_weights(optim.sgd(0.1))
    grads = {"p": torch.ones(1, dtype=BF16)}
    with pytest.raises(ValueError) as caught:
        optimizer.update(grads, optimizer.init(grads))
    assert str(caught.value) == (
        "master_weights: params is None.\n"
        "  the new parameters are rounded to the dtype of the old ones.\n"
        "  fix: optimizer.update(grads, state, params)"
    )


# Loss scales.


class Scaler:
    """The loss scaler of Megatron-LM and DeepSpeed, in plain numbers.

    DeepSpeed writes the hysteresis as what is left, and raises the scale by the steps since the last
    overflow; this is its code with its names.
    """

    def __init__(self, scale: float, window: int, factor: float, shift: int, least: float) -> None:
        self.cur_scale, self.scale_window, self.scale_factor = scale, window, factor
        self.delayed_shift = self.cur_hysteresis = shift
        self.min_scale, self.cur_iter, self.last_overflow_iter = least, 0, -1

    def update_scale(self, overflow: bool, *, consecutive_hysteresis: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                if not consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    factor=st.sampled_from([2.0, 4.0]),
    floor=st.sampled_from([1.0, 2.0**10]),
    replenish=st.booleans(),
)
def test_the_scale_is_that_of_a_loop_over_numbers(
    overflows: list[bool],
    window: int,
    hysteresis: int,
    factor: float,
    floor: float,
    replenish: bool,
) -> None:
    plain = Scaler(2.0**16, window, factor, hysteresis, floor)
    options = {"window": window, "hysteresis": hysteresis, "factor": factor, "backoff": 1 / factor}
    optimizer = loss_scale.dynamic(
        optim.sgd(1.0), floor=floor, ceiling=2.0**100, replenish=replenish, **options
    )
    params = {"w": torch.zeros(2)}
    state = optimizer.init(params)
    skipped = 0
    for overflow in overflows:
        scale = loss_scale.of(state)
        assert float(scale) == plain.cur_scale
        grads = {"w": torch.tensor([3.0, math.inf if overflow else 0.5]) * scale}
        updates, state = optimizer.update(grads, state, params)
        assert updates["w"].tolist() == ([0.0, 0.0] if overflow else [-3.0, -0.5])
        plain.update_scale(overflow, consecutive_hysteresis=replenish)
        skipped += overflow
        assert optim.skipped(state) == skipped
    assert float(loss_scale.of(state)) == plain.cur_scale


@given(seed=st.integers(0, 2**16), power=st.integers(-20, 24), fixed=st.booleans())
def test_a_scale_rounds_nothing(seed: int, power: int, fixed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = {"w": torch.randn(7, generator=generator), "b": torch.randn((), generator=generator)}
    inner = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1))
    options = {"initial": 2.0**power, "floor": 2.0**-20}
    scaled = loss_scale.fixed(inner, 2.0**power) if fixed else loss_scale.dynamic(inner, **options)
    expected, _ = inner.update(grads, inner.init(grads), grads)
    large = tree.map(lambda g: g * 2.0**power, grads)
    found, state = scaled.update(large, scaled.init(grads), grads)
    assert all(torch.equal(found[k], expected[k]) for k in grads)
    assert torch.equal(optim.pre_clip_norm(state), optim.global_norm(grads))


def test_the_ceiling_holds() -> None:
    optimizer = loss_scale.dynamic(optim.sgd(1.0), window=1, ceiling=2.0**17)
    grads = {"w": torch.zeros(1)}
    state = optimizer.init(grads)
    for _ in range(3):
        _, state = optimizer.update(grads, state, grads)
    assert loss_scale.of(state) == 2.0**17
    assert loss_scale.of(optim.sgd(1.0).init(grads)) is None


def test_a_policy_wraps_what_has_no_scale_of_its_own() -> None:
    params = {"w": torch.ones(2, dtype=F16)}
    policy, plain = as_policy("fp16-master"), optim.sgd(0.1)
    state = policy.wrap(plain, plain.init(params)).init(params)
    assert loss_scale.of(state) == 2.0**16 and state.inner.masters["w"].dtype == F32
    own = loss_scale.dynamic(master_weights(optim.sgd(0.1)), initial=4.0)
    assert policy.wrap(own, own.init(params)) is own
    assert as_policy("bf16").wrap(plain, plain.init(params)) is plain
    fixed = as_policy("fp16,loss_scale=8").wrap(plain, plain.init(params)).init(params)
    assert loss_scale.of(fixed) == 8.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial": 3.0}, "loss_scale.dynamic: initial=3.0 is no power of two."),
        ({"factor": "two"}, "loss_scale.dynamic: factor='two' is no power of two."),
        ({"window": 0}, "loss_scale.dynamic: window is out of range."),
        ({"hysteresis": 0}, "loss_scale.dynamic: hysteresis is out of range."),
        ({"backoff": 2.0}, "loss_scale.dynamic would move the scale the wrong way."),
        ({"floor": 2.0**20}, "loss_scale.dynamic would move the scale the wrong way."),
    ],
)
def test_what_is_told_of_scales_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        loss_scale.dynamic(optim.sgd(0.1), **options)
    assert str(caught.value).splitlines()[0] == text
