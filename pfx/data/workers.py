"""Chunks of JSONL files to tokens in worker processes, in the order of the files."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol

import numpy as np

from pfx.data.error import DataError
from pfx.data.jsonl import Chunk, parse, read_chunk
from pfx.errors import message

Columns = tuple[np.ndarray, ...]
"""What is stored of a document: its tokens, and for chat a mask of the same length."""


class Encoder(Protocol):
    """Records to columns; goes to the workers by pickle."""

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtype of each column."""
        ...

    def encode(self, records: list[Any]) -> list[Columns | str]:
        """Return for each record its columns, empty to leave it out, or why it is bad."""
        ...


class Encoded(NamedTuple):
    """The documents of a chunk: columns joined, lengths, and what was odd."""

    columns: Columns
    lengths: np.ndarray
    empty: int
    bad: list[tuple[int, str]]
    lines: int


def encode_chunk(chunk: Chunk, encoder: Encoder) -> Encoded:
    """Read a chunk of a file and encode its records."""
    lines, count = read_chunk(chunk)
    parsed = [parse(line.data) for line in lines]
    good = [value for value, reason in parsed if not reason]
    results = iter(encoder.encode(good))
    bad: list[tuple[int, str]] = []
    documents: list[Columns] = []
    empty = 0
    for line, (_, reason) in zip(lines, parsed, strict=True):
        result = reason or next(results)
        if isinstance(result, str):
            bad.append((line.number, result))
        elif not len(result[0]):
            empty += 1
        else:
            documents.append(result)
    joined = tuple(
        _stored(np.concatenate([np.empty(0, dtype), *(d[i] for d in documents)]), dtype)
        for i, dtype in enumerate(encoder.dtypes)
    )
    lengths = np.array([len(columns[0]) for columns in documents], np.int64)
    return Encoded(joined, lengths, empty, bad, count)


def _stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array in its stored dtype if that loses nothing: fewer bytes through the pipe."""
    if len(array) and not np.iinfo(dtype).min <= array.min() <= array.max() <= np.iinfo(dtype).max:
        return array  # the writer says what is wrong
    return array.astype(dtype, copy=False)


def encode_chunks(
    chunks: Iterator[Chunk], encoder: Encoder, *, workers: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield the chunks in order with what they hold, as many at work as keep the workers busy.

    Raises:
        DataError: a worker died.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, encoder)
        return
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_one_core)
    pickled = pickle.dumps(encoder)
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode_here, chunk, pickled)))
            if len(waiting) > 2 * workers:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _next(waiting: deque[tuple[Chunk, Future[Encoded]]]) -> tuple[Chunk, Encoded]:
    chunk, future = waiting.popleft()
    try:
        return chunk, future.result()
    except BrokenProcessPool as error:
        what = "died: killed, perhaps for want of memory, or unable to start."
        where = f"a worker process, at byte {chunk.offset} of {chunk.file},"
        fix = 'use fewer workers; in a script, call this under `if __name__ == "__main__":`'
        raise DataError(message(where, what, fix=fix)) from error


def _context() -> BaseContext:
    """Return how workers start: from a server that has imported this module once.

    Forking the caller itself is not safe where it has threads, and torch and a progress bar do.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _one_core() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core, and no threads beside it


_loaded = lru_cache(maxsize=1)(pickle.loads)
"""A worker keeps its encoder from chunk to chunk."""


def _encode_here(chunk: Chunk, encoder: bytes) -> Encoded:
    return encode_chunk(chunk, _loaded(encoder))
