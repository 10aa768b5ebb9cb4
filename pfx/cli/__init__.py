"""The command ``pfx``: each subcommand is a module of this package, imported when it is asked for.

Exit codes: 0 done, 1 an error, 2 a wrong command line or config, 69 other ranks were lost, 75 asked
to stop and saved; run it again to go on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from pfx.errors import PfxError
from pfx.recipe.overrides import ConfigError

ERROR, USAGE, INTERRUPTED = 1, 2, 130

COMMANDS: Mapping[str, str] = {
    "train": "train a model as a config file says; goes on from its last checkpoint",
    "preprocess": "turn JSONL into token files that training reads",
    "tokenizer": "train a BPE tokenizer on text or JSONL",
    "generate": "write on from a prompt, with a trained model",
    "ckpt": "list, show, verify and export checkpoints",
    "convert": "Hugging Face weights to a checkpoint, and back",
    "rerun": "repeat a step of a run, and compare its bits",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args, rest = _parser().parse_known_args(given[:1])
    if rest:
        _parser().parse_args(given[:1])
    if not args.command:
        sys.stderr.write(_parser().format_help())
        return USAGE
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    command = importlib.import_module(f"pfx.cli.{args.command}")
    parser: argparse.ArgumentParser = command.parser()
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    options = parser.parse_args(given[1:])
    try:
        code = command.main(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # who read the output, head or less, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except (PfxError, OSError) as error:
        if options.traceback:
            raise
        return _report(error)


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="pfx",
        usage="pfx COMMAND ...",
        description="Train large models on PyTorch.",
        epilog="commands:\n" + "\n".join(lines) + "\n\npfx COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, nargs="?", help=argparse.SUPPRESS)
    return parser


def _report(error: Exception) -> int:
    """Show an error of the user's as its own text alone."""
    rank = os.environ.get("RANK")
    prefix = f"rank {rank}: " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    kind = type(error).__name__
    sys.stderr.write(f"{prefix}{kind}: {error}\n")
    return getattr(error, "exit_code", USAGE if isinstance(error, ConfigError) else ERROR)
