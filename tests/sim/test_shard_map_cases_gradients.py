"""Gradients, norms and losses that others got wrong, written by hand for each device.

The report that a case restates is named in brackets; `test_cases_gradients` has the same cases annotated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, assert_close, complains, draw, mapped

TWO = pfx.make_mesh(x=2)
SQUARE = pfx.make_mesh(x=2, y=2)
INF = math.inf


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unreduced(x: torch.Tensor) -> torch.Tensor:
    """Take what each device holds for an addend."""
    return lax.pcast(lax.pcast(x, "x", to="varying"), "x", to="unreduced")


class TestGradientOfAReducedLoss:
    """B29 [jax-ml/jax#3970, PR #1633]: only the local gradient, or one scaled by the device count."""

    W, DATA = torch.tensor(1.0, dtype=torch.float64), numbers(0, 1)

    @staticmethod
    def local(w: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return ((w * w + 1) * data).sum()

    @classmethod
    def reduced(cls, w: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return lax.psum(cls.local(w, data), "x")

    @EACH_WAY
    def test_inside_the_region(self, run: Any) -> None:
        fn = mapped(pfx.value_and_grad(self.reduced), TWO, (P(), P("x")), P())
        value, gradient = run(fn, TWO, self.W, self.DATA)
        assert (float(value), float(gradient)) == (2, 2)

    @EACH_WAY
    def test_around_it(self, run: Any) -> None:
        fn = pfx.value_and_grad(mapped(self.reduced, TWO, (P(), P("x")), P()))
        value, gradient = run(fn, TWO, self.W, self.DATA)
        assert (float(value), float(gradient)) == (2, 2)

    @EACH_WAY
    def test_of_the_local_loss_it_is_the_same_and_the_value_is_not(self, run: Any) -> None:
        def inner(w: torch.Tensor, data: torch.Tensor) -> Any:
            value, gradient = pfx.value_and_grad(self.local)(w, data)
            return value[None], gradient

        value, gradient = run(
            mapped(inner, TWO, (P(), P("x")), (P("x"), P())), TWO, self.W, self.DATA
        )
        assert (value.tolist(), float(gradient)) == ([0, 2], 2)

    @EACH_WAY
    @pytest.mark.parametrize("name", ["local", "reduced"])
    def test_of_a_device_s_own_copy_it_is_to_be_summed(self, run: Any, name: str) -> None:
        def inner(w: torch.Tensor, data: torch.Tensor) -> Any:
            own = pfx.grad(getattr(self, name))(lax.pcast(w, "x", to="varying"), data)
            return own[None], lax.psum(own, "x")

        own, total = run(mapped(inner, TWO, (P(), P("x")), (P("x"), P())), TWO, self.W, self.DATA)
        assert (own.tolist(), float(total)) == ([0, 2], 2)

    @EACH_WAY
    def test_left_as_addends_it_is_summed_outside(self, run: Any) -> None:
        def inner(w: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
            return pfx.grad(self.local)(lax.pcast(w, "x", to="reduced"), data)

        total = mapped(lambda g: lax.psum(g, "x"), TWO, P(unreduced="x"), P())
        addends = mapped(inner, TWO, (P(), P("x")), P(unreduced="x"))
        assert float(run(lambda w, d: total(addends(w, d)), TWO, self.W, self.DATA)) == 2


class TestLeavingAndReentering:
    """B31 [pytorch/pytorch#172932, PR #173454, PR #115967, pytorch/torchtitan PR #2532, #2217]."""

    @staticmethod
    def sums(x: torch.Tensor) -> torch.Tensor:
        return unreduced((3 * x).sum())

    @staticmethod
    def reduce(y: torch.Tensor) -> torch.Tensor:
        return lax.psum(y, "x")

    def loss(self, detour: str) -> Any:
        """The square of a sum, whose addends stay in one region or go out and into others."""
        if detour == "none":
            y = mapped(lambda x: self.reduce(self.sums(x)), TWO, P("x"), P())
            return lambda x: y(x) ** 2
        leave = mapped(self.sums, TWO, P("x"), P(unreduced="x"))
        enter = mapped(self.reduce, TWO, P(unreduced="x"), P())
        again = mapped(lambda y: y, TWO, P(unreduced="x"), P(unreduced="x"))
        between = again if detour == "twice" else lambda y: y
        return lambda x: enter(between(leave(x))) ** 2

    @EACH_WAY
    @pytest.mark.parametrize("detour", ["none", "once", "twice"])
    def test_a_partial_sum(self, run: Any, detour: str) -> None:
        value, gradient = run(pfx.value_and_grad(self.loss(detour)), TWO, numbers(1, 2))
        assert (float(value), gradient.tolist()) == (81, [54, 54])

    @EACH_WAY
    @pytest.mark.parametrize("detour", ["none", "once", "twice"])
    def test_its_second_derivative(self, run: Any, detour: str) -> None:
        found = run(lambda x: pfx.jacrev(pfx.grad(self.loss(detour)))(x), TWO, numbers(1, 2))
        assert found.tolist() == [[18, 18], [18, 18]]

    @EACH_WAY
    def test_the_gradient_taken_inside(self, run: Any) -> None:
        inner = pfx.grad(lambda x: self.reduce(self.sums(x)) ** 2)
        assert run(mapped(inner, TWO, P("x"), P("x")), TWO, numbers(1, 2)).tolist() == [54, 54]

    def test_addends_do_not_leave_as_a_value(self) -> None:
        with complains((TypeError, ValueError), "unreduced", "'x'", "psum"):
            mapped(self.sums, TWO, P("x"), P())(numbers(1, 2))

    @EACH_WAY
    @pytest.mark.parametrize("mesh", [TWO, SQUARE], ids=str)
    @pytest.mark.parametrize("split", [P("x"), P(None)])
    def test_a_replicated_weight_gets_the_sum_over_ranks(
        self, run: Any, mesh: pfx.Mesh, split: P
    ) -> None:
        """On a mesh with an axis that the data does not use, it is counted once there."""

        def inner(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            total = lambda y: lax.psum(y, "x") if split == P("x") else y
            return total((w * x).sum())

        fn = mapped(inner, mesh, (P(), split), P())
        assert float(run(pfx.grad(fn), mesh, numbers(2)[0], numbers(0, 1, 2, 3))) == 6
        inside = mapped(pfx.grad(inner), mesh, (P(), split), P())
        assert float(run(inside, mesh, numbers(2)[0], numbers(0, 1, 2, 3))) == 6


def norm(leaves: Mapping[str, torch.Tensor], varies: Mapping[str, Any], order: float) -> Any:
    """The norm of all elements, each leaf reduced over exactly the axes that it varies on."""
    over = lambda reduce, x, name: reduce(x, varies[name]) if varies[name] else x
    if math.isinf(order):
        most = [over(lax.pmax, x.abs().amax(), name) for name, x in leaves.items()]
        return torch.stack(most).amax()
    power = (lambda x: (x != 0).to(x.dtype)) if order == 0 else (lambda x: x.abs() ** order)
    sums = [over(lax.psum, power(x).sum(), name) for name, x in leaves.items()]
    return torch.stack(sums).sum() ** (1 / order if order else 1)


class TestNormOfReplicated:
    """B33 [ROCm/TransformerEngine PR #715, NVIDIA-NeMo/RL PR #3788, NVIDIA/Megatron-LM#7452]."""

    GRADS = {"split": numbers(3, 0), "whole": numbers(4)}  # noqa: RUF012
    SPECS = {"split": P("x"), "whole": P()}  # noqa: RUF012

    @EACH_WAY
    @pytest.mark.parametrize("mesh", [TWO, SQUARE], ids=str)
    def test_each_element_counts_once(self, run: Any, mesh: pfx.Mesh) -> None:
        fn = lambda grads: norm(grads, {"split": "x", "whole": ()}, 2)
        assert float(run(mapped(fn, mesh, (self.SPECS,), P()), mesh, self.GRADS)) == 5

    @EACH_WAY
    def test_a_sum_over_all_ranks_counts_what_does_not_vary_twice(self, run: Any) -> None:
        """What others report as the norm is what the sum over devices says it is."""
        fn = lambda grads: norm(grads, {"split": "x", "whole": "x"}, 2)
        found = float(run(mapped(fn, TWO, (self.SPECS,), P()), TWO, self.GRADS))
        assert found == pytest.approx(6.4031, abs=1e-4)

    @EACH_WAY
    def test_no_sum_is_refused(self, run: Any) -> None:
        fn = lambda grads: norm(grads, {"split": (), "whole": ()}, 2)
        with complains((TypeError, ValueError), "'x'", "psum"):
            run(mapped(fn, TWO, (self.SPECS,), P()), TWO, self.GRADS)

    @EACH_WAY
    def test_of_gradients_taken_inside(self, run: Any) -> None:
        """Of a layer whose first weight is split and whose second is not: no sum but the norm's."""
        params, x = {"split": draw(4, 6), "whole": draw(4, seed=1)}, draw(6, seed=2)

        def loss(params: Any, x: torch.Tensor, total: Any) -> torch.Tensor:
            return torch.tanh(total(params["split"] @ x) + params["whole"]).sum()

        def inner(params: Any, x: torch.Tensor) -> torch.Tensor:
            grads = pfx.grad(lambda p: loss(p, x, lambda y: lax.psum(y, "x")))(params)
            return norm(grads, {"split": "x", "whole": ()}, 2)

        specs = {"split": P(None, "x"), "whole": P()}
        dense = pfx.grad(lambda p: loss(p, x, lambda y: y))(params)
        want = torch.cat([g.flatten() for g in dense.values()]).norm()
        assert_close(run(mapped(inner, TWO, (specs, P("x")), P()), TWO, params, x), want)


ORDERS = pytest.mark.parametrize(
    ("order", "want"),
    [(INF, 7), (1, 14), (2, 8.602325), (0.5, (math.sqrt(3) + math.sqrt(7) + 2) ** 2), (0, 3)],
)


class TestNormsOfAnyOrder:
    """B35 [pytorch/torchtitan PR #649, issue #596]: a norm put together from powers of norms."""

    @EACH_WAY
    @ORDERS
    def test_the_reported_case(self, run: Any, order: float, want: float) -> None:
        """Stage 0 has two elements and stage 1 one, filled up with a zero, which no norm sees."""
        fn = lambda stages: norm({"stages": stages}, {"stages": "x"}, order)
        stages = torch.stack([numbers(3, -7), numbers(4, 0)])
        found = run(mapped(fn, TWO, P("x"), P()), TWO, stages)
        assert float(found) == pytest.approx(want, rel=1e-6)

    @EACH_WAY
    @pytest.mark.parametrize("order", [INF, 1, 2, 0.5, 0])
    def test_over_two_axes(self, run: Any, order: float) -> None:
        leaves = {"whole": draw(3), "rows": draw(4, 3, seed=1), "columns": draw(3, 4, seed=2),
                  "both": draw(4, 4, seed=3), "flat": draw(8, seed=4)}  # fmt: skip
        specs = {"whole": P(), "rows": P("x"), "columns": P(None, "y"), "both": P("y", "x"),
                 "flat": P(("x", "y"))}  # fmt: skip
        varies = {"whole": (), "rows": "x", "columns": "y", "both": ("x", "y"), "flat": ("x", "y")}
        fn = mapped(lambda leaves: norm(leaves, varies, order), SQUARE, (specs,), P())
        flat = torch.cat([x.flatten() for x in leaves.values()])
        assert_close(run(fn, SQUARE, leaves), torch.linalg.vector_norm(flat, order))


def window(w: torch.Tensor, batch: Mapping[str, torch.Tensor], *, clamp: bool) -> Any:
    """Loss and gradient of the microbatches a device is given; addends meet once, at the end."""
    reduced = lax.pcast(w, "x", to="reduced")

    def losses(w: torch.Tensor, micro: Any) -> torch.Tensor:
        return (w * micro["loss"] * micro["mask"]).sum()

    def body(carry: Any, micro: Any) -> Any:
        value, gradient = pfx.value_and_grad(losses)(reduced, micro)
        now = unreduced(value), gradient, unreduced(micro["mask"].sum())
        return tuple(a + b for a, b in zip(carry, now, strict=True)), None

    zero = unreduced(torch.zeros_like(w))
    loss, gradient, weight = lax.psum(pfx.scan(body, (zero, zero, zero), batch)[0], "x")
    weight = weight.clamp(min=1) if clamp else weight
    return loss / weight, gradient / weight


class TestMeansOfUnequalMicrobatches:
    """B37 [huggingface/transformers PR #34191, #35438, #37766, ml-explore/mlx-lm PR #1413]."""

    BATCH = {  # noqa: RUF012
        "loss": torch.stack([numbers(4, 9, 9), numbers(1, 1, 1)]),
        "mask": torch.stack([numbers(1, 0, 0), numbers(1, 1, 1)]),
    }

    @EACH_WAY
    @pytest.mark.parametrize("axis", ["microbatches", "ranks"])
    def test_the_loss_is_the_mean_over_tokens(self, run: Any, axis: str) -> None:
        # (rank, microbatch, token): either each rank has one, or the second rank has none.
        batch = {name: x.reshape(2, 1, 3) for name, x in self.BATCH.items()}
        if axis == "microbatches":
            batch = {name: torch.stack([x, 0 * x]) for name, x in self.BATCH.items()}

        def inner(w: torch.Tensor, batch: Any) -> Any:
            return window(w, {name: x[0] for name, x in batch.items()}, clamp=False)

        found = run(mapped(inner, TWO, (P(), P("x")), P()), TWO, numbers(1)[0], batch)
        assert [float(x) for x in found] == [1.75, 1.75]

    @EACH_WAY
    def test_a_short_last_window_has_its_own_count(self, run: Any) -> None:
        batch = {name: x[:1].reshape(1, 1, 3).expand(2, 1, 3) for name, x in self.BATCH.items()}
        inner = lambda w, batch: window(w, {n: x[0] for n, x in batch.items()}, clamp=False)
        found = run(mapped(inner, TWO, (P(), P("x")), P()), TWO, numbers(1)[0], batch)
        assert [float(x) for x in found] == [4, 4]

    def test_it_is_reduced_once_however_many_microbatches(self) -> None:
        inner = lambda w, batch: window(w, batch, clamp=False)
        fn = mapped(inner, TWO, (P(), P(None, "x")), P())
        batch = dict.fromkeys(("loss", "mask"), pfx.ShapeDtype((5, 6), torch.float64))
        program = pfx.jit(fn, mesh=TWO).lower(pfx.ShapeDtype((), torch.float64), batch)
        moved = program.collectives()
        assert {c.op for c in moved} == {"all_reduce"}
        assert sum(c.count for c in moved) <= 3  # loss, gradient and weight, perhaps in one

    @EACH_WAY
    def test_a_mean_of_means_is_another_number(self, run: Any) -> None:
        fn = lambda loss, mask: lax.pmean((loss * mask).sum() / mask.sum(), "x")
        found = run(mapped(fn, TWO, P("x"), P()), TWO, self.BATCH["loss"], self.BATCH["mask"])
        assert float(found) == 2.5


class TestEveryLabelMasked:
    """B39 [NVIDIA/Megatron-LM#1764, allenai/OLMo-core PR #657, NVIDIA-NeMo/Automodel#3796,
    huggingface/trl#6668]: a rank, or a batch, without a supervised token.
    """

    # Two tokens with losses 1 and 3: log(1 + exp(d)) with d the difference of two logits.
    GAPS = numbers(math.log(math.e - 1), math.log(math.e**3 - 1))

    @staticmethod
    def loss(w: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat, wanted = (logits * w).flatten(0, 1), labels.flatten()
        total = F.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum")
        return lax.psum(total, "x") / lax.psum((wanted != -100).sum(), "x").clamp(min=1)

    def found(self, run: Any, where: str, labels: torch.Tensor) -> list[float]:
        logits = torch.zeros(2, 2, 2, dtype=torch.float64)
        logits[1, :, 1] = self.GAPS
        specs = P(), P("x"), P("x")
        if where == "inside":
            fn = mapped(pfx.value_and_grad(self.loss), TWO, specs, P())
        else:
            fn = pfx.value_and_grad(mapped(self.loss, TWO, specs, P()))
        return [float(x) for x in run(fn, TWO, numbers(1)[0], logits, labels)]

    @EACH_WAY
    @pytest.mark.parametrize("where", ["inside", "around"])
    def test_a_rank_without_labels(self, run: Any, where: str) -> None:
        value, gradient = self.found(run, where, torch.tensor([[-100, -100], [0, 0]]))
        # d/dw of log(1 + exp(w d)) is d (1 - exp(-loss)), at w = 1.
        slopes = self.GAPS * (1 - torch.exp(-numbers(1, 3)))
        assert value == pytest.approx(2)
        assert gradient == pytest.approx(float(slopes.mean()))

    @EACH_WAY
    @pytest.mark.parametrize("where", ["inside", "around"])
    def test_a_batch_without_labels(self, run: Any, where: str) -> None:
        assert self.found(run, where, torch.full((2, 2), -100)) == [0, 0]
