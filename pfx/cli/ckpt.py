"""``pfx ckpt ls | show | verify | export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfx import checkpoint
from pfx.cli.convert import add_export, export
from pfx.errors import CheckpointError, message
from pfx.recipe.saves import FOLDER


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(prog="pfx ckpt", description="Look at checkpoints.")
    chosen = made.add_subparsers(dest="what", required=True, metavar="ls | show | verify | export")
    for name, text in (
        ("ls", "a line for each step"),
        ("show", "what a step holds, and its metadata"),
        ("verify", "read everything and compare checksums; exit code 1 if anything is wrong"),
        ("export", "write the parameters of a step as Hugging Face weights"),
    ):
        one = chosen.add_parser(name, help=text, description=text)
        one.add_argument("directory", type=Path, help="of a run, or of its checkpoints")
        if name == "export":
            add_export(one)
        elif name != "ls":
            one.add_argument("--step", type=int, help="all" if name == "verify" else "the latest")
    return made


def main(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    if args.what == "export":
        return export(args)
    below = args.directory / FOLDER
    directory = below if below.is_dir() else args.directory
    if not directory.is_dir():
        raise CheckpointError(message(str(directory), "is no directory."))
    if args.what == "verify":
        sound, text = checkpoint.verdict(directory, args.step)
        print(text)
        return 0 if sound else 1
    if args.what == "show":
        print(checkpoint.contents(directory, args.step))
    else:
        print(checkpoint.listing(directory))
    return 0
