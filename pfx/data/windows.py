"""Documents joined to one sequence and cut into rows, as Megatron-LM does for pretraining."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

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
    """The order of documents, where each ends in their sequence, and the order of rows."""

    documents: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Windows:
    """Cut the sequence of all documents into rows of ``seq_len`` tokens and their labels.

    In each epoch the documents are joined in a new order and cut after every ``seq_len`` tokens;
    the label of a row's last token is the first token of the next row. Each row is seen once an
    epoch, in shuffled order. Up to ``seq_len`` tokens at the end of the sequence are left out, other
    ones in each epoch.

    Args:
        documents: what to read.
        seq_len: tokens of a row.
        shuffle: False: documents and rows in the order of the file.

    Raises:
        DataError: there are fewer than ``seq_len + 1`` tokens.
    """

    documents: Documents
    seq_len: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_seq_len("Windows", self.seq_len)
        check_not_empty("Windows", self.documents)
        if self.size == 0:
            what = f"has {self.documents.num_tokens} tokens; a row and its labels need "
            fix = f"seq_len={max(self.documents.num_tokens - 1, 1)}, or more documents"
            where = f"Windows: {self.documents.name}"
            raise DataError(message(where, f"{what}{self.seq_len + 1}.", fix=fix))

    @property
    def size(self) -> int:
        """The rows of an epoch."""
        return max(self.documents.num_tokens - 1, 0) // self.seq_len

    def read(self, seed: int, numbers: np.ndarray) -> Rows:
        """Return the rows at some places of the endless sequence of epochs."""
        pieces = [self._pieces(seed, int(number)) for number in numbers]
        shape = (len(pieces), self.seq_len + 1)
        none = [np.empty(0, np.int64)]
        where = np.concatenate(none + [places(piece) for piece in pieces]).reshape(shape)
        segments = np.concatenate(none + [numbered(piece) for piece in pieces]).reshape(shape)
        tokens = self.documents.tokens_at(where)
        learnt = self.documents.learnt_at(where[:, 1:])
        labels = np.where(learnt, tokens[:, 1:], IGNORED_LABEL)
        crosses = segments[:, 1:] != segments[:, :-1]
        return Rows(tokens[:, :-1], labels, segments[:, :-1], crosses)

    def ids(self, seed: int, numbers: np.ndarray) -> list[SampleId]:
        """Return which rows and documents are at some places."""
        found = []
        for number in numbers:
            epoch, at = divmod(int(number), self.size)
            row = int(self._epoch(seed, epoch).rows[at])
            documents = self._pieces(seed, int(number)).document + self.documents.first
            found.append(SampleId(0, epoch, row, tuple(documents.tolist())))
        return found

    def _pieces(self, seed: int, number: int) -> Piece:
        """Return the documents that a row and its last label are cut from."""
        epoch_number, at = divmod(number, self.size)
        epoch = self._epoch(seed, epoch_number)
        start = int(epoch.rows[at]) * self.seq_len
        end = start + self.seq_len + 1
        first, last = np.searchsorted(epoch.ends, [start, end - 1], side="right")
        document = epoch.documents[first : last + 1]
        starts, ends = self.documents.bounds
        begin, length = starts[document].copy(), ends[document] - starts[document]
        before = start - int(epoch.ends[first] - length[0])  # of the first document's tokens
        begin[0] += before
        length[0] -= before
        length[-1] -= int(epoch.ends[last]) - end
        return Piece(document, begin, length)

    @cached_property
    def _epoch(self) -> Callable[[int, int], _Epoch]:
        return two_epochs(self._make_epoch)

    def _make_epoch(self, seed: int, epoch: int) -> _Epoch:
        starts, ends = self.documents.bounds
        documents = np.flatnonzero(ends > starts)
        rows = np.arange(self.size)
        if self.shuffle:
            documents = documents[permutation(seed, epoch, 0, len(documents))]
            rows = permutation(seed, epoch, 1, self.size)
        return _Epoch(documents, np.cumsum(ends[documents] - starts[documents]), rows)
