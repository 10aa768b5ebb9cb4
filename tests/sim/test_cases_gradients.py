"""Gradients, norms and losses that other systems got wrong, each a small input with its right answer.

The report that a case restates is named in brackets; the oracle is plain torch on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P
from pfx.errors import ShardingError

TWO = pfx.make_mesh(x=2)
FOUR = pfx.make_mesh(x=4)
INF = math.inf


def run(fn: Callable[..., Any], *args: Any, specs: tuple[Any, ...], mesh: pfx.Mesh = TWO) -> Any:
    """Run on a mesh, every copy computed and compared; the results as global tensors."""
    return pfx.device_get(pfx.jit(fn, mesh=mesh, in_specs=specs, check=True)(*args))


class TestScalarParameter:
    """B25 [pytorch/pytorch PR #132934, issue #130810]: a parameter without dims under ZeRO-3."""

    def test_it_stays_whole_and_learns(self) -> None:
        params = {"t": torch.tensor(0.5), "w": torch.ones(4)}
        train = pfx.make_train_step(
            lambda params, batch, key: (
                params["t"] + params["w"].sum() + 0 * batch.sum(),
                torch.ones(()),
                {},
            ),
            pfx.optim.sgd(0.1),
            pfx.Plan(dp=2, zero=3),
            init=lambda key: pfx.tree.map(torch.clone, params),
            axes={"t": "", "w": "embed"},
            check=True,
        )
        state, _ = train.step(train.state_of(params, pfx.random.key(0)), torch.zeros(2))
        assert state.params["t"].shape == () and state.params["t"].spec == P()
        assert state.params["w"].spec == P("dp")
        after = pfx.device_get(state.params)
        assert float(after["t"]) == pytest.approx(0.4)
        assert after["w"].tolist() == pytest.approx([0.9] * 4)

    def test_a_spec_for_its_missing_dim_is_an_error_that_names_it(self) -> None:
        with pytest.raises(ShardingError, match=r"\[?'?t'?\]?.*fewer dims than its spec"):
            pfx.device_put({"t": torch.tensor(0.5)}, TWO, {"t": P("x")})


class TestEmptyLastShard:
    """B27 [pytorch/pytorch#108869, #102821]: six elements over four ranks."""

    def test_it_is_refused_with_the_arithmetic(self) -> None:
        with pytest.raises(ShardingError, match=r"dim 0 \(size 6\).*\n?.*6 % 4 = 2"):
            pfx.device_put(torch.arange(6), FOUR, P("x"))

    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_other_counts_hold_and_give_it_back(self, size: int) -> None:
        array = pfx.device_put(torch.arange(6), pfx.make_mesh(x=size), P("x"))
        assert [tuple(s.data.shape) for s in array.shards] == [(6 // size,)] * size
        assert torch.equal(pfx.device_get(array), torch.arange(6))


class TestGradientOfAReducedLoss:
    """B29 [jax-ml/jax#3970, PR #1633]: only the local gradient, or one scaled by the device count."""

    def test_the_reported_case(self) -> None:
        def loss(w: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
            return ((w * w + 1) * data).sum()

        gradient = torch.func.grad_and_value(loss)
        args = torch.tensor(1.0), torch.tensor([0.0, 1.0])
        got, value = run(gradient, *args, specs=(P(), P("x")))
        assert (float(value), float(got)) == (2, 2)


class TestLeavingAndReentering:
    """B31 [pytorch/pytorch#172932, PR #173454, PR #115967, pytorch/torchtitan PR #2532, #2217]."""

    @pytest.mark.parametrize("detour", [False, True])
    @pytest.mark.parametrize("mesh", [TWO, pfx.make_mesh(x=2, y=2)])
    def test_a_partial_sum_with_a_detour(self, mesh: pfx.Mesh, *, detour: bool) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            y = (3 * x).sum()
            y = pfx.constrain(y, P()) if detour else y
            return y * y

        gradient, value = run(
            torch.func.grad_and_value(loss), torch.tensor([1.0, 2.0]), specs=(P("x"),), mesh=mesh
        )
        assert float(value) == 81
        assert gradient.tolist() == [54, 54]

    def test_a_split_value_gathered_and_split_again(self) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            y = pfx.constrain(pfx.constrain(3 * x, P()), P("x"))
            return y.sum().square()

        assert run(torch.func.grad(loss), torch.tensor([1.0, 2.0]), specs=(P("x"),)).tolist() == [
            54,
            54,
        ]

    def test_a_replicated_weight_gets_the_sum_over_ranks(self) -> None:
        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (w * x).sum()

        for mesh in (TWO, pfx.make_mesh(x=2, y=2)):
            got = run(
                torch.func.grad(loss), torch.tensor(2.0), torch.arange(4.0), specs=(P(), P("x")),
                mesh=mesh,
            )  # fmt: skip
            assert float(got) == 6


class TestNormOfReplicated:
    """B33 [ROCm/TransformerEngine PR #715, NVIDIA-NeMo/RL PR #3788, NVIDIA/Megatron-LM#7452]."""

    def test_each_element_counts_once(self) -> None:
        grads = {"split": torch.tensor([3.0, 0.0]), "whole": torch.tensor([4.0])}
        specs = ({"split": P("x"), "whole": P()},)
        assert float(run(pfx.optim.global_norm, grads, specs=specs)) == 5
        clip = pfx.optim.clip_by_global_norm(1.0)

        def clipped(grads: Any) -> Any:
            return clip.update(grads, clip.init(grads))[0]

        got = run(clipped, grads, specs=specs)
        assert got["split"].tolist() == pytest.approx([0.6, 0])
        assert got["whole"].tolist() == pytest.approx([0.8])

    def test_gradients_that_are_still_owed(self) -> None:
        """The norm of a gradient that is a partial sum over the batch is that of the sum."""

        def norm(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return pfx.optim.global_norm(torch.func.grad(lambda w: (x @ w).sum())(w))

        x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
        assert float(run(norm, torch.zeros(2), x, specs=(P(), P("x")))) == 5


class TestNormsOfAnyOrder:
    """B35 [pytorch/torchtitan PR #649, issue #596]: a norm put together from powers of norms."""

    @pytest.mark.parametrize(
        ("order", "want"),
        [
            (INF, 7), (-INF, 3), (1, 14), (2, math.sqrt(74)), (3, (27 + 343 + 64) ** (1 / 3)),
            (0.5, (math.sqrt(3) + math.sqrt(7) + 2) ** 2), (0, 3),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("spec", [P("x"), P()])
    def test_the_reported_case(self, order: float, want: float, spec: P) -> None:
        def norm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return torch.linalg.vector_norm(torch.cat([first, second]), order)

        args = torch.tensor([3.0, -7.0]), torch.tensor([4.0])
        assert float(run(norm, *args, specs=(spec, P()))) == pytest.approx(want)
        alone = run(
            lambda x: torch.linalg.vector_norm(x, order),
            torch.tensor([3.0, -7.0, 4.0, 0.0][:2]),
            specs=(spec,),
        )
        assert float(alone) == pytest.approx(float(torch.linalg.vector_norm(args[0], order)))


def masked_loss(params: Any, batch: Any, key: Any) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The loss contract: the sum of token losses, the number of tokens."""
    logits = batch["logits"] * params["w"]
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum(), {}


def given_loss(params: Any, batch: Any, key: Any) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Token losses given outright, times a parameter of one."""
    return (params["w"] * batch["loss"] * batch["mask"]).sum(), batch["mask"].sum(), {}


def trainer(loss_fn: Any, plan: pfx.Plan, optimizer: Any = None) -> Any:
    return pfx.make_train_step(
        loss_fn, optimizer or pfx.optim.sgd(1.0), plan,
        init=lambda key: {"w": torch.ones(1)}, axes={"w": "embed"}, check=True,
    )  # fmt: skip


PLANS = [
    pfx.Plan(), pfx.Plan(microbatches=2), pfx.Plan(dp=2), pfx.Plan(dp=2, zero=1),
    pfx.Plan(dp=2, zero=3),
]  # fmt: skip


class TestMeansOfUnequalMicrobatches:
    """B37 [huggingface/transformers PR #34191, #35438, #37766, ml-explore/mlx-lm PR #1413]."""

    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_the_loss_is_the_mean_over_tokens(self, plan: pfx.Plan) -> None:
        batch = {
            "loss": torch.tensor([[4.0, 9.0, 9.0], [1.0, 1.0, 1.0]]),
            "mask": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
        }
        train = trainer(given_loss, plan)
        state, metrics = train.step(train.init(pfx.random.key(0)), batch)
        assert float(metrics["loss"]) == pytest.approx(1.75)
        assert float(metrics["weight"]) == 4
        assert pfx.device_get(state.params["w"]).tolist() == pytest.approx([1 - 1.75])


class TestEveryLabelMasked:
    """B39 [NVIDIA/Megatron-LM#1764, allenai/OLMo-core PR #657, NVIDIA-NeMo/Automodel#3796,
    huggingface/trl#6668]: a rank, or a batch, without a supervised token.
    """

    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_a_rank_without_labels(self, plan: pfx.Plan) -> None:
        # Two tokens with losses 1 and 3: log(1 + exp(d)) with d the difference of two logits.
        gaps = torch.tensor([math.log(math.e - 1), math.log(math.e**3 - 1)])
        logits = torch.zeros(2, 2, 2)
        logits[1, :, 1] = gaps
        batch = {"logits": logits, "labels": torch.tensor([[-100, -100], [0, 0]])}
        train = trainer(masked_loss, plan)
        state, metrics = train.step(train.init(pfx.random.key(0)), batch)
        assert float(metrics["loss"]) == pytest.approx(2.0)
        assert pfx.device_get(state.params["w"]).isfinite().all()

    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_a_batch_without_labels(self, plan: pfx.Plan) -> None:
        """Loss 0, weight 0 (which says so), exactly zero gradients: parameters stay as they are."""
        batch = {"logits": torch.randn(2, 2, 2), "labels": torch.full((2, 2), -100)}
        train = trainer(masked_loss, plan, pfx.optim.adamw(0.1, weight_decay=0.0))
        state, metrics = train.step(train.init(pfx.random.key(0)), batch)
        assert (float(metrics["loss"]), float(metrics["weight"])) == (0, 0)
        assert float(metrics["grad_norm"]) == 0
        assert pfx.device_get(state.params["w"]).tolist() == [1]
