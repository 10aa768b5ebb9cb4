"""`Array`: one global tensor held as shards. It only holds; `jit` computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx.errors import MeshError, TraceError, message, user_line
from pfx.mesh import Mesh
from pfx.spec import Layout, P, distinct_coordinates, local_bytes, local_shape, local_slices


@dataclass(frozen=True)
class ShapeDtype:
    """The form of a tensor without its data, for `lower` and for tracing from shapes alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Shard:
    """One part of an array: which devices hold it, where it lies, and its data.

    Along an unreduced axis the data are addends of what lies there. The index of a dim that an axis
    deals is a tuple of row numbers, in the order of the data, which may have padding after them.
    """

    coordinate: Mapping[str, int]
    index: tuple[slice | tuple[int, ...], ...]
    data: torch.Tensor


@dataclass(frozen=True, eq=False)
class Array:
    """A global tensor on a mesh.

    `parts` holds the distinct local tensors this process has, row-major over the axes that the
    layout uses: all of them on a simulated mesh, exactly one on a process mesh.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Mesh
    layout: Layout
    parts: tuple[torch.Tensor, ...]
    coordinate: Mapping[str, int] | None = None  # this process's place; None: all are here

    @property
    def spec(self) -> P:
        """The partition spec of the array."""
        return self.layout.spec

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts held by this process, with their coordinates and global index."""
        if self.coordinate is not None:
            places: list[Mapping[str, int]] = [self.coordinate]
        else:
            places = list(distinct_coordinates(self.layout, self.mesh))
        return tuple(
            Shard(place, local_slices(self.shape, self.layout, self.mesh, place), part)
            for place, part in zip(places, self.parts, strict=True)
        )

    @property
    def bytes_per_device(self) -> int:
        """The memory one device needs for its part."""
        return local_bytes(self.shape, self.dtype, self.layout, self.mesh)

    def full_tensor(self) -> torch.Tensor:
        """Return the global tensor; on a process mesh use `pfx.device_get`, which communicates."""
        if self.coordinate is not None and self.mesh.count(self.layout.axes) > 1:
            raise MeshError(
                message(
                    "Array.full_tensor:",
                    "the other parts are in other processes.",
                    fix="pfx.device_get(x), called by every rank",
                )
            )
        return assemble(self.shape, self.dtype, self.layout, self.mesh, self.parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _only_holds(getattr(func, "__name__", str(func)))

    def _operate(self, *_: Any) -> Any:
        raise _only_holds("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = (
        _operate
    )
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __getitem__ = _operate

    def __repr__(self) -> str:
        return f"Array({self.layout.text(self.shape, self.dtype)} on {self.mesh})"

    def __float__(self) -> float:
        return float(self.full_tensor())

    def __bool__(self) -> bool:
        return bool(self.full_tensor())

    def item(self) -> Any:
        """The Python number of an array with one element."""
        return self.full_tensor().item()


def _only_holds(what: str) -> TraceError:
    return TraceError(
        message(
            f"{what} at {user_line()}:",
            "an Array holds its parts; what computes with it is a jit-ted function.",
            fix="pass it to that function as an argument, or pfx.device_get(x) first",
        )
    )


def own_parts(
    parts: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = (), *, shared: bool = False
) -> tuple[torch.Tensor, ...]:
    """The parts of a new array, copied if they lie in memory that is not theirs alone.

    An array may be donated, and its parts overwritten.

    Args:
        others: tensors whose memory they may lie in.
        shared: that they are known to lie in others'.
    """
    memory = {part.untyped_storage().data_ptr() for part in parts}
    taken = {other.untyped_storage().data_ptr() for other in others}
    equal = len({part.data_ptr() for part in parts}) < len(parts)  # the same on several devices
    expanded = any(part.numel() > 1 and 0 in part.stride() for part in parts)
    shared = shared or equal or expanded or not taken.isdisjoint(memory)
    return tuple(part.clone() for part in parts) if shared else tuple(parts)


def assemble(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    mesh: Mesh,
    parts: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Put the distinct parts of a value (row-major over its axes) together again, adding addends."""
    if len(parts) == 1:
        return parts[0].clone()  # the array's own memory may be donated, and overwritten, later
    dealt = [mesh.dealt(axes, n) for n, axes in zip(shape, layout.dims, strict=True)]
    full = [  # of a dealt dim, all parts one after the other, with their padding
        n if axis is None else mesh.count(axes) * mesh.extent(axes, n)
        for n, axes, axis in zip(shape, layout.dims, dealt, strict=True)
    ]
    out = torch.empty(full, dtype=dtype, device=parts[0].device)
    for place, part in zip(distinct_coordinates(layout, mesh), parts, strict=True):
        assert part.shape == local_shape(shape, layout, mesh)
        here = out
        for dim, axes in enumerate(layout.dims):
            here = here.narrow(dim, mesh.index(place, axes) * part.shape[dim], part.shape[dim])
        first = all(place[axis] == 0 for axis in layout.partial)
        here.copy_(part) if first else here.add_(part)
    for dim, axis in enumerate(dealt):
        if axis is not None:
            rows = torch.tensor(mesh.positions(axis, shape[dim]), device=out.device)
            out = out.index_select(dim, rows.long())
    return out
