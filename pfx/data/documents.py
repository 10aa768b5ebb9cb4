"""Ranges of the documents of a file: train, validation and test parts that share no document."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from pfx.data.error import DataError
from pfx.data.indexed import IndexedDataset, pair
from pfx.errors import message

MASK_SUFFIX = "_mask"
"""``PREFIX_mask`` holds a 1 for each token of ``PREFIX`` that is learnt, and a 0 for the others."""

_NUMBER = re.compile(r"\d{1,18}(\.\d{1,24})?|\.\d{1,24}")
_FLOAT = re.compile(rf"({_NUMBER.pattern})(e[+-]?\d{{1,3}})?")  # as Python writes any float
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Documents:
    """Consecutive documents of a pair of files, and the loss mask beside them if there is one.

    Args:
        dataset: the tokens.
        mask: uint8, of the same documents: 1 for each token that is learnt; None: all are.
        first: the first document.
        last: the one after the last.
        name: what errors call it.
    """

    dataset: IndexedDataset
    mask: IndexedDataset | None
    first: int
    last: int
    name: str

    @staticmethod
    def open(prefix: str | os.PathLike[str]) -> Documents:
        """Map ``PREFIX.bin``, and ``PREFIX_mask.bin`` where `preprocess_chat` wrote one.

        Raises:
            DataError: a file is missing or damaged, or the mask is of other documents.
        """
        name = os.fspath(prefix)
        dataset = IndexedDataset.open(name)
        if dataset.dtype.kind not in "iu":
            what = f"holds {dataset.dtype.name}; token ids are integers."
            raise DataError(message(f"{name}.idx", what))
        mask = None
        if pair(name + MASK_SUFFIX)[1].exists():
            mask = IndexedDataset.open(name + MASK_SUFFIX)
            _check_same_documents(dataset, mask)
        return Documents(dataset, mask, 0, dataset.num_documents, name)

    def __len__(self) -> int:
        return self.last - self.first

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each document begins and ends in the tokens of the file, int64."""
        return self.dataset.document_bounds(self.first, self.last)

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        starts, ends = self.bounds
        return int(ends[-1] - starts[0]) if len(self) else 0

    def tokens_at(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at some places of the file, as int64."""
        return self.dataset.tokens[places].astype(np.int64)

    def learnt_at(self, places: np.ndarray) -> np.ndarray:
        """Return whether the tokens at some places of the file are learnt."""
        if self.mask is None:
            return np.ones(places.shape, bool)
        return self.mask.tokens[places] != 0

    def split(self, fractions: str | Sequence[float]) -> tuple[Documents, ...]:
        """Cut into consecutive parts in given proportions, "98,2,0"; each document is in one part.

        Sizes are by largest remainder: each part gets its exact share rounded down, and the
        documents left over go one each to the largest remainders, the earlier part first among
        equals: 10 documents by "95,5,0" are 10, 0 and 0. Reading from a part without a document
        is an error; making it is not.

        Args:
            fractions: in any unit; they are divided by their sum.

        Raises:
            DataError: a fraction is no number of at least 0, or all are 0.
        """
        text = fractions if isinstance(fractions, str) else ",".join(map(str, fractions))
        ends = np.cumsum(split_sizes(len(self), fractions)).tolist()
        return tuple(
            replace(
                self,
                first=self.first + start,
                last=self.first + end,
                name=f'part {i} of "{text}" of the {len(self)} documents of {self.name}',
            )
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1)
        )


def split_sizes(count: int, fractions: str | Sequence[float]) -> list[int]:
    """Divide a number of documents in given proportions by largest remainder.

    >>> split_sizes(1501, "0.8,0.1,0.1"), split_sizes(10, "95,5,0")
    ([1201, 150, 150], [10, 0, 0])
    """
    parts = fractions.split(",") if isinstance(fractions, str) else [str(f) for f in fractions]
    form = _NUMBER if isinstance(fractions, str) else _FLOAT
    shares = [_fraction(part.strip(), form, parts) for part in parts]
    if not sum(shares):
        what = f"{','.join(parts)!r} has no part above 0."
        raise DataError(message("split:", what, fix='"98,1,1"'))
    return largest_remainder(count, shares)


def largest_remainder(count: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `count` in exact proportions, what is left over going to the largest remainders."""
    total = sum(shares)
    exact = [share * count / total for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: count - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _fraction(part: str, form: re.Pattern[str], parts: Sequence[str]) -> Fraction:
    if not form.fullmatch(part):
        what = f"{','.join(parts)!r} has {part!r} for a number of at least 0."
        raise DataError(message("split:", what, fix='"98,1,1"'))
    return Fraction(part)


def _check_same_documents(dataset: IndexedDataset, mask: IndexedDataset) -> None:
    where = f"{mask.prefix}.idx"
    if mask.dtype != np.uint8:
        raise DataError(message(where, f"is of {mask.dtype.name}; a loss mask is of uint8."))
    same = len(dataset) == len(mask) and dataset.num_documents == mask.num_documents
    for ours, masks in (
        (dataset.lengths, mask.lengths),
        (dataset.document_indices, mask.document_indices),
    ):
        for first in range(0, len(ours), _BLOCK):
            block = slice(first, first + _BLOCK)
            same = same and np.array_equal(ours[block], masks[block])
    if not same:
        fix = "write both again with preprocess_chat(..., overwrite=True)"
        raise DataError(message(where, f"has other documents than {dataset.prefix}.idx.", fix=fix))
