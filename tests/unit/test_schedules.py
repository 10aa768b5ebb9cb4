import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pfx import optim, tree
from pfx.optim import schedules

TABLE = {
    "constant": lambda peak, total, warmup, low: schedules.constant(peak, warmup_steps=warmup),
    "linear": lambda peak, total, warmup, low: schedules.linear(
        peak, total, warmup_steps=warmup, min_lr=low
    ),
    "cosine": lambda peak, total, warmup, low: schedules.cosine(
        peak, total, warmup_steps=warmup, min_lr=low
    ),
    **{
        f"wsd-{shape}": lambda peak, total, warmup, low, shape=shape: schedules.wsd(
            peak,
            total,
            decay_steps=max((total - warmup) // 3, 1),
            warmup_steps=warmup,
            min_lr=low,
            shape=shape,
        )
        for shape in ("linear", "cosine", "sqrt")
    },
}
DECAYING = sorted(set(TABLE) - {"constant"})

phases = st.tuples(
    st.integers(0, 20), st.integers(1, 60), st.floats(1e-6, 10.0), st.floats(0.0, 1.0)
)


def used_by_updates(schedule, updates):
    """The learning rates that an optimizer really uses, and that a plain call gives."""
    optimizer = optim.sgd(schedule)
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    grads = {"w": torch.ones(1, dtype=torch.float64)}
    state = optimizer.init(params)
    used = {}
    for k in range(1, max(updates) + 1):
        step, state = optimizer.update(grads, state, params)
        used[k] = optim.learning_rate(state).item()
        assert step["w"].item() == -used[k]
        assert used[k] == schedule(k - 1)
    return [used[k] for k in updates]


@pytest.mark.parametrize("min_lr", [0.0, 0.1])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_first_warmup_step_is_neither_zero_nor_the_peak(name, min_lr):
    # B56: DeepSpeed#5287, accelerate#2124, gpt-neox#1373, Megatron-Bridge#5399, torchtitan#1261
    schedule = TABLE[name](1.0, 100, 10, min_lr)
    first, second, tenth, eleventh, last, after = used_by_updates(
        schedule, [1, 2, 10, 11, 100, 101]
    )
    assert (first, second, tenth) == (0.1, 0.2, 1.0)
    assert 0.98 < eleventh < 1.0
    assert (last, after) == (min_lr, min_lr)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_no_warmup_and_a_warmup_of_one_start_at_the_peak(name, warmup):
    # B56
    assert used_by_updates(TABLE[name](1.0, 100, warmup, 0.0), [1]) == [1.0]


def test_megatron_warmup_from_zero_is_explicit():
    # B56: learning rate 0 at update 1 only where it was asked for
    schedule = schedules.start_at_zero(schedules.linear(1.0, 100, warmup_steps=10))
    assert used_by_updates(schedule, [1, 2, 11, 12, 101]) == [0.0, 0.1, 1.0, 89 / 90, 0.0]


def test_resume_does_not_compound_the_decayed_rate():
    # B58: nanotron#233, #243, #245
    optimizer = optim.sgd(schedules.cosine(1.0, 100))
    params, grads = {"w": torch.zeros(())}, {"w": torch.ones(())}
    state = optimizer.init(params)
    for _ in range(51):
        _, state = optimizer.update(grads, state, params)
    assert optim.learning_rate(state).item() == pytest.approx(0.5, abs=1e-15)

    saved = [leaf.clone() for leaf in tree.leaves(state)]
    resumed = optim.sgd(schedules.cosine(1.0, 100))
    restored = tree.unflatten(tree.structure(resumed.init(params)), saved)
    updates, restored = resumed.update(grads, restored, params)
    assert optim.learning_rate(restored).item() == pytest.approx(0.484295, abs=1e-6)
    assert updates["w"].item() == pytest.approx(-0.484295, abs=1e-6)

    # Another base rate after the resume is the new base, not a multiple of the decayed rate.
    doubled = optim.sgd(schedules.cosine(2.0, 100))
    restored = tree.unflatten(tree.structure(doubled.init(params)), saved)
    _, state = doubled.update(grads, restored, params)
    assert optim.learning_rate(state).item() == pytest.approx(2 * 0.484295, abs=1e-6)


@pytest.mark.parametrize("name", sorted(TABLE))
@given(phases=phases)
def test_int_and_tensor_counts_agree(name, phases):
    warmup, decay, peak, low = phases
    schedule = TABLE[name](peak, warmup + decay, warmup, low * peak)
    for count in range(0, warmup + decay + 3, 3):
        plain, tensor = schedule(count), schedule(torch.tensor(count))
        assert isinstance(plain, float)
        assert tensor.dtype == torch.float64 and tensor.shape == ()
        assert tensor.item() == pytest.approx(plain, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", DECAYING)
@given(phases=phases)
def test_rises_to_the_peak_then_never_rises_and_ends_at_min_lr(name, phases):
    warmup, decay, peak, low = phases
    total, low = warmup + decay, low * peak
    schedule = TABLE[name](peak, total, warmup, low)
    rates = [schedule(count) for count in range(total + 2)]
    top = max(warmup, 1) - 1
    assert rates[:top] == pytest.approx([peak * (k + 1) / warmup for k in range(top)])
    assert rates[top] == peak
    falling = rates[top:]
    assert all(a >= b - 1e-12 * peak for a, b in zip(falling, falling[1:], strict=False))
    assert rates[total] == rates[total + 1] == low
    if warmup:
        assert rates[total - 1] == low


def test_wsd_is_stable_until_its_decay():
    schedule = schedules.wsd(3e-4, 100, decay_steps=20, warmup_steps=10, min_lr=3e-5)
    assert {schedule(count) for count in range(9, 80)} == {3e-4}
    assert schedule(89) == pytest.approx((3e-4 + 3e-5) / 2)
    assert schedule(99) == 3e-5


@pytest.mark.parametrize("name", DECAYING)
def test_both_ends_are_exact(name):
    peak, low = 0.3, 0.03
    assert low + (peak - low) != peak  # so the usual way to write it would miss the peak
    schedule = TABLE[name](peak, 10, 2, low)
    assert (schedule(1), schedule(9)) == (peak, low)
    assert (schedule(torch.tensor(1)).item(), schedule(torch.tensor(9)).item()) == (peak, low)


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.75), ("cosine", 0.8535533905932737), ("sqrt", 0.5)]
)
def test_shapes_of_the_decay(shape, middle):
    schedule = schedules.wsd(1.0, 10, decay_steps=4, shape=shape)
    assert schedule(5) == 1.0
    assert schedule(6) == pytest.approx(middle)


def test_cosine_is_torchs_after_the_first_update():
    weight = torch.nn.Parameter(torch.zeros(()))
    reference = torch.optim.SGD([weight], lr=0.3)
    torch_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 50, eta_min=0.02)
    schedule = schedules.cosine(0.3, 50, min_lr=0.02)
    for count in range(50):
        assert schedule(count) == pytest.approx(reference.param_groups[0]["lr"], rel=1e-12)
        reference.step()
        torch_schedule.step()


def test_a_later_float_count_is_exact():
    # Counts beyond 2**24 must not be rounded to float32 on the way.
    schedule = schedules.linear(1.0, 2**40)
    count = torch.tensor(2**24 + 1)
    assert schedule(count).item() == 1 - (2**24 + 1) / 2**40


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: schedules.cosine(-1.0, 10),
            "cosine: peak is out of range.\n"
            "  peak = -1.0 must be finite and at least 0.\n"
            "  fix: pass a peak in [0, inf)",
        ),
        (
            lambda: schedules.constant(1.0, warmup_steps=-1),
            "constant: warmup_steps is out of range.\n"
            "  warmup_steps = -1 must be finite and at least 0.\n"
            "  fix: pass a warmup_steps in [0, inf)",
        ),
        (
            lambda: schedules.linear(0.1, 10, min_lr=0.2),
            "linear: min_lr is above the peak.\n  min_lr = 0.2, peak = 0.1.\n  fix: min_lr=0.1",
        ),
        (
            lambda: schedules.linear(1.0, 10, warmup_steps=10),
            "linear: total_steps does not hold the warmup and the decay.\n"
            "  10 of warmup + 1 of decay > 10.\n"
            "  fix: total_steps=11",
        ),
        (
            lambda: schedules.wsd(1.0, 10, warmup_steps=5, decay_steps=6),
            "wsd: total_steps does not hold the warmup and the decay.\n"
            "  5 of warmup + 6 of decay > 10.\n"
            "  fix: total_steps=11",
        ),
        (
            lambda: schedules.wsd(1.0, 10, decay_steps=0),
            "wsd: decay_steps is out of range.\n  0 < 1.\n  fix: decay_steps=1",
        ),
        (
            lambda: schedules.wsd(1.0, 10, decay_steps=2, shape="step"),  # pyright: ignore
            "wsd: shape 'step' is unknown.\n  fix: one of ['cosine', 'linear', 'sqrt']",
        ),
        (
            lambda: schedules.constant(math.nan),
            "constant: peak is out of range.\n"
            "  peak = nan must be finite and at least 0.\n"
            "  fix: pass a peak in [0, inf)",
        ),
    ],
)
def test_error_texts(make, text):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == text
