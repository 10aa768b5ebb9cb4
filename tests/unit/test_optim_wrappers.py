"""Groups with optimizers of their own, gradients accumulated over steps, averages of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pfx import optim, precision, tree
from pfx.errors import TreeError
from pfx.optim import schedules

SHAPES = {"a": (2, 3), "b": (3,), "c": {"d": (2,), "e": ()}}
OPTIMIZERS: dict[str, Callable[[], optim.GradientTransformation]] = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(schedules.cosine(0.1, 9, warmup_steps=2)),
    "lion": lambda: optim.lion(0.1),
    "lamb": lambda: optim.lamb(0.1, axes=None),
    "adafactor": lambda: optim.adafactor(0.1, axes=None),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0)),
}


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def steps(optimizer: optim.GradientTransformation, params: Any, grads: list[Any]) -> Any:
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def assert_equal(left: Any, right: Any, atol: float = 0.0) -> None:
    for a, b in zip(tree.leaves(left), tree.leaves(right), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# partition


@given(
    names=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_group_is_updated_as_if_it_were_alone(names: list[str], seed: int) -> None:
    params, grads = drawn(seed), [drawn(seed + 1), drawn(seed + 2)]
    labels = tree.unflatten(tree.structure(params), names)
    groups = {name: OPTIMIZERS[name]() for name in set(names)}
    found, _ = steps(optim.partition(groups, labels), params, grads)
    for name in set(names):
        part = lambda values, name=name: [
            v for v, label in zip(tree.leaves(values), names, strict=True) if label == name
        ]
        alone, _ = steps(OPTIMIZERS[name](), part(params), [part(grad) for grad in grads])
        assert_equal(part(found), alone)


def test_groups_are_torchs_parameter_groups() -> None:
    params, grads = drawn(0), [drawn(k) for k in range(1, 21)]
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    reference = torch.optim.AdamW(
        [
            {"params": leaves[:1], "lr": 0.1, "weight_decay": 0.5},
            {"params": leaves[1:], "lr": 0.02, "weight_decay": 0.0},
        ]
    )
    for grad in grads:
        for leaf, g in zip(leaves, tree.leaves(grad), strict=True):
            leaf.grad = g.clone()
        reference.step()
    groups = {
        "decay": optim.adamw(0.1, weight_decay=0.5),
        "rest": optim.adamw(0.02, weight_decay=0.0),
    }
    labels = {"a": "decay", "b": "rest", "c": "rest"}  # one label for a subtree
    found, state = steps(optim.partition(groups, labels), params, grads)
    assert_equal(found, [leaf.detach() for leaf in leaves], atol=1e-12)
    assert optim.learning_rate(state).item() == 0.1
    assert optim.learning_rate(state.inner["rest"]).item() == 0.02


def test_labels_by_role_and_by_function() -> None:
    axes = {"wte": "vocab embed", "up": "layers embed mlp"}
    label = lambda dims: "embed" if "vocab" in dims else "decay"
    assert optim.role_labels(axes, label) == {"wte": "embed", "up": "decay"}
    groups = {"embed": optim.sgd(1.0), "decay": optim.sgd(0.1)}
    params = {"wte": torch.ones(2), "up": torch.ones(2)}
    by_function = lambda values: {"wte": "embed", "up": "decay"}
    found, _ = steps(optim.partition(groups, by_function), params, [params])
    assert_equal(found, {"wte": torch.zeros(2), "up": torch.full((2,), 0.9)})


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        (
            {"a": "x", "b": "y", "c": "z"},
            ValueError,
            "partition: the label of params['c']['d'] is 'z', which has no transformation.\n"
            "  fix: one of ['x', 'y']",
        ),
        (
            {"a": "x", "b": "x", "c": "x"},
            ValueError,
            "partition: 'y' is the label of no parameter; labels: ['x']\n"
            "  fix: leave out the transformation 'y', or label a parameter so",
        ),
        (
            {"a": "x", "b": "y"},
            TreeError,
            "partition: the labels do not match the parameters.\n"
            "  the tree: keys differ; missing [\"['c']\"], extra []\n"
            "  fix: give the labels the parameters' keys, or one label for a whole subtree",
        ),
    ],
)
def test_labels_that_do_not_fit(labels: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        optim.partition({"x": optim.sgd(1.0), "y": optim.sgd(1.0)}, labels).init(drawn(0))
    assert str(caught.value) == text


# accumulate


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    every=st.integers(1, 4),
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_steps_accumulated_are_steps_on_the_means(
    name: str, every: int, count: int, seed: int
) -> None:
    params, grads = drawn(seed), [drawn(seed + k) for k in range(1, count + 1)]
    found, state = steps(optim.accumulate(OPTIMIZERS[name](), every), params, grads)
    full = [grads[i : i + every] for i in range(0, count - count % every, every)]
    means = [tree.map(lambda *gs: torch.stack(gs).mean(0), *group) for group in full]
    expected, inner = steps(OPTIMIZERS[name](), params, means)
    assert_equal(found, expected, atol=1e-12)
    assert_equal(state.inner, inner, atol=1e-12)
    assert (state.waiting.item(), state.updates.item()) == (count % every, count // every)


def test_in_between_nothing_moves_by_a_bit() -> None:
    optimizer = optim.accumulate(optim.adamw(0.1), 3)
    params = drawn(0, torch.float32)
    _, state = steps(optimizer, params, [drawn(k, torch.float32) for k in range(3)])
    for k in range(2):
        updates, after = optimizer.update(drawn(9 + k, torch.float32), state, params)
        assert all(not u.any() for u in tree.leaves(updates))
        assert_equal(after.inner, state.inner)
        state = after


def test_a_batch_that_grows() -> None:
    """1, then 2, then 3 steps an update: the schedule counts updates, and so does the optimizer's."""
    optimizer = optim.accumulate(optim.sgd(lambda count: 1.0 / (count + 1)), lambda k: k + 1)
    params = {"w": torch.zeros((), dtype=torch.float64)}
    grads = [{"w": torch.tensor(float(k), dtype=torch.float64)} for k in range(1, 7)]
    found, state = steps(optimizer, params, grads)
    assert found["w"].item() == pytest.approx(-(1 + 2.5 / 2 + 5 / 3))
    assert state.updates.item() == 3


def test_a_bad_step_is_forgotten_with_its_update() -> None:
    optimizer = optim.accumulate(optim.sgd(1.0), 2)
    params = {"w": torch.zeros(1)}
    bad, good = {"w": torch.tensor([torch.nan])}, {"w": torch.ones(1)}
    _, state = steps(optimizer, params, [bad, good])
    assert torch.equal(state.mean["w"], torch.zeros(1))
    _, state = optimizer.update(good, state, params)
    assert torch.equal(optimizer.update(good, state, params)[0]["w"], -torch.ones(1))


def test_a_bad_step_can_be_left_out_of_the_mean() -> None:
    optimizer = optim.skip_nonfinite(optim.accumulate(optim.sgd(1.0), 2))
    params = {"w": torch.zeros(1)}
    grads = [{"w": torch.tensor([x])} for x in (1.0, torch.nan, 3.0)]
    found, state = steps(optimizer, params, grads)
    assert found["w"].item() == -2.0
    assert state.counts.skipped.item() == 1


def test_in_between_a_zero_keeps_its_sign() -> None:
    params = {"w": torch.tensor([-0.0, 0.0])}
    found, _ = steps(optim.accumulate(optim.sgd(1.0), 2), params, [{"w": torch.ones(2)}])
    assert torch.equal(torch.signbit(found["w"]), torch.tensor([True, False]))


def test_masters_are_accumulated_for_too() -> None:
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    optimizer = optim.accumulate(precision.master_weights(optim.sgd(1.0)), 2)
    grads = [{"w": torch.full((2,), 2.0**-9, dtype=torch.bfloat16)}] * 4
    found, _ = steps(optimizer, params, grads[:1])
    assert torch.equal(found["w"], params["w"])
    found, _ = steps(optimizer, params, grads)
    assert (
        found["w"].tolist() == [1 - 2.0**-8] * 2
    )  # each of two updates alone would be half a step


def test_low_precision_gradients_are_summed_wide() -> None:
    optimizer = optim.accumulate(optim.sgd(1.0), 512)
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    ones = {"w": torch.ones(1, dtype=torch.bfloat16)}
    found, _ = steps(optimizer, params, [ones] * 512)
    assert found["w"].item() == -1.0


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_accumulating_over_no_steps_is_refused(every: Any) -> None:
    with pytest.raises(ValueError) as caught:
        optim.accumulate(optim.sgd(1.0), every)
    assert str(caught.value) == (
        f"accumulate: every={every!r} must be an integer of at least 1, or a function of the updates "
        "made."
    )


# ema


@given(name=st.sampled_from(sorted(OPTIMIZERS)), decay=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_ema_is_the_average_of_the_parameters(name: str, decay: float, seed: int) -> None:
    params, grads = drawn(seed), [drawn(seed + k) for k in range(1, 6)]
    found, state = steps(optim.chain(OPTIMIZERS[name](), optim.ema(decay)), params, grads)
    average = params
    for k in range(1, 6):
        now, _ = steps(OPTIMIZERS[name](), params, grads[:k])
        average = tree.map(lambda a, p: decay * a + (1 - decay) * p, average, now)
    assert_equal(found, now)  # the updates pass through untouched
    assert_equal(optim.ema_params(state), average, atol=1e-12)


def test_ema_is_torchs_averaged_model() -> None:
    """Which copies the parameters after the first update: a decay of 0 at update 1."""
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    average = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    decay = lambda count: 0.9 * torch.clamp(count.double(), max=1)
    optimizer = optim.chain(optim.sgd(0.1), optim.ema(decay))
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    state = optimizer.init(params)
    for k in range(20):
        torch.manual_seed(k)
        grads = tree.map(torch.randn_like, params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        module.load_state_dict(params)
        average.update_parameters(module)
    expected = dict(average.module.named_parameters())
    for name, value in optim.ema_params(state).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=1e-14)


def test_the_average_is_wide_and_no_view_of_the_parameters() -> None:
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "v": torch.ones(2)}
    state = optim.ema(0.999).init(params)
    assert state.average["w"].dtype == torch.float32
    assert state.average["v"].data_ptr() != params["v"].data_ptr()
    assert optim.ema_params(state, params)["w"].dtype == torch.bfloat16
    assert optim.ema_params(optim.sgd(0.1).init(params)) is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: optim.ema(1.0),
            "ema: decay is out of range.\n"
            "  decay = 1.0 must be finite and at least 0, and below 1.\n"
            "  fix: pass a decay in [0, 1)",
        ),
        (
            lambda: optim.ema(0.9).update({"w": torch.ones(1)}, optim.ema(0.9).init({})),
            "ema: params is None.\n"
            "  the average is one of the parameters.\n"
            "  fix: optimizer.update(grads, state, params)",
        ),
    ],
)
def test_errors_of_ema(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == text
