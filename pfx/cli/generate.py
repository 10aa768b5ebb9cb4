"""``pfx generate runs/mine --prompt "The"``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfx.plan import Plan
from pfx.recipe.generate import tokenizer_of, write_on
from pfx.recipe.weights import trained


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(prog="pfx generate", description="Write on from a prompt.")
    made.add_argument(
        "run",
        type=Path,
        help="the directory of a run, or what pfx convert made of Hugging Face weights",
    )
    made.add_argument("--prompt", required=True, help="the text to go on from")
    made.add_argument("--length", type=int, default=100, help="tokens to write (100)")
    made.add_argument("--step", type=int, help="of which checkpoint; the latest")
    made.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most probable (0.8)"
    )
    made.add_argument("--top-k", type=int, help="draw among so many tokens")
    made.add_argument("--top-p", type=float, help="draw among tokens of that probability together")
    made.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    made.add_argument("--tokenizer", help='a tokenizer.json, or "bytes"; that of the run')
    made.add_argument("--tp", type=int, default=1, help="devices to spread the model over (1)")
    made.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    return made


def main(args: argparse.Namespace) -> int:
    """Print the prompt and what follows."""
    run = trained(args.run, args.step)
    text = write_on(
        run, tokenizer_of(run, args.tokenizer), args.prompt, args.length,
        plan=Plan(tp=args.tp), seed=args.seed, device=args.device,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
    )  # fmt: skip
    print(text)
    return 0
