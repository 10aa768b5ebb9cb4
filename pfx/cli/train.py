"""``pfx train config.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from pfx.recipe import resolved
from pfx.recipe.build import make_step
from pfx.recipe.config_file import load
from pfx.recipe.lost import LostRanksError
from pfx.recipe.overrides import overridden
from pfx.recipe.session import train
from pfx.recipe.signals import STOPPED
from pfx.recipe.sources import sources

CODES = {"done": 0, "stopped": STOPPED, "failed": 1}


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(
        prog="pfx train",
        description="Train as config.py says, whose config() returns a pfx.recipe.Run. A run that finds "
        "checkpoints in its directory goes on from the last one.",
        epilog="Real processes: torchrun --nproc-per-node N -m pfx train config.py",
    )
    made.add_argument("config", type=Path, help="a Python file with config() -> Run")
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="replace a setting: --set train.steps=100 --set plan.tp=2",
    )  # fmt: skip
    made.add_argument("--directory", help="the same as --set directory=...")
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="show the resolved config, check that it fits, and stop",
    )
    return made


def main(args: argparse.Namespace) -> int:
    """Train; returns 0 when done, 75 when stopped, 1 when the monitor gave up."""
    run = overridden(load(args.config), args.assignments)
    assignments = list(args.assignments)
    if args.directory is not None:
        run = dataclasses.replace(run, directory=args.directory)
        assignments.append(f"directory={args.directory}")
    origin = resolved.origins(run, str(args.config), assignments)
    if args.dry_run:
        print(json.dumps(resolved.resolved(run, origin), indent=2))
        make_step(run)
        sources(run)
        return 0
    try:
        return CODES[train(run, origin).ending]
    except LostRanksError as error:
        # Threads of the communication library wait for who is gone: an ordinary exit would too.
        sys.stderr.write(f"LostRanksError: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(error.exit_code)
