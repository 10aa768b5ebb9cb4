"""Preprocessing against the bare tokenizer, and reading batches against the step that consumes them.

    python bench/data.py [--megabytes 8] [--workers 2]

The text is the Python standard library's own documentation, repeated; the tokenizer a BPE of 8192
tokens trained on it. "Bare" is `encode_batch_fast` of the tokenizers package on texts that are in
memory already, its ids taken, in one process on one core: what `preprocess` does besides is reading,
parsing JSON, ranges of ids, writing and checking. One process is measured in seconds of its processor,
the best of runs in turns; several in seconds of the clock, with the time that they take to start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core each, for both sides

import torch

import pfx
from models import gpt
from pfx.data import Batches, Documents, Packed, Windows, preprocess, train_bpe
from pfx.data.tokenizer import FileTokenizer

CONFIG = gpt.Config(
    num_layers=4, embed_dim=256, num_heads=8, mlp_dim=1024, vocab_size=8192, max_seq_len=128
)
BATCH, SEQ = 8, 128


def paragraphs() -> list[str]:
    """The documentation in pieces of some kilobytes."""
    texts = [topics[name] for name in sorted(topics)]
    return [text[i : i + 4000] for text in texts for i in range(0, len(text), 4000)]


def write_jsonl(path: Path, texts: list[str]) -> int:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sum(len(text.encode()) for text in texts)


def bare_seconds(tokenizer: FileTokenizer, texts: list[str]) -> float:
    start = time.process_time()
    for first in range(0, len(texts), 256):
        for one in tokenizer._tokenizer.encode_batch_fast(texts[first : first + 256]):
            _ = one.ids
    return time.process_time() - start


def preprocess_seconds(path: Path, tokenizer: FileTokenizer, prefix: str) -> float:
    start = time.process_time()
    preprocess([path], tokenizer, prefix, workers=1, overwrite=True)
    return time.process_time() - start


def compare_preprocessing(folder: Path, megabytes: int, workers: int, repeats: int) -> None:
    texts = paragraphs()
    write_jsonl(folder / "once.jsonl", texts)
    tokenizer = train_bpe([folder / "once.jsonl"], CONFIG.vocab_size, folder / "tokenizer.json")
    texts = texts * max(1, round(megabytes * 2**20 / sum(map(len, texts))))
    path = folder / "text.jsonl"
    size = write_jsonl(path, texts) / 2**20
    bare, ours = [], []
    for _ in range(repeats):
        bare.append(bare_seconds(tokenizer, texts))
        ours.append(preprocess_seconds(path, tokenizer, f"{folder}/data"))
    print(f"bare tokenizer: {size / min(bare):.2f} MiB/s a core")
    ratio = min(bare) / min(ours)
    print(f"preprocess: {size / min(ours):.2f} MiB/s a core, {ratio:.2f} x the bare tokenizer")
    for count in sorted({1, workers}):
        summary = preprocess([path], tokenizer, f"{folder}/data", workers=count, overwrite=True)
        print(f"preprocess, workers={count}: {size / summary.seconds:.2f} MiB/s by the clock")


def compare_reading(folder: Path, repeats: int) -> None:
    documents = Documents.open(folder / "data")
    train = pfx.make_train_step(
        gpt.loss_fn(CONFIG), pfx.optim.adamw(1e-3), pfx.Plan(),
        init=lambda key: gpt.init(CONFIG, key), axes=gpt.axes(CONFIG),
    )  # fmt: skip
    kinds = {"windows": Windows(documents, SEQ), "packed": Packed(documents, SEQ)}
    state = train.init(pfx.random.key(0))
    for name, samples in kinds.items():
        batches = Batches(samples, BATCH, reset_positions=True, block_diagonal=True)
        state, _ = train.step(state, batches(0))
        reading, stepping = [], []
        for step in range(1, repeats + 1):
            start = time.process_time()
            batch = batches(step)
            reading.append(time.process_time() - start)
            state, metrics = train.step(state, batch)
            float(metrics["loss"])
            stepping.append(time.process_time() - start - reading[-1])
        read, step_time = statistics.median(reading), statistics.median(stepping)
        rate = BATCH * SEQ / read / 1e6
        print(
            f"{name}: a batch {1e3 * read:.2f} ms ({rate:.1f} million tokens/s), "
            f"a step {1e3 * step_time:.0f} ms: {step_time / read:.0f} x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_preprocessing(folder, args.megabytes, args.workers, args.repeats)
        compare_reading(folder, 3 * args.repeats)


if __name__ == "__main__":
    main()
