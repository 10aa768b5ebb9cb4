"""What may pass through a pipeline: any tree as the carry, keys, integers, shared weights, stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

import pfx
from pfx import P
from pfx.compiler.program import verify
from pfx.mesh import Deal, Mesh, make_mesh
from tests.sim.pipelines import stages_of

F64 = torch.float64
LAYERS, MICROBATCHES, WIDTH = 5, 3, 3
TWO = make_mesh("simulated", pp=2, deals={"pp": Deal((0, 1))})
V = make_mesh("simulated", pp=2, dp=2, deals={"pp": Deal((0, 1, 1, 0))})


class Params(NamedTuple):
    """A stack of layers, and what every stage or either end uses."""

    layers: Any
    shared: Any


def params_of(dtype: torch.dtype = F64) -> Params:
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=F64).to(dtype)
    return Params({"w": normal(LAYERS, WIDTH, WIDTH), "b": normal(LAYERS, WIDTH)}, normal(3, 3))


def batch_of(dtype: torch.dtype = F64, microbatches: int = MICROBATCHES) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(microbatches, 2, WIDTH, generator=draw, dtype=F64).to(dtype)


def dense(x: torch.Tensor, weights: Any) -> torch.Tensor:
    return torch.tanh(x @ weights["w"] + weights["b"])


# Losses of a microbatch; each says what is odd about it.


def several_leaves(params: Params, x: torch.Tensor) -> torch.Tensor:
    """A dict with a tuple as the carry; one leaf is read only at the end."""

    def layer(carry: Any, weights: Any) -> Any:
        (x, skip), total = carry["xs"], carry["total"]
        x = dense(x, weights)
        return {"xs": (x, skip), "total": total + x.square().sum()}, None

    start = {"xs": (x @ params.shared, x), "total": x.sum()}
    carry, _ = pfx.scan(layer, start, params.layers)
    return (carry["xs"][0] * carry["xs"][1]).sum() + carry["total"]


def integers_and_bools(params: Params, x: torch.Tensor) -> torch.Tensor:
    """A counter and a mask travel along; both decide what a layer does."""

    def layer(carry: Any, weights: Any) -> Any:
        x, count, mask = carry
        x = torch.where(mask, dense(x, weights), x) * (count % 2 + 1)
        return (x, count + 1, mask ^ (x > 0)), None

    start = x @ params.shared, torch.zeros((), dtype=torch.int64), x > 0
    (x, count, mask), _ = pfx.scan(layer, start, params.layers)
    return (x * mask).sum() * count


def unread_ys(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Every layer emits something that nobody reads."""
    layer = lambda x, weights: (dense(x, weights), (x.sum(), x > 0))
    return pfx.scan(layer, x, params.layers)[0].square().sum()


def keys_and_scalars(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Dropout keys, scales and a plain index for each layer, besides its weights."""
    keys = pfx.random.split(pfx.random.key(3), LAYERS)
    scales = torch.linspace(0.5, 1.5, LAYERS, dtype=x.dtype)

    def layer(x: torch.Tensor, inputs: Any) -> Any:
        weights, key, scale, index = inputs
        kept = pfx.random.bernoulli(key, 0.7, x.shape)
        return torch.where(kept, dense(x, weights) * scale, x / (1 + index)), None

    xs = params.layers, keys, scales, torch.arange(LAYERS)
    return pfx.scan(layer, x, xs)[0].square().sum()


def keys_of_the_microbatch(params: Params, x: torch.Tensor) -> torch.Tensor:
    """A key that every stage makes from the microbatch's own row."""
    key = pfx.random.fold_in(pfx.random.key(0), (x[0, 0] * 1000).long())

    def layer(x: torch.Tensor, inputs: Any) -> Any:
        weights, layer_key = inputs
        return dense(x, weights) + pfx.random.normal(layer_key, x.shape, dtype=x.dtype), None

    keys = pfx.random.split(key, LAYERS)
    return pfx.scan(layer, x, (params.layers, keys))[0].square().sum()


def a_shared_weight(params: Params, x: torch.Tensor) -> torch.Tensor:
    """One matrix in every layer, and at both ends."""
    layer = lambda x, weights: (dense(x @ params.shared, weights), None)
    out = pfx.scan(layer, x @ params.shared, params.layers)[0]
    return (out @ params.shared).square().sum()


def rematerialized(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Nothing but the carry is kept of a layer."""
    layer = lambda x, weights: (dense(x @ params.shared, weights), None)
    return pfx.scan(layer, x, params.layers, remat="full")[0].square().sum()


def casts_of_the_stack(params: Params, x: torch.Tensor) -> torch.Tensor:
    """The stack is cast, scaled and shifted before the loop."""
    layers = pfx.tree.map(lambda w: (w.float() * 2 + 0.25).double(), params.layers)
    return pfx.scan(lambda x, w: (dense(x, w), None), x @ params.shared, layers)[0].square().sum()


def a_wide_carry(params: Params, x: torch.Tensor) -> torch.Tensor:
    """The carry is all but independent of the weights: an empty tensor is in it too."""
    layer = lambda c, weights: ((dense(c[0], weights), c[1]), None)
    (x, none), _ = pfx.scan(layer, (x, x.new_zeros(0, 2)), params.layers)
    return x.square().sum() + none.sum()


def weights_in_the_loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Weight decay: a sum over the layers, of which every stage has a share."""
    out, _ = pfx.scan(lambda x, w: (dense(x, w), None), x @ params.shared, params.layers)
    decay = params.layers["w"].square().sum() + params.shared.square().sum()
    return out.square().sum() + 0.1 * decay


def normalized_weights(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Each layer's matrix is divided by its own size, whose gradient is a sum over its rows."""
    size = params.layers["w"].square().sum((1, 2), keepdim=True).sqrt()
    layers = {**params.layers, "w": params.layers["w"] / size}
    return pfx.scan(lambda x, w: (dense(x, w), None), x, layers)[0].square().sum()


def a_loss_in_every_layer(params: Params, x: torch.Tensor) -> torch.Tensor:
    """As a balancing loss of experts: what the layers emit is added to the loss."""
    layer = lambda x, w: (dense(x, w), (x @ w["w"]).square().mean())
    out, losses = pfx.scan(layer, x @ params.shared, params.layers)
    return out.square().sum() + 0.01 * losses.sum()


def the_input_in_every_layer(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Every stage computes the first product for itself, and has a share in its gradient."""
    layer = lambda carry, w: (dense(carry, w) + x @ params.shared, None)
    return pfx.scan(layer, x, params.layers)[0].square().sum()


def stopped_gradients(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Only the residual path carries a gradient back."""
    layer = lambda x, w: (x + dense(x.detach(), w), None)
    return pfx.scan(layer, x @ params.shared, params.layers)[0].square().sum()


LOSSES = (
    several_leaves,
    integers_and_bools,
    unread_ys,
    keys_and_scalars,
    keys_of_the_microbatch,
    a_shared_weight,
    rematerialized,
    casts_of_the_stack,
    weights_in_the_loss,
    normalized_weights,
    a_loss_in_every_layer,
    the_input_in_every_layer,
    stopped_gradients,
    a_wide_carry,
)
SCHEDULES: Mapping[str, Mesh] = {"1f1b": TWO, "zb-v": V}


def accumulated(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], Any]:
    """The sums over microbatches of the gradient and of the loss."""

    def fn(params: Any, xs: Any) -> Any:
        def add(total: Any, x: Any) -> tuple[Any, None]:
            return pfx.tree.map(torch.add, total, torch.func.grad_and_value(loss)(params, x)), None

        like = pfx.tree.map(torch.zeros_like, params), torch.zeros((), dtype=xs.dtype)
        return pfx.scan(add, like, xs)[0]

    return fn


def compiled(fn: Any, schedule: str = "1f1b") -> pfx.api.Jitted:
    """A function of `Params` and a batch, its layers split into stages."""
    mesh = SCHEDULES.get(schedule, TWO)
    batch = P(None, "dp") if "dp" in mesh.shape else P()
    specs = (Params(P("pp"), P()), batch)
    return pfx.jit(fn, mesh=mesh, in_specs=specs, schedule=schedule, check=True)


def assert_pipelined(program: Any, layers: int = LAYERS) -> None:
    """Assert that a program is sound, has one pipeline with all layers, and reports nothing."""
    verify(program)
    assert sum(stage.stop - stage.start for stage in stages_of(program)) == layers
    assert not program.report


def assert_equal(found: Any, expected: Any, **tolerances: float) -> None:
    found = pfx.tree.leaves(pfx.device_get(found))
    tolerances = tolerances or {"rtol": 1e-11, "atol": 1e-12}
    for got, want in zip(found, pfx.tree.leaves(expected), strict=True):
        torch.testing.assert_close(got, want, **tolerances)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss: Any, schedule: str) -> None:
    params, xs = params_of(), batch_of()
    fn = compiled(accumulated(loss), schedule)
    assert_pipelined(fn.lower(params, xs))
    expected = [torch.func.grad_and_value(loss)(params, x) for x in xs]
    total = pfx.tree.map(lambda *terms: torch.stack(terms).sum(0), *expected)
    assert_equal(fn(params, xs), total)


def test_one_microbatch_on_four_stages() -> None:
    params, xs = params_of(), batch_of(microbatches=1)
    fn = compiled(accumulated(a_shared_weight), "zb-v")
    assert_equal(fn(params, xs), torch.func.grad_and_value(a_shared_weight)(params, xs[0]))


def test_bfloat16_parameters() -> None:
    """What travels is bfloat16 too, and the rounding is that of one device."""
    params, xs = params_of(torch.bfloat16), batch_of(torch.bfloat16)
    fn = accumulated(a_shared_weight)
    run = compiled(fn)
    program = run.lower(params, xs)
    assert {c.dtype for c in program.collectives() if c.op == "send"} == {"bf16"}
    one = pfx.jit(fn, mesh=make_mesh("simulated", pp=1))
    assert_equal(run(params, xs), pfx.device_get(one(params, xs)), rtol=0.05, atol=1e-3)


# What is done to a gradient before it is added up --------------------------------------------------


def scaled_and_cast(grads: Params) -> Any:
    return pfx.tree.map(lambda g: (g * 0.5).float(), grads)


def subtracted_and_counted(grads: Params) -> Any:
    return pfx.tree.map(lambda g: -g, grads), torch.ones((), dtype=torch.int64)


def with_their_size(grads: Params) -> Any:
    """Each leaf's own: that of all would be a number which several stages make."""
    return grads, pfx.tree.map(lambda g: g.square().sum(), grads)


def summed_over_layers(grads: Params) -> Any:
    return pfx.tree.map(lambda g: g.sum(0), grads), grads.layers["w"].sum(1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(
    "change", [scaled_and_cast, subtracted_and_counted, with_their_size, summed_over_layers]
)
def test_work_on_gradients(change: Any, schedule: str) -> None:
    def one(params: Params, x: torch.Tensor) -> Any:
        return change(torch.func.grad(several_leaves)(params, x))

    def fn(params: Params, xs: torch.Tensor) -> Any:
        zeros = pfx.tree.map(torch.zeros_like, one(params, xs[0]))
        add = lambda total, x: (pfx.tree.map(torch.add, total, one(params, x)), None)
        return pfx.scan(add, zeros, xs)[0]

    params, xs = params_of(), batch_of()
    run = compiled(fn, schedule)
    assert_pipelined(run.lower(params, xs))
    terms = (one(params, x) for x in xs)
    total = pfx.tree.map(lambda *some: torch.stack(some).sum(0), *terms)
    assert_equal(run(params, xs), total, rtol=1e-5, atol=1e-5)


# Evaluation: forward alone -------------------------------------------------------------------------


def logits_of(params: Params, xs: torch.Tensor) -> torch.Tensor:
    """The logits of every microbatch, stacked."""

    def one(carry: None, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        out, _ = pfx.scan(lambda x, w: (dense(x, w), None), x @ params.shared, params.layers)
        return None, out @ params.shared.T

    return pfx.scan(one, None, xs)[1]


def loss_and_logits(params: Params, xs: torch.Tensor) -> Any:
    """A sum, a count and a stack; the sum begins at 1."""

    def one(carry: Any, x: torch.Tensor) -> Any:
        out, _ = pfx.scan(lambda x, w: (dense(x, w), None), x, params.layers)
        total, count = carry
        return (total + out.sum(), count + (out > 0).sum()), (out, x.sum())

    return pfx.scan(one, (torch.ones((), dtype=F64), torch.zeros((), dtype=torch.int64)), xs)


@pytest.mark.parametrize("fn", [logits_of, loss_and_logits])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "forward"])
def test_evaluation(fn: Any, schedule: str) -> None:
    """Of a schedule that trains, only the forward actions are run."""
    run = compiled(fn, schedule)
    params, xs = params_of(), batch_of()
    program = run.lower(params, xs)
    assert_pipelined(program)
    assert all(list(stage.phases) == ["F"] for stage in stages_of(program))
    assert_equal(run(params, xs), fn(params, xs))
