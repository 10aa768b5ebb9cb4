"""``pfx preprocess corpus.jsonl --tokenizer tokenizer.json --output data/corpus``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pfx.data import (
    CHATML,
    ChatTemplate,
    load_chat_template,
    load_tokenizer,
    preprocess,
    preprocess_chat,
    progress_bar,
)
from pfx.errors import message
from pfx.recipe.overrides import ConfigError


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
    made.add_argument(
        "--chat", action="store_true",
        help="records hold messages; OUTPUT_mask says what is learnt: what the assistant writes",
    )  # fmt: skip
    made.add_argument(
        "--template",
        help="of --chat: a file, a model's folder, or \"chatml\"; the tokenizer's folder",
    )
    made.add_argument("--workers", type=int, help="processes; one a core")
    made.add_argument("--strict", action="store_true", help="stop at the first bad line")
    made.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return made


def main(args: argparse.Namespace) -> int:
    """Write the files and say how many documents, and which lines were bad; 1 if there is none."""
    if args.workers is not None and args.workers < 1:
        raise ConfigError(message(f"--workers {args.workers}:", "no number of processes."))
    tokenizer = load_tokenizer(args.tokenizer, eod=args.eod)
    named: dict[str, Any] = {
        "workers": args.workers,
        "overwrite": args.overwrite,
        "on_bad": "stop" if args.strict else "collect",
    }
    if args.chat:
        named |= {"template": _template(args), "key": args.key or "messages"}
    else:
        named |= {"append_eod": not args.no_eod, "key": args.key or "text"}
    write = preprocess_chat if args.chat else preprocess
    shown = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    with progress_bar() if shown else nullcontext() as progress:
        summary = write(args.files, tokenizer, args.output, progress=progress, **named)
    print(summary)
    return 0 if summary.documents else 1


def _template(args: argparse.Namespace) -> ChatTemplate:
    """The chat template that was asked for, else that of the tokenizer's folder."""
    if args.template == "chatml":
        return ChatTemplate(CHATML)
    if args.template is None and args.tokenizer == "bytes":
        fix = "--template chatml"
        raise ConfigError(message("pfx preprocess --chat:", "bytes have no template.", fix=fix))
    path = args.template or args.tokenizer
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return load_chat_template(path if args.template else folder or ".")
