"""Train a byte-level GPT on real text, on eight simulated devices or on real processes.

    python models/demo.py                                        # dp=4 x tp=2, all in this process
    python models/demo.py --tp 4 --dp 2 --zero 1                 # another plan, the same losses
    python models/demo.py --tp 1 --pp 2 --schedule zb-h1         # a pipeline, the same losses
    torchrun --nproc-per-node 2 models/demo.py --dp 2 --tp 1     # real processes, the same losses

The text is the Python standard library's own documentation, or any file given with ``--text``. At the
end come the collective bill of a step, the memory of a device, the difference from one device, and
what the model has learnt to write.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pfx
from models import gpt
from models.sampling import generate


@dataclass(frozen=True)
class Args:
    """What to train, for how long, and how it is spread over devices."""

    text: Path | None = None
    """A text file; None: the documentation of the Python standard library."""
    steps: int = 500
    batch: int = 8
    seq: int = 128
    embed: int = 192
    layers: int = 4
    heads: int = 8
    lr: float = 1.5e-3
    dp: int = 4
    tp: int = 2
    pp: int = 1
    schedule: str = "1f1b"
    """Of a pipeline: a name of `pfx.schedules.build`."""
    zero: int | None = None
    """None: 3, and 1 with a pipeline."""
    sequence_parallel: bool = True
    microbatches: int | None = None
    """None: as many as pipeline stages."""
    compare_steps: int = 20
    """How many steps are repeated on one device and compared."""
    sample: int = 300
    """How many bytes to write at the end."""
    device: str = "cpu"


def load_text(path: Path | None) -> bytes:
    """The bytes to learn from."""
    if path is not None:
        return path.read_bytes()
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: bytes) -> float:
    """Entropy of the byte frequencies in nats: what a model that sees no context can reach."""
    counts, total = Counter(text), len(text)
    return -sum(n / total * math.log(n / total) for n in counts.values())


def batch_at(data: torch.Tensor, step: int, args: Args) -> dict[str, torch.Tensor]:
    """The batch of a step: a pure function of the step number."""
    key = pfx.random.fold_in(pfx.random.key(1), step)
    start = pfx.random.randint(key, (args.batch, 1), 0, len(data) - args.seq - 1).long()
    window = data[start + torch.arange(args.seq + 1)].long()
    return {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


def build(args: Args) -> tuple[gpt.Config, pfx.TrainStep]:
    """The model's sizes and its compiled training step."""
    config = gpt.Config(
        num_layers=args.layers, embed_dim=args.embed, num_heads=args.heads,
        mlp_dim=4 * args.embed, vocab_size=256, max_seq_len=args.seq,
    )  # fmt: skip
    schedule = pfx.optim.schedules.cosine(
        args.lr, total_steps=args.steps, warmup_steps=min(20, args.steps // 10)
    )
    decayed = pfx.optim.decay_mask(gpt.axes(config))
    optimizer = pfx.optim.chain(
        pfx.optim.clip_by_global_norm(1.0),
        pfx.optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    plan = pfx.Plan(
        dp=args.dp, tp=args.tp, pp=args.pp, schedule=args.schedule,
        zero=(3 if args.pp == 1 else 1) if args.zero is None else args.zero,
        microbatches=args.microbatches or args.pp,
        sequence_parallel=args.sequence_parallel and args.tp > 1,
    )  # fmt: skip
    train = pfx.make_train_step(
        gpt.loss_fn(config), optimizer, plan, init=lambda key: gpt.init(config, key),
        axes=gpt.axes(config), mesh=plan.mesh(device=args.device),
    )  # fmt: skip
    return config, train


def run(
    train: pfx.TrainStep, data: torch.Tensor, args: Args, steps: int
) -> Iterator[tuple[pfx.TrainState, dict[str, float]]]:
    """Yield the state and the numbers of each step."""
    state = train.init(pfx.random.key(0))
    for step in range(steps):
        start = time.perf_counter()
        state, metrics = train.step(state, batch_at(data, step, args))
        numbers = {name: float(value) for name, value in metrics.items()}
        numbers["tokens/s"] = args.batch * args.seq / (time.perf_counter() - start)
        yield state, numbers


def line(step: int, numbers: dict[str, float]) -> str:
    """One aligned line a step."""
    return (
        f"step {step:>4}  loss {numbers['loss']:.6f}  grad norm {numbers['grad_norm']:7.4f}  "
        f"lr {numbers['lr']:.2e}  {numbers['tokens/s']:>8,.0f} tokens/s"
    )


def write_on(
    config: gpt.Config, train: pfx.TrainStep, state: pfx.TrainState, prompt: bytes, count: int
) -> bytes:
    """Sample a continuation, one byte at a time, with the parameters where they are."""
    compiled = functools.partial(
        pfx.jit, mesh=train.mesh, out_specs=pfx.P(), names=train.plan.logical_names
    )
    written = generate(
        gpt.apply, state.params, config, torch.tensor([list(prompt)]), count, pfx.random.key(2),
        temperature=0.7, compile=compiled,
    )  # fmt: skip
    return bytes(written[0].tolist())


def compare(
    train: pfx.TrainStep, data: torch.Tensor, args: Args, losses: list[float]
) -> tuple[float, int]:
    """The largest relative difference of the loss from the same steps on one device."""
    alone = [
        numbers["loss"] for _, numbers in run(train.on_one_device(), data, args, args.compare_steps)
    ]
    pairs = list(zip(losses, alone, strict=False))
    return max(abs(a - b) / abs(b) for a, b in pairs), len(pairs)


def main(args: Args) -> None:
    """Train, and report."""
    console = Console(quiet=int(os.environ.get("RANK", "0")) > 0, highlight=False, soft_wrap=True)
    text = load_text(args.text)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    config, train = build(args)
    entropy = unigram_entropy(text)
    size = sum(math.prod(leaf.shape) for leaf in pfx.tree.leaves(train.shapes.params))
    console.print(f"text: {len(text):,} bytes, unigram entropy {entropy:.3f} nats a byte")
    console.print(
        f"model: {size:,} parameters; mesh: {train.mesh} ({train.mesh.kind}); {train.plan}"
    )
    for note in train.report:
        console.print(f"note: {note}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=args.steps)
        for step, (after, numbers) in enumerate(run(train, data, args, args.steps), 1):
            state = after
            losses.append(numbers["loss"])
            progress.console.print(line(step, numbers))
            progress.advance(task)
    program = train.lower(batch_at(data, 0, args))
    written = write_on(config, train, state, b"The ", args.sample) if args.sample else b""
    console.print("\n[bold]The collectives of one step[/bold]")
    console.print(program.bill())
    console.print("\n[bold]Memory of one device[/bold]")
    console.print(str(program.memory()))
    if program.pipelines():
        console.print(f"\n[bold]Who works when[/bold] (predicted, {train.plan.schedule})")
        console.print(pfx.viz.timeline_text(program))
    if written:
        console.print("\n[bold]What it writes[/bold]")
        console.print(written.decode(errors="replace"), markup=False)
    mean = sum(losses[-10:]) / len(losses[-10:])
    console.print(
        f"\nloss {mean:.3f} nats a byte over the last steps; unigram entropy {entropy:.3f}"
    )
    if args.compare_steps and train.mesh.kind == "simulated":
        difference, count = compare(train, data, args, losses)
        console.print(
            f"largest relative difference of the loss from one device, {count} steps: {difference:.1e}"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
