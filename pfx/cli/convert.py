"""``pfx convert SOURCE TARGET``: Hugging Face weights to a checkpoint, or a run's parameters back."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pfx.recipe.overrides import ConfigError
from pfx.recipe.plain import parse
from pfx.recipe.weights import from_hf, is_run, to_hf, trained


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(
        prog="pfx convert",
        description="From the directory of a run: its parameters as Hugging Face weights. From a folder "
        "of Hugging Face weights: a checkpoint for pfx generate and model.weights.",
    )
    made.add_argument("directory", type=Path, help="of a run, or of Hugging Face weights")
    add_export(made)
    made.add_argument("--format", default="models.hf", help="the module that knows the files")
    return made


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add what writing Hugging Face weights is given."""
    parser.add_argument("target", type=Path, help="a directory that is new or empty")
    parser.add_argument("--step", type=int, help="of which checkpoint; the latest")
    parser.add_argument("--dtype", help="of the weights written; that of the parameters")
    parser.add_argument("--tokenizer", help="a folder whose tokenizer files are copied")


def main(args: argparse.Namespace) -> int:
    """Convert in the direction that the source asks for."""
    if is_run(args.directory):
        return export(args)
    from_hf(args.directory, args.target, args.format)
    print(f"{args.target}: the weights of {args.directory}, as step 0")
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a run's parameters as Hugging Face weights."""
    try:
        dtype = None if args.dtype is None else parse(args.dtype, torch.dtype)
    except ValueError:
        raise ConfigError(
            f"--dtype {args.dtype}: no such dtype.\n  fix: --dtype bfloat16"
        ) from None
    run = trained(args.directory, args.step)
    to_hf(run, args.target, dtype, args.tokenizer)
    print(f"{args.target}: the parameters of {args.directory}, step {run.step}")
    return 0
