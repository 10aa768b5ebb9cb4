"""Whole documents packed into rows, none cut that fits into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pfx.data.best_fit import best_fit
from pfx.data.documents import Documents
from pfx.data.error import DataError
from pfx.data.samples import (
    IGNORED_LABEL,
    Piece,
    Rows,
    SampleId,
    check_not_empty,
    check_seq_len,
    numbered,
    permutation,
    places,
    two_epochs,
)
from pfx.errors import message


class _Epoch(NamedTuple):
    """The pieces in the order of their rows, where each row's begin, and the order of rows."""

    pieces: np.ndarray
    starts: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Packed:
    """Pack documents into rows of ``seq_len`` tokens, each row as full as best-fit makes it.

    A document of n tokens takes n - 1 places: every token but the last is an input, every token but
    the first a label, and no label is another document's. Only a document longer than a row is cut,
    into pieces that overlap by the one token that is label in one and input in the next, so that
    every token but a document's first is a label once an epoch. A document of one token gives
    nothing. The rest of a row is padding: label -100, and a segment of its own. Best-fit-decreasing
    packing (Ding et al. 2024, arXiv:2404.10830, section 3), anew in each epoch.

    Args:
        documents: what to read.
        seq_len: tokens of a row.
        pad_id: the token of the padding.
        shuffle: False: the same rows in each epoch.

    Raises:
        DataError: no document has two tokens.
    """

    documents: Documents
    seq_len: int
    pad_id: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_seq_len("Packed", self.seq_len)
        check_not_empty("Packed", self.documents)
        if not len(self._pieces.length):
            what = "has no document of two tokens, so nothing to predict."
            raise DataError(message(f"Packed: {self.documents.name}", what))

    @cached_property
    def size(self) -> int:
        """The rows of an epoch: best-fit makes equally many of equal lengths in any order."""
        return int(best_fit(self._pieces.length, self.seq_len).max()) + 1

    def read(self, seed: int, numbers: np.ndarray) -> Rows:
        """Return the rows at some places of the endless sequence of epochs."""
        shape = (len(numbers), self.seq_len)
        rows = Rows(
            np.full(shape, self.pad_id, np.int64),
            np.full(shape, IGNORED_LABEL, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, bool),
        )
        for i, number in enumerate(numbers):
            piece = self._row(seed, int(number))
            where = places(piece)
            used = len(where)
            rows.tokens[i, :used] = self.documents.tokens_at(where)
            learnt = self.documents.learnt_at(where + 1)
            labels = self.documents.tokens_at(where + 1)
            rows.labels[i, :used] = np.where(learnt, labels, IGNORED_LABEL)
            rows.segments[i, :used] = numbered(piece)
            rows.segments[i, used:] = len(piece.length)
        return rows

    def ids(self, seed: int, numbers: np.ndarray) -> list[SampleId]:
        """Return which rows and documents are at some places."""
        found = []
        for number in numbers:
            epoch, at = divmod(int(number), self.size)
            row = int(self._epoch(seed, epoch).rows[at])
            documents = self._row(seed, int(number)).document + self.documents.first
            found.append(SampleId(0, epoch, row, tuple(documents.tolist())))
        return found

    def _row(self, seed: int, number: int) -> Piece:
        epoch_number, at = divmod(number, self.size)
        epoch = self._epoch(seed, epoch_number)
        row = int(epoch.rows[at])
        chosen = epoch.pieces[epoch.starts[row] : epoch.starts[row + 1]]
        return Piece(*(array[chosen] for array in self._pieces))

    @cached_property
    def _pieces(self) -> Piece:
        """Every document's predictions, in pieces of at most ``seq_len``."""
        starts, ends = self.documents.bounds
        predictions = np.maximum(ends - starts - 1, 0)
        counts = -(-predictions // self.seq_len)
        document = np.repeat(np.arange(len(starts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        before = (np.arange(len(document)) - first) * self.seq_len
        length = np.minimum(predictions[document] - before, self.seq_len)
        return Piece(document, starts[document] + before, length)

    @cached_property
    def _epoch(self) -> Callable[[int, int], _Epoch]:
        return two_epochs(self._make_epoch)

    def _make_epoch(self, seed: int, epoch: int) -> _Epoch:
        count = len(self._pieces.length)
        order, rows = np.arange(count), np.arange(self.size)
        if self.shuffle:
            order = permutation(seed, epoch, 0, count)
            rows = permutation(seed, epoch, 1, self.size)
        row_of = best_fit(self._pieces.length[order], self.seq_len)
        by_row = np.argsort(row_of, kind="stable")
        starts = np.searchsorted(row_of[by_row], np.arange(self.size + 1))
        return _Epoch(order[by_row], starts, rows)
