"""A region's values named as parts of global ones.

A program names every value globally, so that a hand-written block prints as the annotated one would:
``f32[8, 256/tp]`` where the devices along tp hold blocks of a dim, ``+tp`` where they hold addends, and
``~tp`` where their values are unrelated. A name says nothing that a runtime needs: what that reads is the
local shape, and along which axes there are different parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pfx.compiler.rule import Rule
from pfx.lax.manual.collective import Collective
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout


@dataclass(frozen=True)
class Name:
    """The region's axes in a value's layout: on dims, as addends, as unrelated values."""

    dims: tuple[Axes, ...]
    partial: Axes = ()
    varying: Axes = ()

    @staticmethod
    def of(layout: Layout, axes: Sequence[str]) -> Name:
        """The part of a layout that names `axes`."""
        kept = lambda some: tuple(a for a in some if a in axes)
        return Name(tuple(map(kept, layout.dims)), kept(layout.partial), kept(layout.varying))

    @property
    def axes(self) -> set[str]:
        """Every axis named."""
        return {a for dim in self.dims for a in dim} | set(self.partial) | set(self.varying)

    def lacking(self, axes: Sequence[str]) -> Name:
        """The name of what is the same along `axes`, or no longer named by them."""
        kept = lambda some: tuple(a for a in some if a not in axes)
        return Name(tuple(map(kept, self.dims)), kept(self.partial), kept(self.varying))

    def split(self, dim: int, axes: Axes) -> Name:
        """The name of what is now also split over `axes` along a dim."""
        return replace(self, dims=(*self.dims[:dim], self.dims[dim] + axes, *self.dims[dim + 1 :]))

    def full(self, layout: Layout, mesh: Mesh) -> Layout:
        """The layout of the named value: the region's axes first, then those of `layout`."""
        dims = tuple(own + rest for own, rest in zip(self.dims, layout.dims, strict=True))
        owed, unrelated = self.partial, self.varying
        if layout.partial and layout.reduce != "sum":
            owed, unrelated = (), unrelated + owed  # addends of a maximum have no name
        return replace(
            layout,
            dims=dims,
            partial=mesh.ordered((*layout.partial, *owed)),
            varying=mesh.ordered(unrelated),
        )

    def shape(self, local: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The global shape, from that on one device."""
        return tuple(n * mesh.count(axes) for n, axes in zip(local, self.dims, strict=True))


def names_of_results(rule: Rule, operands: Sequence[Name], mesh: Mesh) -> list[Name]:
    """Name the results of an op by following its factors, as the partition of a global op would.

    Axes stay with a factor if all operands that vary along them have them on it, and no other operand
    has it. On a factor that is summed over they become addends; else the results are unrelated.
    """
    axes = mesh.ordered([a for name in operands for a in name.axes])
    carriers = {axis: _carrier(rule, operands, axis) for axis in axes}
    names = []
    for dims in rule.results:
        found = Name(((),) * len(dims))
        for axis in axes:
            if _flows(rule, operands, axis):
                found = replace(found, partial=(*found.partial, axis))
            else:
                found = _placed(found, rule, dims, carriers[axis], axis, mesh)
        names.append(found)
    return names


def _flows(rule: Rule, operands: Sequence[Name], axis: str) -> bool:
    """Tell whether addends go in, along an axis, where addends come out."""
    owed = {i for i, name in enumerate(operands) if axis in name.partial}
    return {i for i, name in enumerate(operands) if axis in name.axes} == owed and any(
        owed == set(group) for group in rule.linear
    )


def _carrier(rule: Rule, operands: Sequence[Name], axis: str) -> str | None:
    """The factor that an axis splits in every operand that it is on; None if there is none."""
    found: set[str | None] = set()
    for name, dims in zip(operands, rule.operands, strict=True):
        factors = {f for dim in dims for f in dim}
        if axis not in name.axes:
            found |= {f"not {f}" for f in factors}
            continue
        places = [dim[0] for dim, own in zip(dims, name.dims, strict=True) if axis in own and dim]
        found |= set(places) or {None}
    named = {f for f in found if f is None or not f.startswith("not ")}
    (one,) = named if len(named) == 1 else (None,)
    clash = one is None or f"not {one}" in found or one in rule.whole
    return None if clash else one


def _placed(
    name: Name,
    rule: Rule,
    dims: Sequence[tuple[str, ...]],
    factor: str | None,
    axis: str,
    mesh: Mesh,
) -> Name:
    for i, dim in enumerate(dims):
        if factor is not None and dim and dim[0] == factor:
            return name.split(i, (axis,))
    summed = factor is not None and all(factor not in dim for dim in dims)
    if summed and rule.reduce.get(factor or "", "sum") == "sum":
        return replace(name, partial=(*name.partial, axis))
    return replace(name, varying=(*name.varying, axis))


def after(collective: Collective, name: Name) -> Name:
    """The name of a collective's result."""
    kind, axes = collective.kind, collective.axes
    if kind == "permute":
        missing = tuple(a for a in axes if a not in name.axes)
        return replace(name, varying=(*name.varying, *missing))
    name = name.lacking(axes)
    if kind in ("reduce_scatter", "slice"):
        return name.split(collective.dim, axes)
    if kind == "all_to_all":
        return name.split(collective.to_dim, axes)
    if collective.target == "unreduced":
        return replace(name, partial=(*name.partial, *axes))
    if collective.target == "varying":
        return replace(name, varying=(*name.varying, *axes))
    return name
