"""Time of a training step: a simulated 2 x 4 mesh against one device in eager torch, and against jax.

    python bench/step.py [--no-jax] [--threads 1]

Every figure is a ratio of medians measured in one run, in turns, in one process (jax: in one of its
own, with 8 host-platform devices). The step is the whole of it: forward, backward, clipping, AdamW.
torch has as many threads as this process and XLA have cores. JAX runs in this Python, or in $JAX_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

import pfx
from models import gpt

CONFIG = gpt.Config(
    num_layers=4, embed_dim=256, num_heads=8, mlp_dim=1024, vocab_size=1024, max_seq_len=128
)
BATCH, SEQ, LR, WARMUP = 8, 128, 1e-3, 2
EAGER, SIMULATED = "eager torch, one device", "pfx, dp=2 tp=4 simulated"
JAX = "jax, dp=2 tp=4 on 8 host devices"


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(BATCH * (SEQ + 1)).reshape(BATCH, SEQ + 1) * 7919 % CONFIG.vocab_size
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def pfx_step(**plan: object) -> Callable[[], float]:
    optimizer = pfx.optim.chain(pfx.optim.clip_by_global_norm(1.0), pfx.optim.adamw(LR))
    train = pfx.make_train_step(
        gpt.loss_fn(CONFIG), optimizer, pfx.Plan(**plan),
        init=lambda key: gpt.init(CONFIG, key), axes=gpt.axes(CONFIG),
    )  # fmt: skip
    state = [train.init(pfx.random.key(0))]
    data = batch()

    def step() -> float:
        state[0], metrics = train.step(state[0], data)
        return float(metrics["loss"])

    return step


def eager_step() -> Callable[[], float]:
    """Plain torch: autograd, `clip_grad_norm_`, the fused AdamW, the same architecture."""
    key = pfx.random.split(pfx.random.key(0))[0]  # as `TrainStep.init` does
    params = pfx.tree.map(lambda p: p.clone().requires_grad_(), gpt.init(CONFIG, key))
    leaves = pfx.tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=1e-2, fused=True)
    data = batch()
    e, h = CONFIG.embed_dim, CONFIG.num_heads

    def norm(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.layer_norm(x, (e,), w["scale"], w["bias"])

    def loss() -> torch.Tensor:
        x = F.embedding(data["tokens"], params["tok_embed"]) + params["positions"][:SEQ]
        for i in range(CONFIG.num_layers):
            w = pfx.tree.map(lambda p: p[i], params["blocks"])  # noqa: B023
            qkv = norm(x, w["attn_norm"]) @ w["wqkv"].reshape(e, -1) + w["bqkv"].reshape(-1)
            q, k, v = qkv.view(BATCH, SEQ, h, 3, -1).unbind(3)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x = x + mixed.transpose(1, 2).reshape(BATCH, SEQ, e) @ w["wo"].reshape(e, e) + w["bo"]
            hidden = F.gelu(norm(x, w["mlp_norm"]) @ w["w_up"] + w["b_up"], approximate="tanh")
            x = x + hidden @ w["w_down"] + w["b_down"]
        logits = F.linear(norm(x, params["final_norm"]), params["tok_embed"])
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), data["labels"].view(-1))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        return value.item()

    return step


def jax_step() -> Callable[[], float] | None:
    """The same step in a process of JAX's; None where JAX is missing."""
    python = os.environ.get("JAX_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import jax"], capture_output=True).returncode:
        print(f"jax: skipped, {python} has none; pip install 'pfx[bench]', or JAX_PYTHON=...")
        return None
    sizes = {k: v for k, v in asdict(CONFIG).items() if isinstance(v, int)}
    sizes |= {"batch": BATCH, "seq": SEQ, "lr": LR, "dp": 2, "tp": 4}
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    child = subprocess.Popen(
        [python, str(Path(__file__).with_name("_jax_step.py")), json.dumps(sizes)],
        env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    ask, answer = child.stdin, child.stdout

    def step() -> float:
        ask.write("step\n")
        ask.flush()
        return float(answer.readline())

    return step


def pin(cores: int) -> None:
    """Give torch so many threads, and this process and its children so many cores."""
    torch.set_num_threads(cores)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def timed(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds and last loss of each, in turns so that a slow moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number in range(WARMUP + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            if number >= WARMUP:
                times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times[name]), losses[name]) for name in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--jax", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    pin(args.threads)
    steps = {
        EAGER: eager_step(),
        "pfx, one device": pfx_step(),
        SIMULATED: pfx_step(dp=2, tp=4),
        "pfx, dp=2 tp=4, sequence parallel, ZeRO-1": pfx_step(dp=2, tp=4, sequence_parallel=True, zero=1),
    }  # fmt: skip
    if args.jax and (step := jax_step()) is not None:
        steps[JAX] = step
    results = timed(steps, args.rounds)
    print(
        f"{args.threads} threads, median of {args.rounds} steps, loss of step {WARMUP + args.rounds}"
    )
    base = results[EAGER][0]
    for name, (seconds, loss) in results.items():
        print(
            f"{name:<44} {seconds * 1e3:8.1f} ms   loss {loss:.4f}   {seconds / base:5.2f} x eager"
        )
    if JAX in results:
        print(f"pfx / jax, both dp=2 tp=4: {results[SIMULATED][0] / results[JAX][0]:.2f}")


if __name__ == "__main__":
    main()
