"""Device meshes: named axes and their sizes. A mesh knows names and numbers, never a process."""

from __future__ import annotations

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
    shape: Mapping[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", MappingProxyType(dict(self.axes)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.axes, self.kind, self.device)  # a view of a dict cannot be copied

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


def make_mesh(kind: str | None = None, device: str = "cpu", **axes: int) -> Mesh:
    """Make a mesh from axis sizes: ``make_mesh(dp=2, tp=4)``.

    Args:
        kind: "simulated" (every device in this process), "process" (one process a device, under
            torchrun) or "abstract" (no data at all). None: "process" under torchrun, else
            "simulated".
        device: the torch device type that holds the data: "cpu", "cuda", "npu".
        axes: name=size, in order.

    Raises:
        MeshError: for an unknown kind or a size below 1.

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
    return Mesh(tuple(axes.items()), kind, device)
