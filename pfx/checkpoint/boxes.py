"""Boxes of a global index space: what a shard holds, what is stored in one piece, what is wanted.

A box is a (start, stop) for each dim. All arithmetic between shards, pieces and what a restore asks
for is here; it knows shapes only.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from pfx.mesh import runs

Box = tuple[tuple[int, int], ...]

LARGEST = 16 << 20  # bytes of one piece: what one checksum covers, and one thread writes at a time
SMALLEST = 1 << 20  # below that a piece is not split among the processes that all hold it
_CUT_DIMS = 16  # dims that pieces may be cut along: a tiling is checked at all corners
_CORNERS = 1 << 23  # so many that looking at them takes seconds; no mesh has as many parts


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(extents(box))


def boxes_of(index: Sequence[slice | tuple[int, ...]]) -> list[tuple[Box, Box]]:
    """The boxes that a shard holds, each with where it lies in the shard; rows come as runs.

    >>> boxes_of([(0, 1, 5), slice(4, 8)])
    [(((0, 2), (4, 8)), ((0, 2), (0, 4))), (((5, 6), (4, 8)), ((2, 3), (0, 4)))]
    """
    dims = []
    for held in index:
        if isinstance(held, slice):
            stretches = [(held.start, held.stop - held.start)]
        else:
            stretches = runs(held, len(held))
        at, found = 0, []
        for start, count in stretches:
            found.append(((start, start + count), (at, at + count)))
            at += count
        dims.append(found)
    pairs = (
        zip(*choice, strict=True) if choice else ((), ()) for choice in itertools.product(*dims)
    )
    return [(tuple(there), tuple(here)) for there, here in pairs]


def cut(box: Box, itemsize: int, parts: int = 1) -> list[Box]:
    """Cut a box into pieces: small enough, and enough of them for `parts` processes to share.

    >>> cut(((0, 4),), 1 << 20, parts=2)
    [((0, 2),), ((2, 4),)]
    """
    nbytes = volume(box) * itemsize
    count = max(-(-nbytes // LARGEST), min(parts, nbytes // SMALLEST))
    if count <= 1 or volume(box) == 1:
        return [box]
    sizes = extents(box)
    dim = next((d for d, n in enumerate(sizes) if n >= count), sizes.index(max(sizes)))
    count, start = min(count, sizes[dim]), box[dim][0]
    edges = [start + sizes[dim] * i // count for i in range(count + 1)]
    each = [(*box[:dim], edge, *box[dim + 1 :]) for edge in itertools.pairwise(edges)]
    return [piece for one in each for piece in cut(one, itemsize)]


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes share; None if nothing.

    >>> intersection(((0, 4),), ((2, 6),))
    ((2, 4),)
    """
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(box: Box, outer: Box) -> Box:
    """Where a box lies in one that holds it.

    >>> within(((5, 6),), ((4, 8),))
    ((1, 2),)
    """
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Tell whether boxes cover every element of a tensor exactly once.

    The differences along all dims of a box's indicator are signs at its corners, and determine the
    function: the boxes add up to the whole exactly when their corners do.

    >>> tiles([((0, 2),), ((2, 5),)], (5,)), tiles([((0, 3),), ((2, 5),)], (5,))
    (True, False)
    """
    if not math.prod(shape):
        return not boxes
    whole_box = whole(shape)
    if not all(0 <= a < b <= n for box in boxes for (a, b), n in zip(box, shape, strict=True)):
        return False
    dims = [d for d in range(len(shape)) if any(box[d] != whole_box[d] for box in boxes)]
    if len(dims) > _CUT_DIMS or len(boxes) << len(dims) > _CORNERS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole_box, -1)]:
        for ends in itertools.product((0, 1), repeat=len(dims)):
            sign = -weight if sum(ends) % 2 else weight
            corners[tuple(box[d][end] for d, end in zip(dims, ends, strict=True))] += sign
    return not any(corners.values())
