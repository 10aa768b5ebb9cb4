"""Several sources in given proportions, exact to less than one row at every point."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from pfx.data.documents import largest_remainder
from pfx.data.error import DataError
from pfx.data.samples import Rows, SampleId, Samples
from pfx.errors import message

_LONGEST_PERIOD = 1_000_000


@dataclass(frozen=True, eq=False)
class Blend:
    """Draw rows from several sources in turn so that each keeps its share.

    Among the first n rows are fewer than one more or less than ``n · weight`` of each source, for
    every n. The order repeats after the common denominator of the weights; where that is above a
    million, weights are rounded to whole millionths. Each source goes through its own epochs.

    Args:
        sources: with rows of one length.
        weights: one for each, in any unit, of at least 0; decimals are taken as they are written.

    Raises:
        DataError: there is no source, the rows differ in length, or the weights are not one for
            each, all of at least 0 and not all 0.
    """

    sources: Sequence[Samples]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if not self.sources or len(self.sources) != len(self.weights):
            what = f"has {len(self.sources)} sources and {len(self.weights)} weights."
            raise DataError(message("Blend:", what, fix="give one weight for each source"))
        lengths = {source.seq_len for source in self.sources}
        if len(lengths) > 1:
            what = f"has rows of different lengths: {', '.join(map(str, sorted(lengths)))}."
            raise DataError(message("Blend:", what, fix="give all sources one seq_len"))
        valid = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
        if not valid or not any(self.weights):
            what = f"are {list(self.weights)}; they must be at least 0, and one above."
            raise DataError(message("Blend: weights", what))

    @property
    def seq_len(self) -> int:
        """The tokens of a row."""
        return self.sources[0].seq_len

    @property
    def size(self) -> None:
        """None: each source has its own epochs."""
        return

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The rows of each source in a period."""
        return period_counts(self.weights)

    def read(self, seed: int, numbers: np.ndarray) -> Rows:
        """Return the rows at some places of the endless sequence."""
        sources, places = self._locate(numbers)
        shape = (len(numbers), self.seq_len)
        dtypes = (np.int64, np.int64, np.int64, bool)
        rows = Rows(*(np.empty(shape, dtype) for dtype in dtypes))
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            found = self.sources[source].read(seed, places[here])
            for target, part in zip(rows, found, strict=True):
                target[here] = part
        return rows

    def ids(self, seed: int, numbers: np.ndarray) -> list[SampleId]:
        """Return which rows are at some places; the source is its number in `sources`."""
        sources, places = self._locate(numbers)
        return [
            self.sources[source].ids(seed, places[i : i + 1])[0]._replace(source=int(source))
            for i, source in enumerate(sources)
        ]

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row, and its place in that source's own sequence."""
        order, ranks = self._period
        period, at = np.divmod(numbers, len(order))
        return order[at], period * np.array(self.counts)[order[at]] + ranks[at]

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a period, and how many of that source came before it."""
        order = interleave(self.counts)
        by_source = np.argsort(order, kind="stable")
        first = np.cumsum(self.counts) - np.array(self.counts)
        ranks = np.empty(len(order), np.int64)
        ranks[by_source] = np.arange(len(order)) - first[order[by_source]]
        return order, ranks


def period_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportions of some weights.

    >>> period_counts([0.5, 0.3, 0.2]), period_counts([2, 4])
    ((5, 3, 2), (1, 2))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    # None that was asked for is rounded to nothing.
    least = [int(share > 0) for share in shares]
    rest = largest_remainder(_LONGEST_PERIOD - sum(least), shares)
    return tuple(a + b for a, b in zip(least, rest, strict=True))


def interleave(counts: Sequence[int]) -> np.ndarray:
    """Order ``sum(counts)`` turns so that at every point each source has its share, to one turn.

    The m-th turn of a source with c of n turns falls between ``floor((m - 1) n / c)`` and
    ``ceil(m n / c)``. Earliest deadline first keeps to all of these windows (Baruah et al. 1996,
    "Proportionate progress", doi:10.1007/BF01940883), and no count is then off by one.

    >>> interleave([3, 1, 2])
    array([0, 2, 0, 1, 0, 2])
    """
    total = sum(counts)
    source = np.repeat(np.arange(len(counts)), counts)
    each = np.repeat(np.array(counts, np.int64), counts)
    turn = np.arange(total) - np.repeat(np.cumsum(counts) - np.array(counts), counts)
    release, deadline = turn * total // each, -(-(turn + 1) * total // each)
    by_release = np.argsort(release, kind="stable")
    waiting: list[tuple[int, int]] = []
    jobs = zip(deadline[by_release].tolist(), source[by_release].tolist(), strict=True)
    joining = np.bincount(release, minlength=total).tolist()
    order = np.empty(total, np.int64)
    for at, count in enumerate(joining):
        for _ in range(count):
            heapq.heappush(waiting, next(jobs))
        order[at] = heapq.heappop(waiting)[1]
    return order
