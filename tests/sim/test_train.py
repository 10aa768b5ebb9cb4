"""What a compiled training step keeps, returns and refuses, beyond the numbers it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfx
from pfx import P
from pfx.errors import ShardingError
from pfx.spec import layout_of
from tests.common import Case, assert_close

CASE = Case("llama", {"num_layers": 1}, {"dp": 2, "tp": 2, "zero": 1}, "adamw")


def test_a_state_is_drawn_the_same_on_every_mesh() -> None:
    key = pfx.random.key(3)
    spread = CASE.train().init(key)
    alone = CASE.train().on_one_device().init(key)
    leaves = zip(pfx.tree.leaves(spread), pfx.tree.leaves(alone), strict=True)
    assert all(torch.equal(pfx.device_get(a), pfx.device_get(b)) for a, b in leaves)


def test_a_state_lies_where_the_plan_says_before_and_after_a_step() -> None:
    train = CASE.train()
    specs = pfx.tree.leaves(train.state_specs, lambda node: isinstance(node, P))
    state = train.init(pfx.random.key(0))
    for _ in range(2):
        for array, spec in zip(pfx.tree.leaves(state), specs, strict=True):
            assert array.layout == layout_of(spec, array.shape, train.mesh)
        state, _ = train.step(state, CASE.batch(0))
    assert int(state.step.item()) == 2


def test_given_parameters_become_a_state() -> None:
    train = CASE.train()
    params = CASE.init(pfx.random.key(5))
    state = train.state_of(params, pfx.random.key(0))
    assert_close(pfx.device_get(state.params), params, 0.0, "params")
    assert int(state.step.item()) == 0


def test_what_device_get_returned_outlives_the_donated_state() -> None:
    """A step writes over the state it is given; not over what was read from it before."""
    train = CASE.train()
    state = train.init(pfx.random.key(0))
    read = pfx.device_get(state)
    kept = pfx.tree.map(torch.clone, read)
    train.step(state, CASE.batch(0))
    pairs = zip(pfx.tree.leaves(read), pfx.tree.leaves(kept), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ShardingError, match="donated"):
        train.step(state, CASE.batch(0))


def test_metrics_of_the_loss_are_summed_over_microbatches_and_devices() -> None:
    def loss(params: Any, batch: torch.Tensor, key: Any) -> tuple[Any, Any, Any]:
        losses = (batch @ params["w"]).square()
        weight = torch.tensor(float(losses.numel()))
        return losses.sum(), weight, {"positive": (batch > 0).sum()}

    plan = pfx.Plan(dp=2, microbatches=2)
    train = pfx.make_train_step(
        loss,
        pfx.optim.sgd(0.1),
        plan,
        init=lambda key: {"w": torch.ones(3)},
        axes={"w": "embed"},
    )
    batch = torch.arange(24.0).reshape(8, 3) - 7
    _, metrics = train.step(train.init(pfx.random.key(0)), batch)
    assert int(metrics["positive"].item()) == int((batch > 0).sum())
    assert float(metrics["weight"]) == 8.0
    torch.testing.assert_close(float(metrics["loss"]), float(batch.sum(1).square().mean()))
    assert metrics["lr"].item() == pytest.approx(0.1)


def test_a_step_lowered_from_shapes_is_the_one_that_runs() -> None:
    """What the specs say is compiled once, however the arguments lie; what they leave open is not."""
    mesh = pfx.make_mesh(dp=2)
    double = pfx.jit(lambda x, y: (x * 2, y), mesh=mesh, in_specs=(P("dp"), None))
    shape = pfx.ShapeDtype((4,))
    x, split = torch.ones(4), pfx.device_put(torch.ones(4), mesh, P("dp"))
    program = double.lower(shape, shape)
    for one in (x, split, pfx.device_put(x, mesh)):
        assert double.lower(one, x) is program
        assert torch.equal(pfx.device_get(double(one, x)[0]), 2 * x)
    assert double.lower(x, split) is not program
    assert double.lower(split, split) is double.lower(x, split)
