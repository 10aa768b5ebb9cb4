"""Best-fit-decreasing bin packing of millions of items whose sizes are small integers."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each item, from 0: largest items first, each in the fullest bin it fits.

    All items of a size and all bins with equal space are handled at once: the Python work grows
    with the number of distinct (size, space) pairs, and not with the number of items.

    Args:
        sizes: int64, each from 1 to `capacity`.
        capacity: the size of a bin.

    >>> best_fit(np.array([2, 6, 4, 3, 1]), 8)
    array([0, 0, 1, 1, 1])
    """
    bins = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(np.bincount(sizes, minlength=capacity + 1)[::-1])[::-1]  # of each size, above
    open_bins: dict[int, list[np.ndarray]] = {}  # by the space that is left
    spaces: list[int] = []
    made = 0
    for size in range(capacity, 0, -1):
        above = int(ends[size + 1]) if size < capacity else 0
        items = by_size[above : int(ends[size])]
        while len(items):
            at = bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces.pop(at)
                candidates = np.concatenate(open_bins.pop(space))
            else:
                space = capacity
                needed = -(-len(items) // (capacity // size))
                candidates = np.arange(made, made + needed)
                made += needed
            each = space // size  # as many fit into one bin, and it is the fullest until then
            used = min(-(-len(items) // each), len(candidates))
            taken = min(used * each, len(items))
            bins[items[:taken]] = np.repeat(candidates[:used], each)[:taken]
            items = items[taken:]
            in_last = taken - (used - 1) * each
            _put(open_bins, spaces, space - each * size, candidates[: used - 1])
            _put(open_bins, spaces, space - in_last * size, candidates[used - 1 : used])
            _put(open_bins, spaces, space, candidates[used:])
    return bins


def _put(
    open_bins: dict[int, list[np.ndarray]], spaces: list[int], space: int, bins: np.ndarray
) -> None:
    if not len(bins) or not space:
        return
    if space not in open_bins:
        open_bins[space] = []
        insort(spaces, space)
    open_bins[space].append(bins)
