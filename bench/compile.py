"""Time and memory to compile a step from shapes alone: it must not grow with depth or width.

    python bench/compile.py [--large]

Traces and partitions the whole step (forward, backward, clipping, AdamW) of a Llama. `--large` adds the
70B shape on an abstract mesh of 16 x 8 devices and prints the collective bill and the memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import torch

import pfx
from models import llama

SMALL = llama.Config(
    num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=688,
    vocab_size=1024, max_seq_len=128,
)  # fmt: skip


def compile_step(config: llama.Config, plan: pfx.Plan, batch: int, seq: int):
    """Return (seconds, program); nothing of the model is ever allocated."""
    optimizer = pfx.optim.chain(pfx.optim.clip_by_global_norm(1.0), pfx.optim.adamw(1e-3))
    start = time.perf_counter()
    train = pfx.make_train_step(
        llama.loss_fn(config), optimizer, plan, init=lambda key: llama.init(config, key),
        axes=llama.axes(config), mesh=plan.mesh(kind="abstract"),
    )  # fmt: skip
    tokens = pfx.ShapeDtype((batch, seq), torch.int64)
    program = train.lower({"tokens": tokens, "labels": tokens})
    return time.perf_counter() - start, program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    plan = pfx.Plan(dp=2, tp=4, zero=3, sequence_parallel=True)
    compile_step(SMALL, plan, 8, 128)
    seconds = {}
    for layers in (4, 32):
        runs = [compile_step(replace(SMALL, num_layers=layers), plan, 8, 128)[0] for _ in range(3)]
        seconds[layers] = min(runs)
        print(f"{layers:>3} layers: {seconds[layers]:.2f} s")
    print(f"32 layers / 4 layers: {seconds[32] / seconds[4]:.2f}")
    if args.large:
        plan = pfx.Plan(dp=16, tp=8, zero=3, sequence_parallel=True)
        config = replace(llama.LLAMA3_70B, max_seq_len=8192)
        took, program = compile_step(config, plan, 16, 8192)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"70B on 16 x 8: {took:.2f} s, {peak:.2f} GiB resident in this process")
        print(program.memory())
        print("\n".join(map(str, program.collectives())))


if __name__ == "__main__":
    main()
