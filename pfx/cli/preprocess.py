"""``pfx preprocess corpus.jsonl --tokenizer tokenizer.json --output data/corpus``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfx.data import load_tokenizer, preprocess


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(
        prog="pfx preprocess",
        description="Tokenize JSONL to OUTPUT.bin and OUTPUT.idx, in the form that Megatron-LM reads.",
    )
    made.add_argument("files", nargs="+", type=Path, help="JSONL files")
    made.add_argument("--tokenizer", required=True, help='a tokenizer.json, its folder, or "bytes"')
    made.add_argument("--output", required=True, help="what the names of the files begin with")
    made.add_argument(
        "--key", default=None, help='of the text, or of the messages ("text", "messages")'
    )
    made.add_argument("--eod", help="the token that ends a document")
    made.add_argument("--no-eod", action="store_true", help="do not end documents with a token")
    made.add_argument("--workers", type=int, help="processes; one a core")
    made.add_argument("--strict", action="store_true", help="stop at the first bad line")
    made.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return made


def main(args: argparse.Namespace) -> int:
    """Write the files and say how many documents, and which lines were bad."""
    tokenizer = load_tokenizer(args.tokenizer, eod=args.eod)
    common: dict[str, Any] = {
        "workers": args.workers,
        "overwrite": args.overwrite,
        "on_bad": "stop" if args.strict else "collect",
    }
    with bar() as progress:
        summary = preprocess(
            args.files, tokenizer, args.output, key=args.key or "text",
            append_eod=not args.no_eod, progress=progress, **common,
        )  # fmt: skip
    print(summary)
    return 0


@contextmanager
def bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar over bytes, on a terminal where rich is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield None
        return
    columns = ("tokenizing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("tokenizing", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
