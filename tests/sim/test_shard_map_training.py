"""Hand-written parallel training: the value and every gradient are the dense function's.

The number in a test's name is a case that JAX 0.10 agrees with.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, lax
from tests.sim.manual import EACH_WAY, assert_close, chain, complains, draw, mapped, ring

FOUR = pfx.make_mesh(i=4)
SQUARE = pfx.make_mesh(i=2, j=2)


def compare(run: Any, mesh: pfx.Mesh, parallel: Any, dense: Any, *args: Any) -> None:
    """Assert that two functions agree, and their gradients with respect to every argument."""
    assert_close(run(parallel, mesh, *args), dense(*args))
    weights = pfx.tree.map(lambda x: draw(*x.shape, seed=9), dense(*args))

    def gradients(fn: Any) -> Any:
        def loss(*args: Any) -> torch.Tensor:
            parts = pfx.tree.map(lambda y, w: (torch.sin(y) * w).sum(), fn(*args), weights)
            return sum(pfx.tree.leaves(parts), start=torch.zeros((), dtype=torch.float64))

        return pfx.grad(loss, argnums=tuple(range(len(args))))

    assert_close(run(gradients(parallel), mesh, *args), gradients(dense)(*args))


@EACH_WAY
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 4), (4, 1), (3, 5), (1, 2)])
def test_D1_gpipe_is_a_scan_over_ticks(run: Any, stages: int, microbatches: int) -> None:
    """GPipe (Huang et al. 2018, arXiv:1811.06965, figure 2c): M + S - 1 ticks, sends along a chain."""
    mesh = pfx.make_mesh(stage=stages)
    w, x = draw(stages, 5, 5), draw(microbatches, 2, 5, seed=1)

    def pipeline(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        stage = lax.axis_index("stage")
        ticks = F.pad(x, (0, 0, 0, 0, 0, stages - 1))

        def tick(held: torch.Tensor, fresh: torch.Tensor) -> Any:
            out = torch.tanh(torch.where(stage == 0, fresh, held) @ w[0])
            return lax.ppermute(out, "stage", chain(stages)), out

        start = lax.pcast(torch.zeros_like(x[0]), "stage", to="varying")
        outs = pfx.scan(tick, start, ticks)[1][stages - 1 :]
        return lax.psum(torch.where(stage == stages - 1, outs, torch.zeros_like(outs)), "stage")

    def dense(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in w:
            x = torch.tanh(x @ layer)
        return x

    parallel = mapped(pipeline, mesh, (P("stage"), P()), P())
    compare(run, mesh, parallel, dense, w, x)


@EACH_WAY
@pytest.mark.parametrize("n", [2, 4])
def test_D2_a_ring_all_gather_matmul(run: Any, n: int) -> None:
    """A matmul with the gather in it (Wang et al. 2022, doi 10.1145/3567955.3567959, section 5)."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = []
        for _ in range(n):
            products.append(x @ w)
            x = lax.ppermute(x, "i", ring(n))
        came = (lax.axis_index("i") - torch.arange(n)) % n  # of block b: the step it was here
        return torch.stack(products)[came].flatten(0, 1)

    mesh = pfx.make_mesh(i=n)
    parallel = mapped(fn, mesh, (P("i"), P(None, "i")), P(None, "i"))
    compare(run, mesh, parallel, torch.matmul, draw(8, 3), draw(3, 12, seed=1))


@EACH_WAY
def test_D2_its_mirror_a_ring_matmul_reduce_scatter(run: Any) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        n, k = lax.axis_size("i"), lax.axis_index("i")
        blocks = torch.stack(x.chunk(n))[(k - 1 - torch.arange(n)) % n]
        total = blocks[0] @ w
        for block in blocks[1:]:
            total = lax.ppermute(total, "i", ring(n)) + block @ w
        return total

    parallel = mapped(fn, FOUR, (P(None, "i"), P("i")), P("i"))
    compare(run, FOUR, parallel, torch.matmul, draw(8, 12), draw(12, 3, seed=1))


TREE = {"whole": draw(3), "rows": draw(4, 3, seed=1), "columns": draw(3, 4, seed=2),
        "both": draw(4, 4, seed=3), "flat": draw(8, seed=4)}  # fmt: skip
SPECS = {"whole": P(), "rows": P("i"), "columns": P(None, "j"), "both": P("j", "i"),
         "flat": P(("i", "j"))}  # fmt: skip
VARIES = {"whole": (), "rows": ("i",), "columns": ("j",), "both": ("i", "j"), "flat": ("i", "j")}


@EACH_WAY
def test_D4_a_global_norm_reduces_each_leaf_over_the_axes_it_varies_on(run: Any) -> None:
    def norm(leaves: Any) -> torch.Tensor:
        squares = {name: (x**2).sum() for name, x in leaves.items()}
        return sum(lax.psum(s, VARIES[n]) if VARIES[n] else s for n, s in squares.items()) ** 0.5

    dense = lambda leaves: sum((x**2).sum() for x in leaves.values()) ** 0.5
    compare(run, SQUARE, mapped(norm, SQUARE, (SPECS,), P()), dense, TREE)


@EACH_WAY
def test_D4_over_fewer_axes_it_is_refused(run: Any) -> None:
    norm = lambda leaves: lax.psum((leaves["both"] ** 2).sum(), "i") ** 0.5
    with complains((TypeError, ValueError), "'j'", "psum"):
        run(mapped(norm, SQUARE, (SPECS,), P()), SQUARE, TREE)


def cross_entropy(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of a vocabulary whose columns lie on the devices; no logit is gathered.

    Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """
    logits = h @ w
    own = logits.shape[1]
    most = lax.pmax(lax.stop_gradient(logits).amax(1), "i")
    logits = logits - most[:, None]
    total = lax.psum(logits.exp().sum(1), "i")
    at = labels - lax.axis_index("i") * own
    here = (at >= 0) & (at < own)
    picked = logits.gather(1, at.clamp(0, own - 1)[:, None])[:, 0]
    wanted = lax.psum(torch.where(here, picked, torch.zeros_like(picked)), "i")
    return (total.log() - wanted).mean()


@EACH_WAY
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_D5_vocabulary_parallel_cross_entropy(run: Any, scale: float) -> None:
    labels = torch.tensor([0, 4, 5, 11, 7, 3])
    h, w = draw(6, 5) * scale, draw(5, 12, seed=1)
    parallel = mapped(cross_entropy, FOUR, (P(), P(None, "i"), P()), P())
    found = lambda h, w: parallel(h, w, labels)
    compare(run, FOUR, found, lambda h, w: F.cross_entropy(h @ w, labels), h, w)


@EACH_WAY
@pytest.mark.parametrize("counts", [(3, 1, 0, 2), (0, 0, 0, 1), (3, 3, 3, 3)])
def test_D9_a_masked_token_mean_divides_two_sums(run: Any, counts: tuple[int, ...]) -> None:
    mask = torch.tensor([[position < count for position in range(3)] for count in counts])
    x, w, y = draw(4, 3, 5), draw(5, seed=1), draw(4, 3, seed=2)

    def loss(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        wrong = (x @ w - y) ** 2 * mask
        return lax.psum(wrong.sum(), "i") / lax.psum(mask.sum(), "i")

    parallel = mapped(loss, FOUR, (P(), P("i"), P("i"), P("i")), P())
    dense = lambda w, x, y: ((x @ w - y) ** 2)[mask].mean()
    compare(run, FOUR, lambda w, x, y: parallel(w, x, y, mask), dense, w, x, y)


@EACH_WAY
def test_ring_attention(run: Any) -> None:
    """Keys and values travel; each device keeps its queries (Liu et al. 2023, arXiv:2310.01889)."""

    def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n, rank, own = lax.axis_size("i"), lax.axis_index("i"), q.shape[0]
        place = torch.arange(own)
        scores, values = [], []
        for step in range(n):
            source = (rank - step) % n
            seen = (rank * own + place)[:, None] >= (source * own + place)[None]
            score = q @ k.T / math.sqrt(q.shape[1])
            scores.append(torch.where(seen, score, torch.full_like(score, -1e30)))
            values.append(v)
            k, v = lax.ppermute((k, v), "i", ring(n))
        return torch.cat(scores, 1).softmax(1) @ torch.cat(values)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    parallel = mapped(ring_attention, FOUR, (P("i"), P("i"), P("i")), P("i"))
    args = [draw(8, 3, seed=seed) for seed in range(3)]
    eager = lambda q, k, v: (q @ k.T / math.sqrt(3)).masked_fill(
        ~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf
    ).softmax(1) @ v  # fmt: skip
    assert_close(eager(*args), dense(*args))
    compare(run, FOUR, parallel, eager, *args)


@EACH_WAY
def test_experts_exchange_their_tokens(run: Any) -> None:
    """Dispatch and combine of a mixture of experts (GShard, Lepikhin et al. 2020, arXiv:2006.16668)."""

    def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sent = lax.all_to_all(x, "i", 0, 0, tiled=True)  # block e of each device goes to expert e
        return lax.all_to_all(torch.tanh(sent @ w[0]), "i", 0, 0, tiled=True)

    def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("depk,ekm->depm", x.reshape(4, 4, 2, 5), w)).reshape(32, 3)

    parallel = mapped(experts, FOUR, (P("i"), P("i")), P("i"))
    compare(run, FOUR, parallel, dense, draw(32, 5), draw(4, 5, 3, seed=1))


@EACH_WAY
def test_data_and_tensor_parallel_at_once(run: Any) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        out = lax.psum(F.gelu(x @ params["up"]) @ params["down"], "j")
        return lax.pmean((out**2).mean(), "i")

    def dense(params: Any, x: torch.Tensor) -> torch.Tensor:
        return ((F.gelu(x @ params["up"]) @ params["down"]) ** 2).mean()

    specs = {"up": P(None, "j"), "down": P("j")}
    params = {"up": draw(5, 8), "down": draw(8, 5, seed=1)}
    parallel = mapped(loss, SQUARE, (specs, P("i")), P())
    compare(run, SQUARE, parallel, dense, params, draw(4, 5, seed=2))


@EACH_WAY
def test_parameters_gathered_where_they_are_used(run: Any) -> None:
    """ZeRO-3 by hand (Rajbhandari et al. 2019, arXiv:1910.02054, section 5): gather, use, drop."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def layer(x: torch.Tensor, w: torch.Tensor) -> Any:
            return torch.tanh(x @ lax.all_gather(w, "i", tiled=True)), None

        return lax.pmean((pfx.scan(pfx.remat(layer), x, w)[0] ** 2).mean(), "i")

    def dense(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in w:
            x = torch.tanh(x @ layer)
        return (x**2).mean()

    parallel = mapped(loss, FOUR, (P(None, "i"), P("i")), P())
    compare(run, FOUR, parallel, dense, draw(3, 4, 4), draw(8, 4, seed=1))
