"""Manual regions in a program: a device's own values, named as parts of global ones.

Inside a region the shapes of a graph are those that one device holds, as far as the region's axes are
concerned. A program names every value globally, so that a hand-written block prints as the annotated one
would: ``f32[8, 256/tp]`` where the devices along tp hold blocks of a dim, ``+tp`` where they hold addends,
and ``~tp`` where their values are unrelated. A name says nothing that a runtime needs: what it reads is
the local shape, and along which axes there are different parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from pfx.compiler.reshard import Move
from pfx.compiler.rule import Rule, operand_nodes
from pfx.lax.boundary import Boundary
from pfx.lax.collective import Collective
from pfx.lax.scan import Loop
from pfx.lax.variance import node_variance
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import Axes, Layout

Node = torch.fx.Node


def settle(graph: torch.fx.Graph) -> bool:
    """Note every value's variance, then drop the casts, which move nothing; tell if there were regions."""
    found = any(isinstance(node.target, (Boundary, Collective)) for node in graph.nodes)
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            found |= settle(node.target.body.module.graph)
        if node.op != "output":
            node_variance(node)
    for node in list(graph.nodes):
        if isinstance(node.target, Collective) and node.target.only_types:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return found


def busy_axes(node: Node, mesh: Mesh) -> Axes:
    """The axes along which a node's operands or results differ between devices, or communicate."""
    # An operand that is the same on all devices must not be split over what a psum counts.
    axes = set(node.target.axes) if isinstance(node.target, Collective) else set()
    for value in (node, *operand_nodes(node)):
        variance = node_variance(value)
        for one in variance if isinstance(variance, tuple) else (variance,):
            axes |= one.axes
    return mesh.ordered(tuple(axes))


def axes_of(meta: TensorMeta) -> frozenset[str]:
    """The axes along which the devices of a region have values of their own."""
    return meta.variance.axes if meta.variance else frozenset()


def without(layout: Layout, axes: Collection[str]) -> Layout:
    """The layout of the same value with some axes not split over."""
    kept = tuple(tuple(a for a in dim if a not in axes) for dim in layout.dims)
    return layout if kept == layout.dims else Layout(kept)


# Boundaries -------------------------------------------------------------------------------------


def boundary_layouts(boundary: Boundary, have: Layout) -> tuple[Layout, Layout]:
    """Where a boundary needs its operand, and where its result then is, without names.

    What other axes split, or hold addends of, stays so; on one dim, the region's axes are the major
    ones.
    """
    owed = (
        () if have.reduce != "sum" else tuple(a for a in have.partial if a not in boundary.region)
    )
    both = (*boundary.unreduced, *owed)
    if not boundary.inward:
        have = without(have, boundary.layout.axes)
        dims = tuple(own + rest for own, rest in zip(boundary.dims, have.dims, strict=True))
        return Layout(have.dims, owed), Layout(dims, both)
    rests = []
    for own, axes in zip(boundary.dims, have.dims, strict=True):
        rest = axes[len(own) :] if axes[: len(own)] == own else ()
        rests.append(tuple(a for a in rest if a not in boundary.region))
    dims = tuple(own + rest for own, rest in zip(boundary.dims, rests, strict=True))
    return Layout(dims, both), Layout(tuple(rests), owed)


# Names ------------------------------------------------------------------------------------------


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


def move_of(collective: Collective, layout: Layout) -> Move:
    """A hand-written collective as a move of the program."""
    c = collective
    return Move(c.kind, c.axes, c.dim, c.to_dim, layout, c.reduce, c.perm, c.groups)


def rank_of_device(*, offset: tuple[int, ...], device: str) -> torch.Tensor:
    """What `axis_index` runs: the runtime passes the rank."""
    return torch.tensor(offset[0], device=device)


rank_of_device.__name__ = "axis_index"
