"""Skipped steps: what they leave alone in every bit, and when a step is one."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pfx import optim, precision, tree

INF, NAN = math.inf, math.nan
GUARDS = {
    "nonfinite": optim.skip_nonfinite,
    "spikes": lambda inner: optim.skip_spikes(inner, warmup=0),
    "spikes of the norm": lambda inner: optim.skip_spikes(inner, warmup=0, loss_factor=None),
}
OPTIMIZERS = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)),
    "momentum": lambda: optim.sgd(lambda k: (k + 1) / 10, momentum=0.9, nesterov=True),
    "masked": lambda: optim.masked(optim.adam(0.1), {"a": True, "b": False}),
}


def bits(values: Any) -> list[bytes]:
    """All bits of a tree: −0.0 is not 0.0, a NaN is itself."""
    return [leaf.numpy().tobytes() for leaf in tree.leaves(values)]


def params() -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([-0.0, 0.0, 1.0]), "b": torch.tensor([[2.0], [1e-45]])}


def some_grads(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([0.5, -1.0, value]), "b": torch.tensor([[0.25], [-0.5]])}


@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("name", GUARDS)
@given(bad=st.sampled_from([INF, -INF, NAN, 3e38]), steps=st.integers(0, 2))
def test_a_skipped_step_changes_no_bit(name: str, inner: str, bad: float, steps: int) -> None:
    # B45: DeepSpeed#8614: a norm that is not finite must neither flip nor scale what is finite.
    guard, now, loss = GUARDS[name](OPTIMIZERS[inner]()), params(), torch.tensor(1.0)
    state = guard.init(now)
    for _ in range(steps):
        updates, state = guard.update(some_grads(), state, now, loss=loss)
        now = optim.apply_updates(now, updates)
    updates, after = guard.update(some_grads(bad), state, now, loss=loss)
    assert all(bool((u == 0).all()) for u in tree.leaves(updates))
    assert bits(optim.apply_updates(now, updates)) == bits(now)
    assert bits(after.inner) == bits(state.inner)
    assert after.counts.skipped == 1 and after.counts.consecutive == 1
    assert optim.skipped(after) == 1 and not torch.isfinite(optim.pre_clip_norm(after))


@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_a_step_that_is_not_skipped_is_the_inner_step(inner: str) -> None:
    plain, guard = OPTIMIZERS[inner](), optim.skip_nonfinite(OPTIMIZERS[inner]())
    expected, state = plain.update(some_grads(), plain.init(params()), params())
    found, guarded = guard.update(some_grads(), guard.init(params()), params())
    assert bits(found) == bits(expected) and bits(guarded.inner) == bits(state)
    assert guarded.counts.skipped == 0 and guarded.counts.consecutive == 0


def test_zero_gradients_are_no_reason_to_skip() -> None:
    # B45: DeepSpeed#8614: an all-zero gradient tripped an assert.
    guard = optim.skip_nonfinite(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0)))
    zeros = tree.map(torch.zeros_like, params())
    updates, state = guard.update(zeros, guard.init(params()), params())
    assert all(bool((u == 0).all()) for u in tree.leaves(updates))
    assert state.counts.skipped == 0 and state.counts.norm == 0.0


def test_an_infinite_gradient_beside_a_clip_skips() -> None:
    # B45: DeepSpeed#8614: the wrong value of b is -2.000002.
    guard = optim.skip_nonfinite(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0)))
    now = {"a": torch.tensor([0.0]), "b": torch.tensor([0.0])}
    grads = {"a": torch.tensor([INF]), "b": torch.tensor([2.0])}
    updates, state = guard.update(grads, guard.init(now), now)
    assert optim.apply_updates(now, updates)["b"].item() == 0.0 and state.counts.skipped == 1


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    # B52: accelerate#4242, pytorch#55585, transformers#11106
    warmup = lambda k: (k + 1) / 10
    guard = optim.skip_nonfinite(optim.adam(warmup))
    now, rates = {"w": torch.zeros(1)}, []
    state = guard.init(now)
    for value in (INF, 1.0, INF, 1.0):
        updates, state = guard.update({"w": torch.tensor([value])}, state, now)
        now = optim.apply_updates(now, updates)
        rates.append(round(float(optim.learning_rate(state)), 6))
    assert rates == [0.0, 0.1, 0.1, 0.2]
    assert state.inner[0].count == 2 and state.inner[1].count == 2 and state.counts.skipped == 2


def test_a_loss_that_is_not_finite_skips() -> None:
    for guard in (optim.skip_nonfinite(optim.sgd(1.0)), optim.skip_spikes(optim.sgd(1.0))):
        state = guard.init(params())
        assert guard.update(some_grads(), state, params(), loss=torch.tensor(NAN))[1].counts.skipped


def test_keywords_reach_what_is_chained_and_masked() -> None:
    chained = optim.chain(
        optim.clip_by_global_norm(9.0), optim.skip_spikes(optim.scale(2.0), norm_factor=None)
    )
    masked = optim.masked(chained, {"a": True, "b": False})
    _, state = optim.update_with(
        masked, some_grads(), masked.init(params()), params(), loss=torch.tensor(7.0), other=1
    )
    assert state.inner[1].loss_mean == 7.0


class Spikes:
    """`skip_spikes` in plain numbers."""

    def __init__(self, factor: float, warmup: int, decay: float, most: int) -> None:
        self.factor, self.warmup, self.decay, self.most = factor, warmup, decay, most
        self.kept: list[tuple[float, float]] = []
        self.skipped = self.row = 0

    def mean(self, which: int) -> float:
        n = len(self.kept)
        total = sum(self.decay ** (n - 1 - i) * pair[which] for i, pair in enumerate(self.kept))
        return total * (1 - self.decay) / (1 - self.decay**n) if n else 0.0

    def step(self, loss: float, norm: float, weight: float) -> bool:
        high = any(
            mean > 0 and x > self.factor * mean
            for x, mean in ((loss, self.mean(0)), (norm, self.mean(1)))
        )
        warm = len(self.kept) >= self.warmup
        good = math.isfinite(loss) and math.isfinite(norm)
        good = good and not (high and warm and self.row < self.most)
        if good and weight:
            self.kept = [*([] if high and warm else self.kept), (loss, norm)]
        self.row = 0 if good else self.row + 1
        self.skipped += not good
        return good


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([1.0, 1.5, 2.0, 40.0, -1.0, 0.0, NAN, INF]),
            st.sampled_from([1.0, 0.5, 30.0, 0.0, INF]),
            st.sampled_from([1.0, 1.0, 0.0]),
        ),
        max_size=14,
    ),
    warmup=st.integers(0, 3),
    decay=st.sampled_from([0.0, 0.5, 0.99]),
    most=st.integers(0, 3),
)
def test_spikes_are_those_of_a_loop_over_numbers(
    steps: list[tuple[float, float, float]], warmup: int, decay: float, most: int
) -> None:
    options = {"warmup": warmup, "decay": decay, "max_consecutive": most}
    guard = optim.skip_spikes(optim.sgd(0.5), loss_factor=10.0, norm_factor=10.0, **options)
    plain, now = Spikes(10.0, warmup, decay, most), {"w": torch.zeros(1)}
    state = guard.init(now)
    for loss, norm, weight in steps:
        loss_, weight_ = torch.tensor(loss), torch.tensor(weight)
        grads = {"w": torch.tensor([norm])}
        updates, state = guard.update(grads, state, now, loss=loss_, weight=weight_)
        taken = plain.step(loss, norm, weight)
        assert updates["w"].item() == (-0.5 * norm if taken else 0.0)
        counts = (int(state.counts.skipped), int(state.counts.consecutive), int(state.seen))
        assert counts == (plain.skipped, plain.row, len(plain.kept))
        assert float(state.loss_mean) == pytest.approx(plain.mean(0), rel=1e-9, abs=1e-12)
        assert float(state.norm_mean) == pytest.approx(plain.mean(1), rel=1e-6, abs=1e-12)


def test_accumulation_waits_without_touching_a_bit_of_16_bit_parameters() -> None:
    optimizer = optim.accumulate(precision.master_weights(optim.sgd(1.0)), 2)
    now = {"p": torch.tensor([-0.0, 1.0], dtype=torch.bfloat16)}
    state, grads = optimizer.init(now), {"p": torch.tensor([0.0, 1.0])}
    updates, state = optimizer.update(grads, state, now)
    kept = optim.apply_updates(now, updates)
    assert bits(tree.map(lambda p: p.float(), kept)) == bits(tree.map(lambda p: p.float(), now))
    updates, state = optimizer.update(grads, state, now)
    assert optim.apply_updates(now, updates)["p"].tolist() == [0.0, 0.0]


def test_what_is_told_of_wrong_arguments() -> None:
    with pytest.raises(ValueError) as caught:
        optim.skip_spikes(optim.sgd(0.1), loss_factor=1.0)
    assert str(caught.value) == (
        "skip_spikes: loss_factor is out of range.\n"
        "  loss_factor = 1.0 must be finite and above 1.\n"
        "  fix: loss_factor=10.0, or loss_factor=None not to look at it"
    )
    guard = optim.skip_spikes(optim.sgd(0.1))
    with pytest.raises(ValueError) as caught:
        guard.update(some_grads(), guard.init(params()), params())
    assert str(caught.value) == (
        "skip_spikes: loss is None.\n"
        "  spikes of the loss are told by its running mean.\n"
        "  fix: optimizer.update(grads, state, params, loss=loss), or loss_factor=None"
    )
    for options in ({"decay": 1.0}, {"warmup": -1}, {"norm_factor": INF}, {"max_consecutive": -1}):
        with pytest.raises(ValueError, match="out of range"):
            optim.skip_spikes(optim.sgd(0.1), **options)
