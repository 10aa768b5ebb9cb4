"""Optimizers by name: every one that `pfx.optim` has can be asked for, and takes a step."""

from __future__ import annotations

import pytest
import torch

import pfx
from models import gpt
from pfx import optim
from pfx.recipe import Model, Optimizer
from pfx.recipe.build import make_optimizer, model_functions, optimizers, schedule_of
from pfx.recipe.overrides import ConfigError

SIZES = gpt.Config(num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=16, max_seq_len=8)


def test_the_table_holds_the_optimizers_and_nothing_else():
    assert {"adamw", "adam", "sgd", "lion", "lamb", "adafactor", "muon"} <= set(optimizers())


@pytest.mark.parametrize("name", optimizers())
def test_every_optimizer_takes_a_step(name: str):
    axes = gpt.axes(SIZES)
    optimizer = make_optimizer(Optimizer(name=name, lr=0.01), 10, axes)
    params = gpt.init(SIZES, pfx.random.key(0))
    grads = pfx.tree.map(torch.ones_like, params)
    loss, weight = torch.tensor(1.0), torch.tensor(1.0)
    updates, state = optim.update_with(
        optimizer, grads, optimizer.init(params), params, loss=loss, weight=weight
    )
    after = optim.apply_updates(params, updates)
    moved = [not torch.equal(a, b) for a, b in zip(
        pfx.tree.leaves(after), pfx.tree.leaves(params), strict=True)]  # fmt: skip
    assert all(moved) and all(torch.isfinite(leaf).all() for leaf in pfx.tree.leaves(after))
    assert float(optim.learning_rate(state)) == pytest.approx(0.01)


@pytest.mark.parametrize("guard", [{"skip_spikes": 5.0}, {"skip_nonfinite": True}])
def test_a_guard_is_around_everything(guard: dict):
    optimizer = make_optimizer(Optimizer(**guard), 10, gpt.axes(SIZES))
    params = gpt.init(SIZES, pfx.random.key(0))
    grads = pfx.tree.map(lambda p: torch.full_like(p, torch.nan), params)
    updates, state = optim.update_with(
        optimizer, grads, optimizer.init(params), params, loss=torch.tensor(1.0)
    )
    assert int(optim.skipped(state)) == 1
    same = zip(
        pfx.tree.leaves(optim.apply_updates(params, updates)), pfx.tree.leaves(params), strict=True
    )
    assert all(torch.equal(a, b) for a, b in same)


def test_weights_decay_where_they_have_two_dims():
    make = lambda decay: make_optimizer(
        Optimizer(name="adamw", lr=0.1, weight_decay=decay), 10, gpt.axes(SIZES)
    )
    params = gpt.init(SIZES, pfx.random.key(0))
    grads = pfx.tree.map(torch.ones_like, params)
    with_decay, without = (
        optim.update_with(o, grads, o.init(params), params, loss=torch.tensor(1.0))[0]
        for o in (make(0.5), make(0.0))
    )
    assert not torch.equal(with_decay["blocks"]["w_up"], without["blocks"]["w_up"])
    assert torch.equal(with_decay["blocks"]["b_up"], without["blocks"]["b_up"])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_schedules_end_with_the_run(name: str):
    settings = Optimizer(lr=1.0, schedule=name, warmup_steps=4, min_lr=0.25)
    rates = [float(schedule_of(settings, 40)(count)) for count in range(40)]
    assert rates[0] == 0.25 and max(rates) == 1.0
    assert rates[-1] == (1.0 if name == "constant" else 0.25)
    assert float(schedule_of(Optimizer(lr=1.0, total_steps=10), 40)(20)) == 0.0


def test_an_optimizer_of_ones_own():
    def mine(schedule, *, power: float):
        return optim.sgd(lambda count: schedule(count) * power)

    globals()["mine"] = mine
    name = f"{__name__}:mine"
    with pytest.raises(ConfigError, match=r"optimizer\.options\.pover: no such option"):
        make_optimizer(Optimizer(name=name, options={"pover": 2.0}), 10, {"w": "embed"})


def test_a_model_needs_its_functions_and_its_own_config():
    assert model_functions(Model(module="models.gpt", config=SIZES)).vocab_size == 16
    with pytest.raises(ConfigError, match="has no init, apply, axes, loss_fn, Config"):
        model_functions(Model(module="json", config=SIZES))
    with pytest.raises(ConfigError, match=r"fix: config=models\.llama\.Config"):
        model_functions(Model(module="models.llama", config=SIZES))
