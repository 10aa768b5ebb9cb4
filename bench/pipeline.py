"""Time of a pipelined training step, against `torch.distributed.pipelining` and against no pipeline.

    python bench/pipeline.py [--rounds 9] [--rows 4] [--seq 128] [--schedule 1f1b] [--peer-only]
    python bench/pipeline.py --simulated

A GPT of 8 layers, 384 wide, with a tied table of tokens; 8 microbatches; the whole step: forward,
backward, clipping by the global norm, AdamW. The same weights and batches on all sides, measured in
turns; every ratio is of medians of one run.

- Two gloo processes of one thread each (the script starts itself under torchrun): pp=2 against
  `Schedule1F1B`. Two more rows say what there is to win: eager torch on one process, and both
  stages working side by side without ever waiting for each other.
- `--simulated`: one process plays both stages, against the same microbatches without a pipeline.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _pipeline_peer import CLIP, LR, Step, alone_step, eager_step, pipeline_step

import pfx
from models import gpt

CONFIG = gpt.Config(
    num_layers=8, embed_dim=384, num_heads=6, mlp_dim=1536, vocab_size=512, max_seq_len=128
)
MICROBATCHES, PROCESSES, WARMUP = 8, 2, 2
PEER, PFX = "torch Schedule1F1B, 2 processes", "pfx, pp=2, 2 processes"
EAGER, ALONE = "eager torch, one process", "both stages, never waiting"
ACCUMULATED, SIMULATED = "pfx, one device", "pfx, pp=2 simulated"
TOLERANCE = 1e-5  # of the first losses, relative
Times = dict[str, list[float]]
Losses = dict[str, list[float]]


def batch(rows: int, seq: int) -> dict[str, torch.Tensor]:
    """Microbatches of `rows` sequences each; the same in every process and every step."""
    count = MICROBATCHES * rows
    tokens = torch.arange(count * (seq + 1)).reshape(count, seq + 1) * 7919 % CONFIG.vocab_size
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def pfx_step(params: gpt.Params, data: dict[str, torch.Tensor], **plan: Any) -> Step:
    """A step of pfx's under a plan: on torchrun's processes, or simulated where there are none."""
    optimizer = pfx.optim.chain(pfx.optim.clip_by_global_norm(CLIP), pfx.optim.adamw(LR))
    train = pfx.make_train_step(
        gpt.loss_fn(CONFIG),
        optimizer,
        pfx.Plan(microbatches=MICROBATCHES, **plan),
        init=lambda key: gpt.init(CONFIG, key),
        axes=gpt.axes(CONFIG),
    )
    state = [train.state_of(params, pfx.random.key(1))]

    def step() -> float:
        state[0], metrics = train.step(state[0], data)
        return float(metrics["loss"])

    return step


def timed(steps: dict[str, Step], rounds: int) -> tuple[Times, Losses]:
    """Seconds and losses of every step, in turns so that a slow moment hits all alike."""
    times: Times = {name: [] for name in steps}
    losses: Losses = {name: [] for name in steps}
    for _ in range(WARMUP + rounds):
        for name, step in steps.items():
            wait_for_all()
            start = time.perf_counter()
            losses[name].append(step())
            wait_for_all()
            times[name].append(time.perf_counter() - start)
    return {name: values[WARMUP:] for name, values in times.items()}, losses


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; the last one has every loss, and reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    last = dist.get_rank() == PROCESSES - 1
    params, data = gpt.init(CONFIG, pfx.random.key(0)), batch(args.rows, args.seq)
    given = (params, CONFIG, data, MICROBATCHES)
    steps = {PEER: pipeline_step(*given)}
    if not args.peer_only:
        steps[PFX] = pfx_step(params, data, pp=PROCESSES, schedule=args.schedule)
    steps[EAGER] = eager_step(*given) if last else lambda: 0.0
    steps[ALONE] = alone_step(*given)
    times, losses = timed(steps, args.rounds)
    if last:
        losses.pop(ALONE)
        report(times, losses, base=PEER, tokens=data["tokens"].numel())
        check_agreement(losses, base=EAGER)
    dist.destroy_process_group()


def simulated(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    params, data = gpt.init(CONFIG, pfx.random.key(0)), batch(args.rows, args.seq)
    steps = {
        ACCUMULATED: pfx_step(params, data),
        SIMULATED: pfx_step(params, data, pp=PROCESSES, schedule=args.schedule),
    }
    times, losses = timed(steps, args.rounds)
    report(times, losses, base=ACCUMULATED, tokens=data["tokens"].numel())
    check_agreement(losses, base=ACCUMULATED)


def report(times: Times, losses: Losses, *, base: str, tokens: int) -> None:
    """Print the median, its spread (the middle half) and the speed of each against `base`."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{tokens} tokens a step, {MICROBATCHES} microbatches; median of {len(times[base])} steps"
    )
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        spread = f"({low * 1e3:.0f} to {high * 1e3:.0f})"
        speed = f"{tokens / medians[name]:7.0f} tokens/s {medians[base] / medians[name]:5.2f} x"
        loss = f"loss {losses[name][-1]:.5f}" if name in losses else ""
        print(f"{name:<32} {medians[name] * 1e3:8.1f} ms {spread:<16} {speed}   {loss}")


def check_agreement(losses: Losses, *, base: str) -> None:
    """Exit unless all start from the loss of `base` and take the same first step."""
    for name, values in losses.items():
        for index in range(WARMUP):
            right = losses[base][index]
            if abs(values[index] - right) > TOLERANCE * abs(right):
                sys.exit(f"loss {index} of {name!r} is {values[index]!r}, of {base!r} {right!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a microbatch")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence, at most 128")
    parser.add_argument("--schedule", default="1f1b", help="pfx's; the peer's is 1F1B")
    parser.add_argument("--peer-only", action="store_true", help="leave pfx out")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    if args.simulated:
        return simulated(args)
    if "RANK" in os.environ:
        return worker(args)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={PROCESSES}", __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
