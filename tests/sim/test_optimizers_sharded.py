"""Every optimizer, sharded in every way, equals itself on one device: parameters, state and metrics.

That each of them is right on one device is in `tests/unit/test_optimizers.py`.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import pfx
from pfx import P, optim
from tests.common import (
    Case,
    assert_close,
    assert_same_run,
    optimizer_of,
    plans,
    run,
    run_eagerly,
    tolerance,
)

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "5"))
OPTIMIZERS = (
    "nesterov", "lion", "lamb", "adafactor", "muon", "groups", "accumulated", "ema",
)  # fmt: skip


@st.composite
def sharded(draw: st.DrawFn) -> Case:
    """Training runs of one optimizer under any plan, with a pipeline or without one."""
    size = lambda *sizes: draw(st.sampled_from(sizes))
    config: dict[str, Any] = {"num_layers": size(2, 3, 1)}
    if draw(st.booleans()):
        plan = draw(plans(max_devices=8))
    else:
        plan = {
            "pp": size(2, 3),
            "schedule": size("1f1b", "gpipe", "zb-v"),
            "microbatches": draw(st.integers(1, 4)),
            "dp": size(1, 2),
            "tp": size(1, 2),
            "zero": draw(st.integers(0, 3)),
        }
        config["num_layers"] = size(2, 3, 6)
    # The gradient of a key's bias is zero but for rounding, of which Lion would take the sign.
    optimizer = size(*OPTIMIZERS)
    family = size("toy", "toy", "llama", "gpt" if optimizer != "lion" else "toy")
    return Case(family, config, plan, optimizer, torch.float64, rows=1)


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(sharded())
@hypothesis.settings(max_examples=max(EXAMPLES // 2, 1))
def test_any_optimizer_under_any_plan(case: Case) -> None:
    train = case.train()
    assert_same_run(run(train, case), run_eagerly(train, case), tolerance(case.dtype))


AXES = {
    "table": "vocab embed",
    "blocks": {
        "norm": "layers embed",
        "wqkv": "layers embed heads qkv head_dim",
        "wo": "layers heads head_dim embed",
        "bias": "layers mlp",
    },
    "gain": "",
}
SIZES = {"vocab": 8, "embed": 8, "layers": 4, "heads": 2, "qkv": 3, "head_dim": 4, "mlp": 8}
# Which mesh axes each logical dim lies on: as data and tensor parallelism, ZeRO and stages have it.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"heads": "x", "mlp": "x", "vocab": "x"},
    "zero over tp": {"heads": "x", "mlp": ("x", "y"), "vocab": "x", "embed": "y"},
    "pp and tp": {"layers": "x", "heads": "y", "mlp": "y", "embed": None},
}


def drawn(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def leaf(names: str) -> torch.Tensor:
        shape = [SIZES[name] for name in names.split()]
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return pfx.tree.map(leaf, AXES)


def specs_of(layout: dict[str, Any]) -> Any:
    return pfx.tree.map(lambda names: P(*map(layout.get, names.split())), AXES)


def names_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {name: layout.get(name) for name in SIZES}


def assert_updates_alike(optimizer: str, specs: Any, steps: int, **options: Any) -> None:
    """Compare `update`, compiled for parameters and gradients with specs, with plain torch."""
    transform = optimizer_of(optimizer, torch.float64, AXES)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    mesh = pfx.make_mesh(x=2, y=2)
    ins, outs = (specs, None, specs), (specs, P())
    jitted = pfx.jit(step, mesh=mesh, in_specs=ins, out_specs=outs, donate=(0, 1), **options)
    expected = drawn(0), transform.init(drawn(0))
    found = pfx.jit(lambda *a: a, mesh=mesh, out_specs=(specs, P()))(*expected)
    for k in range(steps):
        expected = step(*expected, drawn(k + 1))
        found = jitted(*found, drawn(k + 1))
    assert_close(pfx.device_get(found), expected, 1e-10, f"{optimizer}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps(optimizer: str, layout: str) -> None:
    assert_updates_alike(optimizer, specs_of(LAYOUTS[layout]), 20, names=names_of(LAYOUTS[layout]))


@st.composite
def specs(draw: st.DrawFn) -> Any:
    """For each parameter, which dims lie over "x" and "y", in any order, one dim over both or none."""

    def spec(names: str) -> P:
        sizes = [SIZES[name] for name in names.split()]
        entries: list[tuple[str, ...]] = [() for _ in sizes]
        for axis in draw(st.permutations(["x", "y"])):
            dim = draw(st.sampled_from([None, *range(len(sizes))]))
            if dim is not None and sizes[dim] % 2 ** (len(entries[dim]) + 1) == 0:
                entries[dim] = (*entries[dim], axis)
        return P(*entries)

    return pfx.tree.map(spec, AXES)


@hypothesis.given(st.sampled_from(OPTIMIZERS), specs())
@hypothesis.settings(max_examples=EXAMPLES)
def test_any_optimizer_in_any_layout(optimizer: str, specs: Any) -> None:
    assert_updates_alike(optimizer, specs, 2)


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon"])
def test_every_copy_of_a_value_has_the_same_bits(optimizer: str) -> None:
    """Every device computes its own copy, and those that the layouts call equal are compared."""
    assert_updates_alike(optimizer, specs_of(LAYOUTS["zero over tp"]), 2, check=True)


@pytest.mark.parametrize("zero", [1, 3])
def test_decay_by_role_under_zero(zero: int) -> None:
    """B54 [open_clip PR #358, verl#5070 (PR #7215), pytorch#101343]: shards know no ndim."""
    axes = {"W": "embed mlp", "b": "mlp", "norm": "embed"}
    optimizer = optim.adamw(0.1, weight_decay=0.5, mask=optim.decay_mask(axes))
    train = pfx.make_train_step(
        lambda params, batch, key: (0 * sum(p.sum() for p in params.values()) * batch.sum(),
                                    torch.ones(()), {}),
        optimizer,
        pfx.Plan(dp=2, zero=zero),
        init=lambda key: {"W": torch.ones(2, 2), "b": torch.ones(2), "norm": torch.ones(2)},
        axes=axes,
    )  # fmt: skip
    state, _ = train.step(train.init(pfx.random.key(0)), torch.ones(2))
    found = pfx.device_get(state.params)
    torch.testing.assert_close(found["W"], torch.full((2, 2), 0.95))
    assert torch.equal(found["b"], torch.ones(2)) and torch.equal(found["norm"], torch.ones(2))


@pytest.mark.parametrize("changed", [None, 0.5])
def test_a_resumed_run_does_not_decay_a_rate_twice(changed: float | None) -> None:
    """B58 [nanotron#233, PR #243, PR #245]: 0.484295 follows 0.5; a new base rate is followed."""
    cosine = lambda base: lambda count: base * (1 + torch.cos(count.double() / 100 * torch.pi)) / 2
    params = {"w": torch.zeros(1)}
    before, after = optim.sgd(cosine(1.0)), optim.sgd(cosine(changed or 1.0))
    state = before.init(params)
    for _ in range(51):
        _, state = before.update(params, state, params)
    assert optim.learning_rate(state).item() == pytest.approx(0.5)
    saved = pfx.tree.map(torch.clone, state)
    _, state = after.update(params, saved, params)
    assert optim.learning_rate(state).item() == pytest.approx(0.484295 * (changed or 1), abs=1e-6)


@pytest.mark.parametrize(
    ("spec", "names", "expected"),
    [
        (P("x"), {"layers": "x"}, []),
        (P(None, "x"), {}, [("all_gather", 4 * 64 * 256 * 4)]),  # as ZeRO splits it
        (P(None, None, "x"), {"mlp": "x"}, [("all_reduce", 4 * 64 * 64 * 4)] * 5),
    ],
    ids=["stages", "short side", "long side"],
)
def test_muon_does_not_gather_a_matrix_in_every_iteration(
    spec: P, names: dict[str, Any], expected: list[Any]
) -> None:
    transform = optim.scale_by_muon(axes={"w": "layers embed mlp"})
    jitted = pfx.jit(
        transform.update,
        mesh=pfx.make_mesh(x=2, kind="abstract"),
        in_specs=({"w": spec}, optim.ScaleByMuonState({"w": spec})),
        names={"layers": None, "embed": None, "mlp": None, **names},
    )
    w = {"w": pfx.ShapeDtype((4, 64, 256))}
    sent = jitted.lower(w, optim.ScaleByMuonState(w)).collectives()
    assert [(c.op, c.bytes) for c in sent if c.bytes > 100] == expected
