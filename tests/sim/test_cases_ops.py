"""Op rules and reductions that other systems got wrong, each a small input with its right answer.

The report that a case restates is named in brackets; the oracle is plain torch on one device. Where
a split would need padding, the right answer for now is an error with the arithmetic.
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
GRID = pfx.make_mesh(dp=2, tp=2)
INF = math.inf


def run(
    fn: Callable[..., Any], *args: torch.Tensor, specs: tuple[P, ...], mesh: pfx.Mesh = TWO
) -> Any:
    """Run on a mesh, every copy computed and compared; the results as global tensors."""
    return pfx.device_get(pfx.jit(fn, mesh=mesh, in_specs=specs, check=True)(*args))


def agree(
    fn: Callable[..., Any], *args: torch.Tensor, specs: tuple[P, ...], mesh: pfx.Mesh = TWO
) -> Any:
    """Assert that a mesh computes what one device does; return it."""
    got = run(fn, *args, specs=specs, mesh=mesh)
    torch.testing.assert_close(got, fn(*args), equal_nan=True)
    return got


class TestMeanOverRows:
    """B01 [pytorch/pytorch#162692, PR #163241]: a mean of local means."""

    X = torch.arange(12.0).reshape(3, 4)

    def test_uneven_rows_are_refused_with_the_arithmetic(self) -> None:
        with pytest.raises(ShardingError, match=r"dim 0 \(size 3\).*\n?.*3 % 2 = 1"):
            run(torch.mean, self.X, specs=(P("x"),))
        with pytest.raises(ShardingError, match=r"dim 0 \(size 1\).*\n?.*1 % 2 = 1"):
            run(torch.mean, torch.arange(4.0)[None], specs=(P("x"),))

    @pytest.mark.parametrize("spec", [P(), P(None, "x")])
    def test_mean_var_std_and_their_gradients(self, spec: P) -> None:
        assert agree(torch.mean, self.X, specs=(spec,)) == 5.5
        assert agree(torch.mean, torch.arange(4.0)[None], specs=(spec,)) == 1.5
        agree(lambda x: (x.var(), x.std(), x.var(1), x.std(0, keepdim=True)), self.X, specs=(spec,))
        gradient = agree(torch.func.grad(torch.mean), self.X, specs=(spec,))
        assert torch.equal(gradient, torch.full((3, 4), 1 / 12))
        agree(torch.func.grad(lambda x: x.std() + x.var()), self.X, specs=(spec,))

    def test_a_mean_counts_rows_of_all_devices(self) -> None:
        x = torch.tensor([[0.0], [0.0], [0.0], [8.0]])
        assert agree(torch.mean, x, specs=(P("x"),)) == 2.0
        agree(lambda x: torch.var_mean(x, 0, correction=0), x, specs=(P("x"),))


class TestPaddingAfterGather:
    """B02 [pytorch/pytorch#103306, #115310]: split, then gather, must give the value back."""

    X = torch.arange(50.0).reshape(5, 10)

    def test_five_rows_over_four_are_refused(self) -> None:
        with pytest.raises(ShardingError, match=r"5 % 4 = 1"):
            pfx.device_put(self.X, FOUR, P("x"))
        with pytest.raises(ShardingError, match=r"5 % 4 = 1"):
            run(lambda x: pfx.constrain(x, P("x")), self.X, specs=(P(),), mesh=FOUR)

    def test_split_and_gather_give_the_value_back(self) -> None:
        def there_and_back(x: torch.Tensor) -> torch.Tensor:
            return pfx.constrain(pfx.constrain(x, P(None, "x")), P())

        got = agree(there_and_back, self.X, specs=(P(),))
        assert got.shape == (5, 10)


class TestViewThroughASplitDim:
    """B06 [pytorch/pytorch#179502, PR #179509, #179632]: a reshape that cuts through a split dim."""

    def test_reshape_gathers_first(self) -> None:
        x = torch.arange(96.0).reshape(12, 8)
        got = agree(lambda x: x.reshape(16, 6), x, specs=(P(None, "x"),), mesh=FOUR)
        assert got[0].tolist() == [0, 1, 2, 3, 4, 5]
        assert got[1].tolist() == [6, 7, 8, 9, 10, 11]

    def test_a_reshape_that_keeps_the_major_factor_does_not_communicate(self) -> None:
        step = pfx.jit(lambda x: x.reshape(12, 2, 4), mesh=TWO, in_specs=(P(None, "x"),))
        assert step.lower(torch.zeros(12, 8)).collectives() == []
        agree(lambda x: x.reshape(12, 2, 4), torch.randn(12, 8), specs=(P(None, "x"),))
        agree(lambda x: x.reshape(96), torch.randn(12, 8), specs=(P(None, "x"),))
        agree(lambda x: x.reshape(2, 48).reshape(96), torch.randn(12, 8), specs=(P("x"),))


class TestExpandOfASplitDim:
    """B08 [pytorch/pytorch#160968, PR #163320, PR #135054]: broadcasting a dim of size 1."""

    X = torch.tensor([[1.0, 2.0, 3.0, 4.0]])

    def test_a_single_row_cannot_be_split(self) -> None:
        with pytest.raises(ShardingError, match=r"1 % 4 = 1"):
            run(lambda x: x.expand(4, 4), self.X, specs=(P("x"),), mesh=FOUR)

    def test_every_row_is_the_row(self) -> None:
        def grown(x: torch.Tensor) -> torch.Tensor:
            return pfx.constrain(x.expand(4, 4), P("x"))

        assert agree(grown, self.X, specs=(P(),), mesh=FOUR).tolist() == self.X.tolist() * 4
        zeros = torch.zeros(4, 4)
        added = agree(torch.add, self.X, zeros, specs=(P(), P("x")), mesh=FOUR)
        assert added.tolist() == self.X.tolist() * 4
        gradient = agree(torch.func.grad(lambda x: grown(x).sum()), self.X, specs=(P(),), mesh=FOUR)
        assert gradient.tolist() == [[4, 4, 4, 4]]

    def test_an_identity_reshape_keeps_the_layout(self) -> None:
        step = pfx.jit(lambda x: x.reshape(1, 2), mesh=TWO, in_specs=(P(None, "x"),))
        assert step(torch.zeros(1, 2)).spec == P(None, "x")


class TestPartialPlusNumber:
    """B10 [pytorch/pytorch#163193, #145218, #149768, PR #167813]: a number added once per rank."""

    def test_arithmetic_on_an_unreduced_sum(self) -> None:
        def of_sum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                x.sum() + 10,
                10 - x.sum(),
                x.sum() * 2,
                x.sum() + torch.tensor(10),
                x.sum() / 3,
            )

        got = agree(of_sum, torch.arange(10.0), specs=(P("x"),))
        assert [float(value) for value in got] == [55, -35, 90, 55, 15]

    def test_each_alone(self) -> None:
        x = torch.arange(10.0)
        for fn in (
            lambda x: x.sum() + 10,
            lambda x: 10 - x.sum(),
            lambda x: x.sum() * 2 + x.sum() / 3 - 1,
            lambda x: torch.where(x.sum() > 44, x.sum(), 0.0),
            lambda x: 1.0 / (x.sum() + 1e-6),
            lambda x: x.sum().clamp(max=1.0),
            lambda x: x.sum() * x.sum(),
        ):
            agree(fn, x, specs=(P("x"),))


class TestNormOfPartial:
    """B12 [pytorch/pytorch PR #159856, PR #165962, PR #172288]: a norm of each rank's share."""

    SHARES = torch.tensor([[1.0, 3.0], [2.0, 1.0]])  # one row a device; the value is [3, 4]

    def test_norms(self) -> None:
        def norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.linalg.vector_norm(x.sum(0)), x.sum(0).abs().sum(), x.sum(0).max()

        got = agree(norms, self.SHARES, specs=(P("x"),))
        assert [float(value) for value in got] == [5, 7, 4]

    def test_mixed_signs(self) -> None:
        got = agree(lambda x: x.sum(0).abs(), torch.tensor([[1.0], [-3.0]]), specs=(P("x"),))
        assert got.tolist() == [2]

    def test_pending_norms_added(self) -> None:
        def total(x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.vector_norm(x[0]) + torch.linalg.vector_norm(x[1])

        values = torch.tensor([[3.0, 4.0], [5.0, 12.0]])
        assert agree(total, values, specs=(P(None, "x"),)) == 18.0


class TestGlobalIndices:
    """B15 [pytorch/pytorch#170934, #172350, PR #171367]: a global index used on local rows."""

    def test_index_put_on_split_rows(self) -> None:
        def write(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return x.index_put((rows, rows), values)

        args = (torch.zeros(4, 4), torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        for spec in (P("x"), P(None, "x")):
            got = agree(write, *args, specs=(spec, P(), P()), mesh=FOUR)
            assert torch.equal(got, torch.diag(args[2]))
        got = agree(write, *args, specs=(P("dp", "tp"), P(), P()), mesh=GRID)
        assert torch.equal(got, torch.diag(args[2]))

    def test_index_put_of_a_vector(self) -> None:
        write = lambda x, i, v: x.index_put((i,), v)
        args = (torch.zeros(16), torch.arange(16), torch.ones(16))
        assert torch.equal(agree(write, *args, specs=(P("x"), P(), P())), torch.ones(16))

    @pytest.mark.parametrize("index", [[0, 3, 3, 1], [-1, 0, -4, -1], [2, 2, 2, 2]])
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_repeated_and_negative_indices(self, index: list[int], *, accumulate: bool) -> None:
        values = torch.tensor(
            [5.0, 5.0, 5.0, 5.0]
        )  # equal, so that the order of writes is no matter

        def write(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return x.index_put((i,), v, accumulate=accumulate)

        for specs in ((P("x"), P(), P()), (P(), P("x"), P("x")), (P("x"), P(), P("x"))):
            agree(write, torch.arange(4.0), torch.tensor(index), values, specs=specs)

    @pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
    def test_lookups_and_their_gradients(self, spec: P) -> None:
        x, rows = torch.randn(4, 4), torch.tensor([0, 3, 3, 1])
        grid = torch.tensor([[0, 1, 1, 3], [3, 3, 0, 2]])

        def lookups(x: torch.Tensor, rows: torch.Tensor, grid: torch.Tensor) -> Any:
            return (
                x[rows], x[rows - 4], x[:, rows], x[rows, rows - 1], x[grid],
                x.index_select(0, rows), x.index_select(1, rows), x.gather(0, grid),
                x.gather(1, grid.T), x.scatter_add(0, grid, x[:2]), x.index_add(0, rows, x),
            )  # fmt: skip

        def loss(x: torch.Tensor, rows: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return torch.stack([out.pow(2).sum() for out in lookups(x, rows, grid)]).sum()

        for index_spec in (P(), P("x")):
            specs = (spec, index_spec, index_spec)
            agree(lookups, x, rows, grid, specs=specs)
            agree(torch.func.grad(loss), x, rows, grid, specs=specs)


class TestPaddingIndex:
    """B16 [pytorch/torchtitan PR #4637]: padding_idx is a row of the whole table."""

    @pytest.mark.parametrize(("padding", "row"), [(1, 1), (6, 6), (-1, 7), (None, None)])
    @pytest.mark.parametrize("spec", [P("x"), P(), P(None, "x")])
    def test_only_the_padding_row_gets_no_gradient(
        self, padding: int | None, row: int | None, spec: P
    ) -> None:
        ids = torch.tensor([1, 5, 5, 6, 7, 0])

        def loss(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, table, padding_idx=padding).sum()

        table = torch.ones(8, 2)
        for index_spec in (P(), P("x")):
            got = agree(torch.func.grad(loss), table, ids, specs=(spec, index_spec))
            want = [1, 1, 0, 0, 0, 2, 1, 1]
            if row is not None:
                want[row] = 0
            assert got[:, 0].tolist() == want

    def test_the_reported_case(self) -> None:
        def loss(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, table, padding_idx=1).sum()

        args = torch.ones(8, 1), torch.tensor([1, 5, 5])
        got = agree(torch.func.grad(loss), *args, specs=(P("x"), P()))
        assert got[:, 0].tolist() == [0, 0, 0, 0, 0, 2, 0, 0]


class TestWeightedLoss:
    """B18 [pytorch/pytorch#185167]: a mean divided by each rank's own weight."""

    LOG_PROBS = -torch.tensor([[1.0, 9.0], [1.0, 9.0], [1.0, 9.0], [9.0, 3.0]])
    TARGETS = torch.tensor([0, 0, 0, 1])
    WEIGHT = torch.tensor([1.0, 3.0])

    @pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
    def test_class_weights(self, spec: P) -> None:
        def loss(scores: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.nll_loss(scores, targets, weight)

        rows = P(spec[0]) if spec else P()
        args = (self.LOG_PROBS, self.TARGETS, self.WEIGHT)
        assert agree(loss, *args, specs=(spec, rows, P())) == 2.0
        agree(torch.func.grad(loss), *args, specs=(spec, rows, P()))

    @pytest.mark.parametrize("ignored", [[0, 1], [3], [0, 1, 2, 3], []])
    @pytest.mark.parametrize("spec", [P("dp"), P("dp", "tp"), P(None, "tp"), P(("dp", "tp"))])
    def test_ignored_rows_and_a_split_vocabulary(self, ignored: list[int], spec: P) -> None:
        targets = torch.tensor([1, 0, 5, 7])
        targets[ignored] = -100
        logits, weight = torch.randn(4, 8), torch.rand(8) + 0.5

        def losses(logits: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> Any:
            kinds = ({}, {"weight": weight}, {"reduction": "sum"}, {"label_smoothing": 0.1})
            return [F.cross_entropy(logits, targets, **options) for options in kinds]  # type: ignore[arg-type]

        def total(
            logits: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            return torch.stack(losses(logits, targets, weight)).sum()

        specs = (spec, P(spec[0]), P())
        agree(losses, logits, targets, weight, specs=specs, mesh=GRID)
        agree(torch.func.grad(total), logits, targets, weight, specs=specs, mesh=GRID)

    @pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
    def test_losses_on_split_rows(self, spec: P) -> None:
        x, y = torch.rand(4, 6), torch.rand(4, 6)

        def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([
                F.mse_loss(x, y), F.huber_loss(x, y, delta=0.3), F.smooth_l1_loss(x, y),
                F.l1_loss(x, y), F.binary_cross_entropy(x, y),
                F.binary_cross_entropy_with_logits(x, y), F.kl_div(x.log(), y, reduction="batchmean"),
                F.cosine_similarity(x, y).mean(),
            ])  # fmt: skip

        agree(losses, x, y, specs=(spec, spec))
        agree(torch.func.grad(lambda x, y: losses(x, y).sum()), x, y, specs=(spec, P()))


class TestLogSumExp:
    """B19 [tensorflow/tensorflow#11692, microsoft/onnxruntime#28461, pytorch/pytorch PR #76477]."""

    @pytest.mark.parametrize(
        ("values", "want"),
        [
            ([-INF, -INF, -INF, -INF], -INF),
            ([-INF, -INF, 0.0, 0.0], math.log(2)),
            ([1000.0, 1000.0], 1000 + math.log(2)),
            ([INF, 0.0], INF),
        ],
    )
    def test_logsumexp_of_a_split_dim(self, values: list[float], want: float) -> None:
        got = agree(lambda x: x.logsumexp(0), torch.tensor(values), specs=(P("x"),))
        assert float(got) == pytest.approx(want)

    def test_gradients_are_finite(self) -> None:
        x = torch.tensor([-INF, -INF, 0.0, 0.0])
        gradient = agree(torch.func.grad(lambda x: x.logsumexp(0)), x, specs=(P("x"),))
        assert gradient.tolist() == [0, 0, 0.5, 0.5]

    def test_softmax_of_a_split_dim(self) -> None:
        for values, want in (([1000.0, 1000.0], [0.5, 0.5]), ([-INF, 0.0], [0.0, 1.0])):
            assert (
                agree(lambda x: x.softmax(0), torch.tensor(values), specs=(P("x"),)).tolist()
                == want
            )
        agree(lambda x: F.log_softmax(x, 0), torch.tensor([1000.0, 1000.0]), specs=(P("x"),))

    def test_softmax_of_a_masked_row_is_nan_as_in_torch(self) -> None:
        got = agree(lambda x: x.softmax(0), torch.tensor([-INF, -INF]), specs=(P("x"),))
        assert got.isnan().all()


class TestDropoutMasks:
    """B24 [NVIDIA/Megatron-LM PR #206, tenstorrent/tt-metal#55947]: one mask of the global tensor."""

    @pytest.mark.parametrize("spec", [P("dp"), P("dp", "tp"), P(None, ("tp", "dp")), P()])
    def test_the_mask_is_the_global_one(self, spec: P) -> None:
        def dropout(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            keep = pfx.random.bernoulli(key, 0.5, x.shape)
            return torch.where(keep, x / 0.5, 0.0)

        got = agree(dropout, torch.ones(4, 8), pfx.random.key(3), specs=(spec, P()), mesh=GRID)
        assert not torch.equal(got[:2], got[2:])  # the halves of one mask, not one mask twice
        assert 0 < got.count_nonzero() < 32
