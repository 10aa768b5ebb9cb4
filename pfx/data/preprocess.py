"""JSONL files to a ``.bin`` and ``.idx`` pair, by parallel workers and with flat memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pfx.data.documents import MASK_SUFFIX
from pfx.data.error import DataError
from pfx.data.indexed import dtype_for, pair
from pfx.data.indexed_writer import IndexedWriter, finish_together
from pfx.data.jsonl import CHUNK_BYTES, BadLine, chunks, text_of, total_size
from pfx.data.tokenizer import Tokenizer
from pfx.data.workers import Columns, Encoded, Encoder, encode_chunks
from pfx.errors import message

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes of all files."""

OnBad = Literal["collect", "stop"]
_KEPT_BAD_LINES = 1000


@dataclass(frozen=True)
class Summary:
    """What `preprocess` did.

    Args:
        prefix: of the files that were written.
        documents: how many were written.
        tokens: likewise, end-of-document tokens included.
        learnt: tokens that the loss counts: all, or those of the assistant.
        empty: records that were left out because they gave no token.
        bad_count: lines that gave no document.
        bad: the first 1000 of them.
        bytes: the size of the input.
        seconds: how long it took.
    """

    prefix: str
    documents: int
    tokens: int
    learnt: int
    empty: int
    bad_count: int
    bad: tuple[BadLine, ...]
    bytes: int
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.prefix}: {self.documents:,} documents, {self.tokens:,} tokens "
            f"from {self.bytes:,} bytes in {self.seconds:.1f} s"
        ]
        if self.learnt < self.tokens:
            lines.append(f"{self.learnt:,} of the tokens are learnt")
        if self.empty:
            lines.append(f"{self.empty:,} empty records were left out")
        if self.bad_count:
            lines.append(f"{self.bad_count:,} bad lines were left out:")
            lines += [f"  {bad}" for bad in self.bad[:10]]
            if self.bad_count > 10:
                lines.append(f"  and {self.bad_count - 10:,} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class TextEncoder:
    """Records with a text to its tokens, and the token that ends a document if there is one."""

    tokenizer: Tokenizer
    key: str
    end: int | None

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtype of the tokens."""
        return (dtype_for(self.tokenizer.vocab_size),)

    def encode(self, records: list[Any]) -> list[Columns | str]:
        """Return the tokens of each record; none for an empty text."""
        found = [text_of(record, self.key) for record in records]
        ids = iter(self.tokenizer.encode_batch([text for text, reason in found if not reason]))
        return [reason or (self._ended(next(ids)),) for _, reason in found]

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        if self.end is None or not len(ids):
            return ids
        return np.concatenate((ids, np.array([self.end])))


def preprocess(
    files: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    *,
    key: str = "text",
    append_eod: bool = True,
    workers: int | None = None,
    on_bad: OnBad = "collect",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize the texts of JSONL files to ``PREFIX.bin`` and ``PREFIX.idx``.

    The files are the same whatever the number of workers. Records whose text gives no token are
    left out, as are lines that are no JSON object with a string under `key`; the summary counts
    both. Nothing that looks complete is left by a run that does not finish.

    Args:
        files: JSONL files, in the order in which their documents are stored.
        tokenizer: from `load_tokenizer` or `train_bpe`.
        prefix: what the names of both files begin with.
        key: of the text in each record.
        append_eod: end each document with the tokenizer's end-of-document token.
        workers: processes that tokenize; None: one a core, and none besides for a small input. They
            import the calling script, which must not do so again: it calls this under
            ``if __name__ == "__main__":``.
        on_bad: "stop" makes the first bad line an error.
        overwrite: replace files of that prefix.
        progress: called after each chunk of about a megabyte.

    Raises:
        DataError: a file cannot be read, the output exists, the tokenizer has no end-of-document
            token, a worker died, or a line is bad and `on_bad` is "stop".

    >>> import tempfile, pathlib
    >>> from pfx.data import ByteTokenizer, IndexedDataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.jsonl").write_text('{"text": "hi"}\\n{"text": "yo"}\\n')
    ...     summary = preprocess([f"{folder}/a.jsonl"], ByteTokenizer(), f"{folder}/a")
    ...     dataset = IndexedDataset.open(f"{folder}/a")
    >>> summary.documents, dataset.document(1)
    (2, array([121, 111, 256], dtype=uint16))
    """
    if append_eod and tokenizer.eod_id is None:
        fix = "load_tokenizer(..., eod=<the token that ends a document>), or append_eod=False"
        raise DataError(
            message("preprocess: the tokenizer", "has no end-of-document token.", fix=fix)
        )
    encoder = TextEncoder(tokenizer, key, tokenizer.eod_id if append_eod else None)
    return run(
        files, encoder, [os.fspath(prefix)], workers=workers, on_bad=on_bad, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip


def run(
    files: Sequence[str | os.PathLike[str]],
    encoder: Encoder,
    prefixes: Sequence[str],
    *,
    workers: int | None,
    on_bad: OnBad,
    overwrite: bool,
    progress: Progress | None,
) -> Summary:
    """Encode files to one pair of files a column; see `preprocess`."""
    if on_bad not in ("collect", "stop"):
        raise ValueError(message(f"on_bad={on_bad!r}", 'is neither "collect" nor "stop".'))
    start, total = time.perf_counter(), total_size(files)
    count = _workers(workers, total)
    bad: list[BadLine] = []
    bad_count = empty = learnt = done = 0
    position = ("", 0)  # of the last chunk's end: the file, and its lines so far
    stale = [] if len(prefixes) > 1 else [pair(prefixes[0] + MASK_SUFFIX)[1]]
    for path in stale:
        if path.exists() and not overwrite:
            what = f"exists, and would be taken for the loss mask of {prefixes[0]}."
            fix = "choose another prefix; or overwrite=True, which removes it"
            raise DataError(message(str(path), what, fix=fix))
    with ExitStack() as stack:
        writers: list[IndexedWriter] = []
        for prefix, dtype in zip(prefixes, encoder.dtypes, strict=True):
            writers.append(IndexedWriter(prefix, dtype, overwrite=overwrite))
            stack.callback(writers[-1].discard)  # which leaves a finished one alone
        for chunk, encoded in encode_chunks(chunks(files), encoder, workers=count):
            first_line = position[1] if position[0] == chunk.file and chunk.offset else 0
            position = chunk.file, first_line + encoded.lines
            _write(writers, encoded)
            found = [BadLine(chunk.file, first_line + n, reason) for n, reason in encoded.bad]
            if found and on_bad == "stop":
                raise DataError(message(f"{found[0].file}:{found[0].line}:", f"{found[0].reason}."))
            bad += found[: _KEPT_BAD_LINES - len(bad)]
            bad_count += len(found)
            empty += encoded.empty
            learnt += (
                int(encoded.columns[1].sum()) if len(prefixes) > 1 else len(encoded.columns[0])
            )
            done += chunk.size
            if progress is not None:
                progress(done, total)
        finish_together(writers, stale=stale)
    seconds = time.perf_counter() - start
    return Summary(
        prefix=prefixes[0],
        documents=writers[0].num_documents,
        tokens=writers[0].num_tokens,
        learnt=learnt,
        empty=empty,
        bad_count=bad_count,
        bad=tuple(bad),
        bytes=total,
        seconds=seconds,
    )


def _write(writers: Sequence[IndexedWriter], encoded: Encoded) -> None:
    for writer, column in zip(writers, encoded.columns, strict=True):
        writer.add_documents(column, encoded.lengths)


def _workers(workers: int | None, size: int) -> int:
    """Return how many processes tokenize: starting one pays for a few megabytes."""
    if workers is None:
        return max(1, min(os.cpu_count() or 1, size // (8 * CHUNK_BYTES)))
    if workers < 1:
        raise ValueError(
            message(f"workers={workers}", "is no number of processes.", fix="workers=1")
        )
    return workers
