"""``pfx rerun config.py 1200``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfx.recipe.config_file import load
from pfx.recipe.overrides import overridden
from pfx.recipe.rerun import rerun


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(
        prog="pfx rerun",
        description="Repeat a step of a run from the checkpoint before it, run it twice, and compare "
        "bits with each other and losses with the run's log. Exit code 1 if the bits differ.",
    )
    made.add_argument("config", type=Path, help="the config of the run")
    made.add_argument("step", type=int, help="which step, from 1 on")
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="as for pfx train",
    )  # fmt: skip
    return made


def main(args: argparse.Namespace) -> int:
    """Print what came of it."""
    found = rerun(overridden(load(args.config), args.assignments), args.step, print)
    print(found)
    return 0 if found.same else 1
