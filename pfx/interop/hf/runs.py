"""Which rows of a tensor in the files a part of a parameter is: runs of rows, (first, count)."""

from __future__ import annotations

from collections.abc import Sequence

from pfx.mesh import runs

Runs = list[tuple[int, int]]


def held(index: slice | tuple[int, ...], size: int) -> Runs:
    """The runs of an index along a dim, without the rows from `size` on, which are padding.

    >>> held(slice(4, 8), 6), held((0, 1, 5), 8)
    ([(4, 2)], [(0, 2), (5, 1)])
    """
    if isinstance(index, slice):
        found = [(index.start, index.stop - index.start)]
    else:
        found = runs(index, len(index))
    return [(first, min(count, size - first)) for first, count in found if first < size]


def count(found: Runs) -> int:
    """How many rows runs have."""
    return sum(n for _, n in found)


def product(groups: Sequence[tuple[Runs, int]]) -> Runs:
    """The runs along a dim that is the product of others, the last one fastest.

    Args:
        groups: for each of those dims, the runs along it and its size.

    >>> product([([(0, 2)], 2), ([(1, 1)], 3)])  # column 1 of 2 x 3
    [(1, 1), (4, 1)]
    >>> product([([(1, 1)], 2), ([(0, 3)], 3)])  # row 1 of 2 x 3
    [(3, 3)]
    """
    flat, inner = [(0, 1)], 1
    for outer, size in reversed(groups):
        if flat == [(0, inner)]:
            flat = [(first * inner, n * inner) for first, n in outer]
        else:
            rows = [row for first, n in outer for row in range(first, first + n)]
            flat = [(row * inner + first, n) for row in rows for first, n in flat]
        inner *= size
    return flat
