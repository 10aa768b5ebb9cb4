"""``pfx tokenizer corpus.jsonl --vocab-size 32000 --output tokenizer.json``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfx.data import train_bpe


def parser() -> argparse.ArgumentParser:
    """What it is given."""
    made = argparse.ArgumentParser(
        prog="pfx tokenizer", description="Train a byte-level BPE on the texts of JSONL files."
    )
    made.add_argument("files", nargs="+", type=Path, help="JSONL files")
    made.add_argument("--output", required=True, type=Path, help="the tokenizer.json to write")
    made.add_argument("--vocab-size", type=int, default=32000, help="the most ids (32000)")
    made.add_argument("--key", default="text", help='of the text in each record ("text")')
    return made


def main(args: argparse.Namespace) -> int:
    """Train and write it."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    made = train_bpe(args.files, args.vocab_size, args.output, key=args.key)
    print(f"{args.output}: {made.vocab_size:,} ids; a document ends with {made.eod_id}")
    return 0
