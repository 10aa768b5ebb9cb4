"""Time of a training step on two gloo processes, against FSDP2 and against DTensor's tensor parallelism.

    python bench/process.py [--rounds 9]

Starts itself under torchrun: two processes of one thread each. In both comparisons pfx and its peer
start from the same weights, read the same batches, and do the same step: forward, backward, clipping
by the global norm, AdamW. All are measured in turns; every figure is a ratio of medians of one run.

- dp=2, ZeRO-3, against `fully_shard` on every block and the root, with the fused AdamW;
- tp=2, against `parallelize_module` with Megatron's column- and row-wise linears, and AdamW, fused too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _torch_gpt import Model, model_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import pfx
from models import gpt

CONFIG = gpt.Config(
    num_layers=12, embed_dim=384, num_heads=6, mlp_dim=1536, vocab_size=1024, max_seq_len=128
)
BATCH, SEQ, LR, CLIP = 8, 128, 1e-3, 1.0
PROCESSES = 2
WARMUP = 2
EAGER, FSDP, DTENSOR = "eager, one process", "fully_shard, dp=2", "parallelize_module, tp=2"
Step = Callable[[], float]


def batch(rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Tokens and labels, the same in every process, and so in every step."""
    tokens = torch.arange(BATCH * (SEQ + 1)).reshape(BATCH, SEQ + 1) * 7919 % CONFIG.vocab_size
    return tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous()


def pfx_step(params: gpt.Params, **plan: Any) -> Step:
    optimizer = pfx.optim.chain(pfx.optim.clip_by_global_norm(CLIP), pfx.optim.adamw(LR))
    train = pfx.make_train_step(
        gpt.loss_fn(CONFIG),
        optimizer,
        pfx.Plan(**plan),
        init=lambda key: gpt.init(CONFIG, key),
        axes=gpt.axes(CONFIG),
    )
    state = [train.state_of(params, pfx.random.key(1))]
    tokens, labels = batch()

    def step() -> float:
        state[0], metrics = train.step(state[0], {"tokens": tokens, "labels": labels})
        return float(metrics["loss"])

    return step


def torch_step(model: Model, tokens: Tensor, labels: Tensor) -> Step:
    """One step of a module, however its parameters are spread."""
    params = list(model.parameters())
    # Neither a norm nor an optimizer takes DTensors and tensors together.
    kinds = [[p for p in params if isinstance(p, DTensor) is spread] for spread in (True, False)]
    kinds = [kind for kind in kinds if kind]
    groups = [{"params": kind} for kind in kinds]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=1e-2, fused=True)

    def clip() -> None:
        norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(norms))
        for kind in kinds:
            clip_grads_with_norm_(kind, CLIP, total)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        clip()
        optimizer.step()
        return loss.item()

    return step


def eager_step(params: gpt.Params) -> Step:
    """One process does all the work; the others wait."""
    if dist.get_rank():
        return lambda: 0.0
    return torch_step(model_of(params, CONFIG), *batch())


def fsdp_step(params: gpt.Params, mesh: DeviceMesh) -> Step:
    model = model_of(params, CONFIG)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    local, mine = BATCH // mesh.size(), mesh.get_local_rank()
    return torch_step(model, *batch(slice(mine * local, (mine + 1) * local)))


def dtensor_step(params: gpt.Params, mesh: DeviceMesh) -> Step:
    """Megatron's tensor parallelism; the vocabulary is split, and its logits are gathered."""
    model = model_of(params, CONFIG)
    split = {
        "qkv": ColwiseParallel(), "out": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, split)
    ends = {
        "tok_embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    model.tie()
    return torch_step(model, *batch())


def timed(steps: dict[str, Step], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds and the last loss of each, in turns so that a slow moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number in range(WARMUP + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step()
            dist.barrier()
            if number >= WARMUP:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}, losses


def worker(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    params = gpt.init(CONFIG, pfx.random.key(0))
    steps = {
        EAGER: eager_step(params),
        FSDP: fsdp_step(params, mesh),
        "pfx, dp=2, ZeRO-3": pfx_step(params, dp=2, zero=3),
        DTENSOR: dtensor_step(params, mesh),
        "pfx, tp=2": pfx_step(params, tp=2),
    }
    medians, losses = timed(steps, rounds)
    mean = torch.tensor(losses[FSDP])  # of its half of the batch
    dist.all_reduce(mean)
    losses[FSDP] = mean.item() / PROCESSES
    if dist.get_rank() == 0:
        report(medians, losses, rounds)
    dist.destroy_process_group()


def report(medians: dict[str, float], losses: dict[str, float], rounds: int) -> None:
    peers = dict(zip(medians, (EAGER, FSDP, FSDP, DTENSOR, DTENSOR), strict=True))
    print(f"median of {rounds} steps; loss of step {WARMUP + rounds}")
    for name, seconds in medians.items():
        ratio = f"{seconds / medians[peers[name]]:5.2f} x {peers[name]}"
        print(f"{name:<26} {seconds * 1e3:8.1f} ms   loss {losses[name]:.4f}   {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return worker(args.rounds)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={PROCESSES}", __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
