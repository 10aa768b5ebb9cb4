"""Device meshes: named axes and their sizes. A mesh knows names and numbers, never a process."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pfx.errors import MeshError, message

KINDS = ("simulated", "process", "abstract")
Coordinate = Mapping[str, int]
Rows = tuple[tuple[int, ...], ...]  # for each device along an axis, the rows it holds, in order


@dataclass(frozen=True)
class Deal:
    """How an axis deals the rows of a dim: block b goes to the device ``place[b]`` along the axis.

    The stages of a pipeline hold unequal numbers of layers, or several runs of layers each. A dealt
    tensor keeps its shape and its order; only where its rows are differs.

    Args:
        place: the device of each block; every device has at least one.
        sizes: the rows of each block, for dims whose size is their sum. Every other dim is cut as
            equally as possible, the first blocks larger by one.

    >>> Deal((0, 1, 0, 1)).blocks(6)
    [(0, 2), (2, 4), (4, 5), (5, 6)]
    """

    place: tuple[int, ...]
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", tuple(self.place))
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Where each block of a dim begins and ends."""
        least, more = divmod(size, len(self.place))
        equal = tuple(least + (block < more) for block in range(len(self.place)))
        sizes = self.sizes if self.sizes and sum(self.sizes) == size else equal
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def rows(self, size: int, count: int) -> Rows:
        """The rows of each of `count` devices, its blocks in order."""
        return _rows(self, size, count)

    def problem(self, count: int) -> str:
        """Why this cannot deal to `count` devices; nothing if it can."""
        wrong = [device for device in self.place if device not in range(count)]
        if wrong:
            return f"place has {wrong[0]!r}; the devices are 0 to {count - 1}."
        idle = sorted(set(range(count)) - set(self.place))
        if idle:
            return f"the device {idle[0]} has no block."
        if self.sizes and len(self.sizes) != len(self.place):
            return f"there are {len(self.sizes)} sizes for {len(self.place)} blocks."
        if any(size < 0 for size in self.sizes):
            return f"a block has the size {min(self.sizes)}."
        return ""


@functools.lru_cache(maxsize=4096)
def _rows(deal: Deal, size: int, count: int) -> Rows:
    held: list[list[int]] = [[] for _ in range(count)]
    for device, block in zip(deal.place, deal.blocks(size), strict=True):
        held[device] += range(*block)
    return tuple(map(tuple, held))


def runs(rows: Sequence[int], extent: int) -> list[tuple[int, int]]:
    """Rows as runs (first, count); padding repeats the first rows of the dim.

    >>> runs((0, 1, 4), 4)
    [(0, 2), (4, 1), (0, 1)]
    """
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and sum(found[-1]) == row:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((row, 1))
    return [*found, (0, extent - len(rows))] if len(rows) < extent else found


@dataclass(frozen=True)
class Mesh:
    """A grid of devices with named axes; devices are numbered row-major, the last axis fastest.

    >>> mesh = make_mesh(dp=2, tp=4)
    >>> mesh.axis_names, mesh.shape["tp"], mesh.size
    (('dp', 'tp'), 4, 8)
    """

    axes: tuple[tuple[str, int], ...]
    kind: str = "simulated"
    device: str = "cpu"
    deals: tuple[tuple[str, Deal], ...] = ()
    shape: Mapping[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", MappingProxyType(dict(self.axes)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (
            self.axes,
            self.kind,
            self.device,
            self.deals,
        )  # a view of a dict cannot be copied

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes) or "one device"

    def count(self, axes: Sequence[str]) -> int:
        """The number of devices along the product of the given axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The given axes in the mesh's own order, each once."""
        return tuple(name for name, _ in self.axes if name in axes)

    def coordinates(self, axes: Sequence[str] | None = None) -> Iterator[dict[str, int]]:
        """Iterate over the coordinates along `axes` (all by default), row-major."""
        names = self.axis_names if axes is None else tuple(axes)
        for point in itertools.product(*(range(self.shape[name]) for name in names)):
            yield dict(zip(names, point, strict=True))

    def index(self, coordinate: Coordinate, axes: Sequence[str] | None = None) -> int:
        """The row-major number of a coordinate along `axes`, in the order given."""
        number = 0
        for name in self.axis_names if axes is None else axes:
            number = number * self.shape[name] + coordinate[name]
        return number

    def coordinate(self, number: int) -> dict[str, int]:
        """The coordinate of the device with this number (its rank on a process mesh)."""
        point = {}
        for name, size in reversed(self.axes):
            number, point[name] = divmod(number, size)
        return {name: point[name] for name in self.axis_names}

    def deal(self, axis: str) -> Deal:
        """How an axis deals the rows of a dim: one block a device, in order, unless said otherwise."""
        return dict(self.deals).get(axis) or Deal(tuple(range(self.shape[axis])))

    def blocks(self, axis: str, size: int) -> list[tuple[int, int]]:
        """Where each block of a dim that is dealt along an axis begins and ends."""
        return self.deal(axis).blocks(size)

    def rows(self, axis: str, size: int) -> Rows:
        """For each device along an axis, the rows of a dim that it holds, its blocks in order.

        >>> make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))}).rows("pp", 6)
        ((0, 1, 5), (2, 3, 4))
        """
        return self.deal(axis).rows(size, self.shape[axis])

    def even(self, axes: Sequence[str], size: int) -> bool:
        """Tell whether the axes split a dim into equal blocks in order."""
        for axis in axes:
            count = self.shape[axis]
            if size % count:
                return False
            if self.deals and self.rows(axis, size) != _rows(
                Deal(tuple(range(count))), size, count
            ):
                return False
            size //= count
        return True

    def dealt(self, axes: Sequence[str], size: int) -> str | None:
        """The axis that deals a dim otherwise than in equal blocks in order; None if there is none."""
        if not self.deals:
            return None
        real = [axis for axis in axes if self.shape[axis] > 1]
        may = len(real) == 1 and real[0] in dict(self.deals) and not self.even(real, size)
        return real[0] if may else None

    def splits(self, axes: Sequence[str], size: int) -> bool:
        """Tell whether the axes can split a dim: in equal blocks, or as the one of them deals it."""
        return self.even(axes, size) or self.dealt(axes, size) is not None

    def extent(self, axes: Sequence[str], size: int) -> int:
        """The rows of a dim that a device has room for: as many as the one with most of them holds."""
        axis = self.dealt(axes, size)
        assert axis or self.even(axes, size), (
            f"{axes} do not split {size} rows: {self}, {self.deals}"
        )
        return max(map(len, self.rows(axis, size))) if axis else size // self.count(axes)

    def positions(self, axis: str, size: int) -> tuple[int, ...]:
        """Where each row of a dealt dim lies when all devices' parts, padded, follow each other.

        >>> make_mesh(pp=2, deals={"pp": Deal((0, 1, 0))}).positions("pp", 3)
        (0, 2, 1)
        """
        extent = self.extent((axis,), size)
        held = self.rows(axis, size)
        places = {row: d * extent + i for d, rows in enumerate(held) for i, row in enumerate(rows)}
        return tuple(places[row] for row in range(size))


def make_mesh(
    kind: str | None = None,
    device: str = "cpu",
    *,
    deals: Mapping[str, Deal] | None = None,
    **axes: int,
) -> Mesh:
    """Make a mesh from axis sizes: ``make_mesh(dp=2, tp=4)``.

    Args:
        kind: "simulated" (every device in this process), "process" (one process a device, under
            torchrun) or "abstract" (no data at all). None: "process" under torchrun, else
            "simulated".
        device: the torch device type that holds the data: "cpu", "cuda", "npu".
        deals: for an axis, how it deals the rows of a dim, where not in equal blocks in order.
        axes: name=size, in order.

    Raises:
        MeshError: for an unknown kind, a size below 1, or a deal that does not fit its axis.

    >>> print(make_mesh(dp=2, tp=2))
    dp=2 tp=2
    """
    if kind is None:
        kind = "process" if "TORCHELASTIC_RUN_ID" in os.environ else "simulated"
    if kind not in KINDS:
        raise MeshError(message("make_mesh:", f"kind={kind!r} is unknown.", fix=f"one of {KINDS}"))
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(
                message(
                    "make_mesh:",
                    f"axis {name!r} has size {size!r}.",
                    "an axis size is an integer of at least 1.",
                )
            )
    for name, deal in (deals or {}).items():
        _check_deal(name, deal, axes)
    return Mesh(tuple(axes.items()), kind, device, tuple(sorted((deals or {}).items())))


def _check_deal(name: str, deal: Deal, axes: Mapping[str, int]) -> None:
    where = f"make_mesh: deals[{name!r}]"
    if name not in axes:
        fix = f"name one of {', '.join(map(repr, axes)) or 'no axis'}"
        raise MeshError(message(where, "is for an axis that is not there.", fix=fix))
    why = deal.problem(axes[name])
    if why:
        fix = f"Deal({tuple(range(axes[name]))}) for one block a device, in order"
        raise MeshError(message(where, "does not fit the axis.", f"{deal}: {why}", fix=fix))
