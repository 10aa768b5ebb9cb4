"""The same step on a GPU: a simulated mesh on one device, against the CPU."""

from __future__ import annotations

import pytest
import torch

import pfx
from models import gpt

pytestmark = pytest.mark.gpu

CONFIG = gpt.Config(
    num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, vocab_size=61, max_seq_len=16
)
OPTIMIZER = pfx.optim.chain(pfx.optim.clip_by_global_norm(1.0), pfx.optim.sgd(0.1, momentum=0.9))


def losses(device: str, **plan: object) -> list[float]:
    made = pfx.Plan(**plan)
    train = pfx.make_train_step(
        gpt.loss_fn(CONFIG), OPTIMIZER, made, init=lambda key: gpt.init(CONFIG, key),
        axes=gpt.axes(CONFIG), mesh=made.mesh(kind="simulated", device=device),
    )  # fmt: skip
    state = train.init(pfx.random.key(0))
    tokens = torch.arange(8 * 17).reshape(8, 17) * 7 % 61
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    found = []
    for _ in range(3):
        state, metrics = train.step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}])
def test_a_simulated_mesh_on_a_gpu_equals_the_cpu(plan: dict[str, object]) -> None:
    assert losses("cuda", **plan) == pytest.approx(losses("cpu"), rel=1e-4)


def test_random_bits_are_the_same_on_a_gpu() -> None:
    key = pfx.random.key(3)
    on_gpu = pfx.random.bits(key.cuda(), (5, 7)).cpu()
    assert torch.equal(on_gpu.view(torch.int32), pfx.random.bits(key, (5, 7)).view(torch.int32))
