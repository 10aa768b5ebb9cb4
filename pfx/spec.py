"""Where the parts of a tensor live: the spec a user writes, and the layout the compiler computes with.

`P` names mesh axes per dim. A `Layout` is a `P` made exact for a tensor of known rank, plus the axes
over which the value is still a partial sum. All arithmetic between a global shape and one device's
part is here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import tree
from pfx.errors import ShardingError, TreeError, message
from pfx.mesh import Coordinate, Mesh

Axes = tuple[str, ...]


class P(tuple):
    """A partition spec: one entry per dim, each None, an axis name, or a tuple of axis names.

    A spec may be shorter than the rank; the dims it does not mention are whole. Several axes on one
    dim split it row-major in the order given (jax.sharding.PartitionSpec).

    Attributes:
        unreduced: axes along which the devices hold addends, whose sum is the value.
        reduced: axes along which the value is the same, and its cotangent unreduced: a distinction
            that only `pfx.shard_map` makes.

    >>> P("dp", None, ("tp", "cp"))
    P('dp', None, ('tp', 'cp'))
    >>> P("tp", unreduced="dp")
    P('tp', unreduced=('dp',))
    """

    unreduced: Axes
    reduced: Axes

    def __new__(
        cls,
        *entries: str | Sequence[str] | None,
        unreduced: str | Iterable[str] = (),
        reduced: str | Iterable[str] = (),
    ) -> P:
        for entry in entries:
            axes = entry if type(entry) in (tuple, list) else (entry,)
            if entry is not None and not all(isinstance(axis, str) for axis in axes or ()):
                raise ShardingError(
                    message(
                        "P:", f"{entry!r} is not an axis name.", fix='P("dp", None, ("tp", "cp"))'
                    )
                )
        spec = super().__new__(
            cls, tuple(e if isinstance(e, str) or e is None else tuple(e) for e in entries)
        )
        spec.unreduced, spec.reduced = _names(unreduced), _names(reduced)
        return spec

    def with_dims(self, *dims: str | Sequence[str] | None) -> P:
        """The spec with other dims and the same unreduced and reduced axes."""
        return P(*dims, unreduced=self.unreduced, reduced=self.reduced)

    @property
    def dual(self) -> P:
        """The spec of a cotangent: addends along an axis have the same cotangent, and conversely.

        >>> P("tp", unreduced="dp").dual
        P('tp', reduced=('dp',))
        """
        return P(*self, unreduced=self.reduced, reduced=self.unreduced)

    @property
    def axes(self) -> Axes:
        """Every axis named, in order."""
        dims = (() if e is None else (e,) if isinstance(e, str) else e for e in self)
        return (*(axis for dim in dims for axis in dim), *self.unreduced, *self.reduced)

    @property
    def _key(self) -> tuple[Any, ...]:
        """What makes two specs equal: a plain tuple where no axis is unreduced or reduced."""
        entries = tuple(self)
        if not self.unreduced and not self.reduced:
            return entries
        return entries, frozenset(self.unreduced), frozenset(self.reduced)

    def __eq__(self, other: object) -> bool:
        return self._key == (other._key if isinstance(other, P) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        entries = [repr(entry) for entry in self]
        named = {"unreduced": self.unreduced, "reduced": self.reduced}
        return f"P({', '.join(entries + [f'{k}={axes}' for k, axes in named.items() if axes])})"

    def __getnewargs_ex__(self) -> Any:
        return tuple(self), {"unreduced": self.unreduced, "reduced": self.reduced}


def _names(axes: str | Iterable[str]) -> Axes:
    """The axes given to `unreduced=` or `reduced=`; a set has no order of its own."""
    if isinstance(axes, (set, frozenset)):
        axes = sorted(axes)
    if isinstance(axes, str):
        return (axes,)
    if isinstance(axes, (tuple, list)) and all(isinstance(axis, str) for axis in axes):
        return tuple(axes)
    raise ShardingError(
        message("P:", f"{axes!r} does not name axes.", fix='P("tp", unreduced=("dp",))')
    )


@dataclass(frozen=True)
class Layout:
    """The exact placement of one tensor: the axes of each dim, and the axes it is partial over.

    Inside a manual region the parts along its `varying` axes are unrelated values: each device has
    one of the given shape. `free` marks a value that any device can make for itself in any layout
    (zeros, an arange); `zero` one that is all zeros, and so also a valid partial sum.
    """

    dims: tuple[Axes, ...]
    partial: Axes = ()
    reduce: str = "sum"
    free: bool = False
    zero: bool = False
    varying: Axes = ()

    @property
    def axes(self) -> Axes:
        """Every axis along which the devices' parts differ."""
        return (*(axis for dim in self.dims for axis in dim), *self.partial, *self.varying)

    @property
    def spec(self) -> P:
        """This layout as a spec, which can say of partial values that they are sums."""
        dims = (None if not d else d[0] if len(d) == 1 else d for d in self.dims)
        return P(*dims, unreduced=self.partial if self.reduce == "sum" else ())

    def whole(self) -> Layout:
        """The same layout once its partial sums have been reduced."""
        return Layout(self.dims, varying=self.varying)

    def stacked(self) -> Layout:
        """The layout of a stack of such values on a new, whole dim 0."""
        return replace(self, dims=((), *self.dims))

    def sliced(self) -> Layout:
        """The layout of one slice along dim 0."""
        return replace(self, dims=self.dims[1:])

    def text(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Print a sharded value the one way: ``f32[8/dp, 128, 256/tp]+tp``, with ``~tp`` if varying.

        >>> Layout((("dp",), ()), ("tp",)).text((8, 4), torch.float32)
        'f32[8/dp, 4]+tp'
        """
        dims = ", ".join(
            "/".join((str(n), *axes)) for n, axes in zip(shape, self.dims, strict=True)
        )
        owed = "".join(f"+{axis}" for axis in self.partial)
        kind = "" if self.reduce == "sum" or not self.partial else f"({self.reduce})"
        own = "".join(f"~{axis}" for axis in self.varying)
        return f"{dtype_name(dtype)}[{dims}]{owed}{kind}{own}"


def effective(layout: Layout, mesh: Mesh) -> Layout:
    """The same placement without the axes of size 1, which split nothing and owe nothing.

    >>> from pfx.mesh import make_mesh
    >>> effective(Layout((("dp",), ("dp", "tp"))), make_mesh(dp=1, tp=2)).dims
    ((), ('tp',))
    """
    if all(mesh.shape[axis] > 1 for axis in layout.axes):
        return layout
    real = lambda axes: tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return replace(
        layout,
        dims=tuple(map(real, layout.dims)),
        partial=real(layout.partial),
        varying=real(layout.varying),
    )


def replicated(ndim: int) -> Layout:
    """The layout in which every device holds everything."""
    return Layout(((),) * ndim)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: f32, bf16, i64, bool, …

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return "i" + name.removeprefix("int") if name.startswith("int") else name


def spec_leaves(
    specs: Any, value: Any, where: str, root: Callable[[tree.Path], str] | str = ""
) -> list[Any]:
    """Repeat each spec for every leaf of the part of `value` that it is given for.

    Args:
        where: what errors say comes first, e.g. ``jit(step): in_specs``.
        root: what errors call `value`, or what names the first step of a path into it.

    Raises:
        ShardingError: when the trees differ, with the key path.
    """
    try:
        return tree.broadcast_prefix(specs, value, is_leaf=lambda node: isinstance(node, P))
    except TreeError as error:
        text = str(error)
        if callable(root):
            text = re.sub(r"^\[\d+\]", lambda found: root((found.group(),)), text)
        else:
            text = root + text.removeprefix("the tree")
        raise ShardingError(
            message(
                where,
                "do not match the tree that they are for.",
                text,
                fix="give one P per leaf, or one P for a whole subtree",
            )
        ) from None


def layout_of(spec: Any, shape: Sequence[int], mesh: Mesh, where: str = "") -> Layout:
    """Make a spec exact for a shape on a mesh.

    Raises:
        ShardingError: for a spec longer than the rank, an unknown or repeated axis, or a dim that
            its axes do not divide, with the arithmetic and a fix.

    >>> from pfx.mesh import make_mesh
    >>> layout_of(P("dp"), (4, 3), make_mesh(dp=2)).dims
    (('dp',), ())
    """
    spec = P() if spec is None else spec
    if not isinstance(spec, P):
        entries = spec if isinstance(spec, (tuple, list)) else (spec,)
        axes = all(isinstance(entry, str) for entry in entries)
        fix = f"write {P(*entries)}" if axes else f"write a P, such as {P(*mesh.axis_names[:1])}"
        raise ShardingError(message(where, f"has {spec!r} where a spec belongs.", fix=fix))
    if len(spec) > len(shape):
        raise ShardingError(
            message(
                where,
                "has fewer dims than its spec.",
                f"{spec} has {len(spec)} entries; the shape {tuple(shape)} has {len(shape)} dims.",
                f"mesh: {mesh}",
                fix=f"use {spec.with_dims(*spec[: len(shape)])}",
            )
        )
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    entries += [()] * (len(shape) - len(entries))
    _check_axes(spec, entries, mesh, where)
    for dim, (size, axes) in enumerate(zip(shape, entries, strict=True)):
        if not mesh.splits(axes, size):
            raise ShardingError(_unsplit(spec, dim, size, axes, mesh, where))
    return Layout(tuple(entries), mesh.ordered(spec.unreduced))


def _check_axes(spec: P, entries: Sequence[Axes], mesh: Mesh, where: str) -> None:
    seen: set[str] = set()
    for axis in (axis for entry in (*entries, spec.unreduced, spec.reduced) for axis in entry):
        if axis not in mesh.shape:
            raise ShardingError(
                message(
                    where,
                    f"names the unknown axis {axis!r}.",
                    f"spec: {spec}",
                    f"mesh: {mesh}",
                    fix=f"use one of {', '.join(map(repr, mesh.axis_names)) or 'no axis'}",
                )
            )
        if axis in seen:
            raise ShardingError(
                message(
                    where,
                    f"uses the axis {axis!r} twice.",
                    f"spec: {spec}; {_once(spec, axis)}",
                    f"mesh: {mesh}",
                    fix=f"drop one {axis!r} from this spec",
                )
            )
        seen.add(axis)


def _once(spec: P, axis: str) -> str:
    if axis in spec.unreduced + spec.reduced:
        return "an axis splits one dim, is unreduced, or is reduced."
    return "an axis can split one dim only."


def _unsplit(spec: P, dim: int, size: int, axes: Axes, mesh: Mesh, where: str) -> str:
    n = mesh.count(axes)
    named = " and ".join(f'"{axis}" (size {mesh.shape[axis]})' for axis in axes)
    below, above = size - size % n, size - size % n + n
    sizes = f"{below} or {above}" if below else f"{above}"
    why = f"{size} % {n} = {size % n}: it is not evenly divisible."
    fix = f"make dim {dim} a multiple of {n} ({sizes}), or drop {', '.join(map(repr, axes))} from"
    if size % n == 0:
        axis = next(axis for axis in axes if axis in dict(mesh.deals))
        why = f"{axis!r} deals its rows as {mesh.rows(axis, size)}, not in equal blocks in order."
        fix = f"leave {axis!r} alone on this dim, or drop it from"
    return message(
        where,
        "cannot be split.",
        f"{spec} puts dim {dim} (size {size}) on axis {named}.",
        why,
        f"mesh: {mesh}",
        fix=f"{fix} this spec.",
    )


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one device's part.

    Of a dim that an axis deals (`pfx.mesh.Deal`) every device has as many rows as the one with most:
    those with fewer have padding after them.
    """
    return tuple(mesh.extent(axes, n) for n, axes in zip(shape, layout.dims, strict=True))


def local_bytes(shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh: Mesh) -> int:
    """The bytes of one device's part."""
    return math.prod(local_shape(shape, layout, mesh)) * dtype.itemsize


def local_slices(
    shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Coordinate
) -> tuple[slice | tuple[int, ...], ...]:
    """The part of the global index space that the device at `coordinate` holds.

    A slice for each dim, or the rows in order of a dim that an axis deals; padding is not part of it.

    >>> from pfx.mesh import make_mesh
    >>> mesh = make_mesh(x=2, y=2)
    >>> local_slices((8, 3), Layout((("x", "y"), ())), mesh, {"x": 1, "y": 0})
    (slice(4, 6, None), slice(0, 3, None))
    """
    parts: list[slice | tuple[int, ...]] = []
    for n, axes in zip(shape, layout.dims, strict=True):
        axis, size = mesh.dealt(axes, n), mesh.extent(axes, n)
        start = mesh.index(coordinate, axes) * size
        equal = slice(start, start + size)
        parts.append(equal if axis is None else mesh.rows(axis, n)[coordinate[axis]])
    return tuple(parts)


def part_of(
    tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: Coordinate
) -> torch.Tensor:
    """The part of a global tensor for the device at `coordinate`; a view, or the zeros of a sum.

    Of a partial sum the first device has the value. Along a dealt dim it is a copy, padded with zeros.
    """
    part, full = tensor, local_shape(tensor.shape, layout, mesh)
    for dim, held in enumerate(local_slices(tensor.shape, layout, mesh, coordinate)):
        if isinstance(held, slice):
            part = part.narrow(dim, held.start, held.stop - held.start)
        else:
            part = take_rows(part, dim, held, full[dim])
    first = all(coordinate[axis] == 0 for axis in layout.partial)
    return part if first else torch.zeros_like(part)


def take_rows(x: torch.Tensor, dim: int, rows: Sequence[int], extent: int) -> torch.Tensor:
    """Some rows of a tensor, and zeros after them up to `extent` rows.

    >>> take_rows(torch.tensor([1, 2, 3]), 0, (2, 0), 3)
    tensor([3, 1, 0])
    """
    shape = (*x.shape[:dim], extent, *x.shape[dim + 1 :])
    out = x.new_empty(shape) if len(rows) == extent else x.new_zeros(shape)
    index = torch.tensor(rows, dtype=torch.long, device=x.device)
    out.narrow(dim, 0, len(rows)).copy_(x.index_select(dim, index))
    return out


def distinct_coordinates(layout: Layout, mesh: Mesh) -> Iterator[dict[str, int]]:
    """Iterate over the coordinates (along the layout's axes only) whose parts differ."""
    return mesh.coordinates(mesh.ordered(layout.axes))
