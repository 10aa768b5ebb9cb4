"""What a batch is drawn from: rows of one length, numbered without end, shuffled in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from pfx import random
from pfx.data.documents import Documents
from pfx.data.error import DataError
from pfx.errors import message

IGNORED_LABEL = -100
"""The label of a token that counts for no loss."""


class Rows(NamedTuple):
    """Rows of tokens, all (rows, seq_len).

    Args:
        tokens: int64.
        labels: int64, the token that follows each; `IGNORED_LABEL` where none is learnt.
        segments: int64, the number of the document within the row, from 0.
        crosses: bool, whether the label is the first token of another document.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segments: np.ndarray
    crosses: np.ndarray


class SampleId(NamedTuple):
    """Which row: its source in a blend, the epoch there, its number in it, and its documents."""

    source: int
    epoch: int
    sample: int
    documents: tuple[int, ...]


class Samples(Protocol):
    """Rows by their place in an endless sequence, every value a pure function of (seed, place)."""

    @property
    def seq_len(self) -> int:
        """The tokens of a row."""
        ...

    @property
    def size(self) -> int | None:
        """The rows of an epoch; None where there are no epochs."""
        ...

    def read(self, seed: int, numbers: np.ndarray) -> Rows:
        """Return the rows at some places of the sequence."""
        ...

    def ids(self, seed: int, numbers: np.ndarray) -> list[SampleId]:
        """Say which rows they are."""
        ...


class Piece(NamedTuple):
    """Part of a document in a row: the document, and where its tokens are in the file."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


def permutation(seed: int, epoch: int, stream: int, count: int) -> np.ndarray:
    """Return 0 to count - 1 in the order of an epoch; `stream` tells apart what is shuffled.

    >>> permutation(1, 0, 0, 5), permutation(1, 1, 0, 5)
    (array([2, 1, 3, 4, 0]), array([1, 2, 3, 0, 4]))
    """
    key = random.fold_in(random.key(seed, device="cpu"), stream)
    high, low = divmod(epoch, 1 << 32)
    key = random.fold_in(key, low)
    if high:
        key = random.fold_in(key, high)
    return random.permutation(key, count).numpy()


def two_epochs(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Keep what was made of the last two (seed, epoch): a batch may span the end of an epoch."""
    return lru_cache(maxsize=2)(make)


def check_seq_len(where: str, seq_len: int) -> None:
    """Raise unless a row can have so many tokens."""
    if seq_len < 1:
        raise ValueError(message(f"{where}: seq_len", f"is {seq_len}.", fix="a row needs a token"))


def check_not_empty(where: str, documents: Documents) -> None:
    """Raise if there is no document to read."""
    if len(documents) == 0:
        what = "has no document."
        fix = "leave it out, or split so that it gets one"
        raise DataError(message(f"{where}: {documents.name}", what, fix=fix))


def places(piece: Piece) -> np.ndarray:
    """Return where in the file each token of some pieces is, one piece after the other."""
    ends = np.cumsum(piece.length)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(piece.start - (ends - piece.length), piece.length) + np.arange(total)


def numbered(piece: Piece) -> np.ndarray:
    """Return the number of its piece for each token of some pieces."""
    return np.repeat(np.arange(len(piece.length)), piece.length)
