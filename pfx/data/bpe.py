"""Train a byte-level BPE on text, with the `tokenizers` package."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from pfx.data.error import DataError
from pfx.data.jsonl import iterate_texts
from pfx.data.tokenizer import END_OF_DOCUMENT, FileTokenizer, import_tokenizers
from pfx.errors import message

_SMALLEST = 257  # every byte, and the end of a document


def train_bpe(
    files: Sequence[str | os.PathLike[str]],
    vocab_size: int,
    path: str | os.PathLike[str],
    *,
    key: str = "text",
) -> FileTokenizer:
    """Train a byte-level BPE on the texts of JSONL files, and write it as a ``tokenizer.json``.

    Merges the most frequent pairs of tokens until the vocabulary is full (Sennrich et al. 2016,
    arXiv:1508.07909, section 3.2), over bytes, so that every text can be encoded and comes back as
    it was (Radford et al. 2019, section 2.2). Id 0 is ``<|endoftext|>``.

    Args:
        files: JSONL files; bad lines are left out.
        vocab_size: the most ids, at least 257; a small text gives fewer.
        path: the file to write.
        key: of the text in each record.

    Returns:
        The tokenizer.

    Raises:
        DataError: `vocab_size` is too small, or the files hold no text.
    """
    if vocab_size < _SMALLEST:
        what = f"is {vocab_size}; 256 bytes and the end of a document take {_SMALLEST}."
        raise DataError(message("train_bpe: vocab_size", what))
    tokenizers = import_tokenizers()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = iterate_texts(files, key=key)
    first = next(texts, None)
    if first is None:
        names = ", ".join(os.fspath(file) for file in files)
        raise DataError(message(f"train_bpe: {names}", f'hold no text under "{key}".'))
    bpe.train_from_iterator(itertools.chain([first], texts), trainer)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".incomplete")
    bpe.save(str(part))
    os.replace(part, target)
    return FileTokenizer(str(target), END_OF_DOCUMENT)
