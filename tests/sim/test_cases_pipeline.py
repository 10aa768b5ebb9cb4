"""Pipelines that other systems got wrong, each a small input with its right answer.

The report that a case restates is named in brackets; the oracle is plain torch on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

import pfx
from pfx import P
from pfx.mesh import Deal, Mesh, make_mesh
from pfx.schedules import build
from tests.sim.pipelines import VIRTUAL, stages_of

F64 = torch.float64


def mesh_of(schedule: str, pp: int, virtual: int = 1, sizes: tuple[int, ...] = ()) -> Mesh:
    """A mesh whose stages are where the schedule has them."""
    place = build(schedule, stages=pp, microbatches=1, virtual=virtual).place
    return make_mesh("simulated", pp=pp, deals={"pp": Deal(place, sizes)})


def accumulated(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], Any]:
    """The sums over microbatches (dim 0 of `xs`) of the gradient and of the loss."""

    def fn(params: Any, xs: Any) -> Any:
        def add(total: Any, x: Any) -> tuple[Any, None]:
            return pfx.tree.map(torch.add, total, torch.func.grad_and_value(loss)(params, x)), None

        zeros = pfx.tree.map(torch.zeros_like, params), torch.zeros((), dtype=F64)
        return pfx.scan(add, zeros, xs)[0]

    return fn


class Params(NamedTuple):
    """A stack of layers, and what the first or the last stage uses."""

    layers: Any
    ends: Any


def pipelined(
    loss: Callable[[Any, Any], torch.Tensor], mesh: Mesh, schedule: str, **options: Any
) -> pfx.api.Jitted:
    """The sums under a pipeline."""
    specs = (Params(P("pp"), P()), P())
    return pfx.jit(
        accumulated(loss), mesh=mesh, in_specs=specs, schedule=schedule, check=True, **options
    )


def unpipelined(loss: Callable[[Any, Any], torch.Tensor], params: Any, xs: torch.Tensor) -> Any:
    """The same by torch.autograd, all microbatches at once."""
    leaves, structure = pfx.tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    total = sum(loss(pfx.tree.unflatten(structure, leaves), x) for x in xs)
    grads = torch.autograd.grad(total, leaves)
    return pfx.tree.unflatten(structure, list(grads)), total.detach()


def assert_equal(found: Any, expected: Any) -> None:
    """Assert that two trees of tensors agree to 1e-12."""
    for got, want in zip(
        pfx.tree.leaves(pfx.device_get(found)), pfx.tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def chain_loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    """A chain of tanh layers between a matrix that is used at both ends."""
    out, _ = pfx.scan(lambda x, w: (torch.tanh(x @ w), None), x @ params.ends, params.layers)
    return ((out @ params.ends.T) ** 2).sum()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_b59_fewer_microbatches_than_stages(schedule: str, microbatches: int) -> None:
    """[pytorch/torchtitan#775, pytorch/pytorch PR #144702] hung, then was refused."""
    virtual = VIRTUAL[schedule][-1] if schedule != "interleaved" else 2
    mesh = mesh_of(schedule, 4, virtual)
    draw = torch.Generator().manual_seed(0)
    params = Params(
        torch.randn(4 * virtual, 3, 3, generator=draw, dtype=F64),
        torch.randn(3, 3, generator=draw, dtype=F64),
    )
    xs = torch.randn(microbatches, 2, 3, generator=draw, dtype=F64)
    assert_equal(
        pipelined(chain_loss, mesh, schedule)(params, xs), unpipelined(chain_loss, params, xs)
    )


B61: Mapping[str, tuple[int, int, int, list[int]]] = {
    "30 over 4": (30, 4, 1, [8, 8, 7, 7]),
    "10 over 3": (10, 3, 1, [4, 3, 3]),
    "7 over 2": (7, 2, 1, [4, 3]),
    "3 over 4": (3, 4, 1, [1, 1, 1, 0]),
    "6 over 2, twice": (6, 2, 2, [2, 2, 1, 1]),
}


@pytest.mark.parametrize("name", B61)
def test_b61_no_layer_is_dropped(name: str) -> None:
    """[NVIDIA/Megatron-LM#1304, pytorch/torchtitan PR #963, ml-explore/mlx-lm PR #1816]

    A layer doubles what comes in and adds its own number: its place in the result is a binary digit.
    """
    layers, pp, virtual, expected = B61[name]
    schedule = "1f1b" if virtual == 1 else "interleaved"

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        out, _ = pfx.scan(lambda c, w: (2 * c + w, None), x * params.ends, params.layers)
        return out

    fn = pipelined(loss, mesh_of(schedule, pp, virtual), schedule)
    digits = torch.tensor([float(i % 3 == 0) for i in range(layers)], dtype=F64)
    number = sum(2.0 ** (layers - 1 - i) for i in range(layers) if i % 3 == 0)
    params = Params(digits, torch.tensor(1.0, dtype=F64))
    xs = torch.ones(2, dtype=F64)
    stages = stages_of(fn.lower(params, xs))
    assert [stage.stop - stage.start for stage in stages] == expected
    assert sum(expected) == layers
    bounds = [0, *(stage.stop for stage in stages)]
    assert [stage.start for stage in stages] == bounds[:-1] and bounds[-1] == layers
    grads, total = pfx.device_get(fn(params, xs))
    assert total == 2 * (2.0**layers + number)
    assert grads.layers.tolist() == [2 * 2.0 ** (layers - 1 - i) for i in range(layers)]
    assert grads.ends == 2 * 2.0**layers


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_b62_both_ends_of_a_tied_table_move_together(schedule: str, microbatches: int) -> None:
    """[uw-syfi/piper#13, NVIDIA/Megatron-LM#299] each end's copy took its own half of the gradient.

    The lookup's gradient is [1, 0], the head's [0, 2], through layers that are 1 and stay so. In the
    V shape one device has both ends.
    """
    virtual = VIRTUAL[schedule][-1]
    mesh = mesh_of(schedule, 2, virtual)

    def loss(params: Params, share: torch.Tensor) -> torch.Tensor:
        table = params.ends
        x, _ = pfx.scan(lambda x, w: (x * w, None), share * table[0], params.layers)
        head = torch.tensor([[0.0], [2.0]], dtype=F64)
        return x.sum() + share * (table * head).sum()

    def step(params: Params, xs: torch.Tensor) -> tuple[Params, torch.Tensor]:
        grads, total = accumulated(loss)(params, xs)
        return Params(params.layers, params.ends - 0.1 * grads.ends), total

    specs = Params(P("pp"), P())
    fn = pfx.jit(
        step,
        mesh=mesh,
        in_specs=(specs, P()),
        out_specs=(specs, P()),
        schedule=schedule,
        check=True,
    )
    params: Any = Params(torch.ones(2 * virtual, 1, dtype=F64), torch.ones(2, 1, dtype=F64))
    xs = torch.full((microbatches,), 1 / microbatches, dtype=F64)
    program = fn.lower(params, xs)
    reductions = [c.count for c in program.collectives() if c.op == "all_reduce" and c.shape]
    assert reductions == [1] and len(stages_of(program)) == 2 * virtual
    expected = torch.ones(2, 1, dtype=F64)
    for _ in range(3):
        params, _ = fn(params, xs)
        expected = expected - 0.1 * torch.tensor([[1.0], [2.0]], dtype=F64)
        for shard in params.ends.shards:
            torch.testing.assert_close(shard.data, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        pfx.device_get(params.ends), torch.tensor([[0.7], [0.4]], dtype=F64), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_b64_a_token_mean_is_divided_once(pp: int, microbatches: int) -> None:
    """[pytorch/torchtitan#2972, deepspeedai/DeepSpeed#7773, areal-project/AReaL PR #1273]

    Four tokens with gradients 1, 2, 3 and 6; a weight at the first stage and one in each layer.
    """

    def loss_fn(params: Params, batch: torch.Tensor, key: torch.Tensor) -> Any:
        start = params.ends * torch.ones_like(batch)
        x, _ = pfx.scan(lambda x, w: (x + w, None), start, params.layers)
        return (x * batch).sum(), torch.ones_like(batch).sum(), {}

    plan = pfx.Plan(pp=pp, microbatches=microbatches)
    train = pfx.make_train_step(
        loss_fn, pfx.optim.sgd(1.0), plan,
        init=lambda key: Params(torch.zeros(2, dtype=F64), torch.zeros((), dtype=F64)),
        axes=Params("layers", ""), check=True,
    )  # fmt: skip
    tokens = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=F64)
    state, metrics = train.step(train.init(pfx.random.key(0)), tokens)
    params = pfx.device_get(state.params)
    assert float(params.ends) == -3.0
    assert params.layers.tolist() == [-3.0, -3.0]
    assert float(pfx.device_get(metrics["grad_norm"])) == math.sqrt(27.0)
    assert float(pfx.device_get(metrics["weight"])) == 4.0


SPLIT = ["1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]  # the first does not
X = torch.tensor([[1.1, -0.7]], dtype=F64)
W = torch.tensor([[0.4, -0.2], [0.7, 0.3]], dtype=F64)
DW = torch.tensor([[0.17, 1.05], [-0.57, -1.13]], dtype=F64)
DX = torch.tensor([[-0.12, 0.44]], dtype=F64)


class TestAWeightUsedTwice:
    """B65 [pytorch/pytorch#180952, NVIDIA/TransformerEngine#3437]: sum(x @ w @ w), backward split."""

    @pytest.mark.parametrize("schedule", SPLIT)
    def test_in_one_layer(self, schedule: str) -> None:
        """Whichever stage the layer is on; the other layers are the identity."""
        stages = 2 * VIRTUAL[schedule][-1]
        fn = pipelined(self.twice, mesh_of(schedule, 2, VIRTUAL[schedule][-1]), schedule)
        for place in range(stages):
            layers = torch.eye(2, dtype=F64).repeat(stages, 1, 1)
            layers[place] = W
            grads, total = pfx.device_get(fn(Params(layers, X), torch.ones(1, 1, 1, dtype=F64)))
            torch.testing.assert_close(grads.layers[place], DW, rtol=0, atol=1e-15)
            torch.testing.assert_close(grads.ends, DX, rtol=0, atol=1e-15)
            torch.testing.assert_close(total, (X @ W @ W).sum(), rtol=0, atol=1e-15)

    @staticmethod
    def twice(params: Params, one: torch.Tensor) -> torch.Tensor:
        x, _ = pfx.scan(lambda x, w: (x @ w @ w, None), one * params.ends, params.layers)
        return x.sum()

    @pytest.mark.parametrize("schedule", SPLIT)
    def test_by_two_stages(self, schedule: str) -> None:
        """Two layers use the one weight; their number is what is split."""

        def loss(params: Params, one: torch.Tensor) -> torch.Tensor:
            x, w = params.ends
            layer = lambda x, on: (torch.where(on > 0, x @ w, x), None)
            return pfx.scan(layer, one * x, params.layers)[0].sum()

        stages = 2 * VIRTUAL[schedule][-1]
        fn = pipelined(loss, mesh_of(schedule, 2, VIRTUAL[schedule][-1]), schedule)
        on = torch.zeros(stages, dtype=F64)
        on[0] = on[-1] = 1.0
        grads, _ = pfx.device_get(fn(Params(on, (X, W)), torch.ones(1, 1, 1, dtype=F64)))
        torch.testing.assert_close(grads.ends[1], DW, rtol=0, atol=1e-15)
        torch.testing.assert_close(grads.ends[0], DX, rtol=0, atol=1e-15)
