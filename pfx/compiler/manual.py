"""Manual regions in a compilation: which axes they have taken, and how values cross their boundaries.

Inside a region the shapes of a graph are those that one device holds, as far as the region's axes are
concerned; what the compiler splits further, it splits over other axes. How a program names such values
is in `pfx.compiler.part_names`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx

from pfx.compiler.reshard import Move
from pfx.compiler.rule import operand_nodes
from pfx.errors import ShardingError, message
from pfx.lax.manual.boundary import Boundary
from pfx.lax.manual.collective import Collective
from pfx.lax.manual.variance import node_variance
from pfx.lax.scan import Loop
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import Axes, Layout

Node = torch.fx.Node


def has_regions(graph: torch.fx.Graph) -> bool:
    """Tell whether a graph, or the body of a loop in it, has a manual region."""
    return any(
        isinstance(node.target, (Boundary, Collective))
        or (isinstance(node.target, Loop) and has_regions(node.target.body.module.graph))
        for node in graph.nodes
    )


def check_meshes(graph: torch.fx.Graph, mesh: Mesh, where: str) -> None:
    """Refuse a region, all depths, that is written for other axes than the program is compiled for."""
    for node in graph.nodes:
        target = node.target
        if isinstance(target, Loop):
            check_meshes(target.body.module.graph, mesh, where)
        elif isinstance(target, Boundary) and (
            (target.mesh.axes, target.mesh.deals) != (mesh.axes, mesh.deals)
        ):
            raise ShardingError(
                message(
                    f"{where}: a shard_map inside",
                    f"is on the mesh {target.mesh}, the function on {mesh}.",
                    fix="one mesh for both, and axis_names= for the axes that the region uses",
                )
            )


def settle(graph: torch.fx.Graph) -> None:
    """Note the variance of every value, all depths, then drop the casts, which move nothing."""
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            settle(node.target.body.module.graph)
        if node.op != "output":
            node_variance(node)
    for node in list(graph.nodes):
        if isinstance(node.target, Collective) and node.target.only_types:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


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
        unequal = {axis for axis, _ in boundary.mesh.deals}
        beside = tuple(
            axes if not own or unequal.isdisjoint(axes) else ()
            for own, axes in zip(boundary.dims, have.dims, strict=True)
        )
        have = have if beside == have.dims else Layout(beside)
        dims = tuple(own + rest for own, rest in zip(boundary.dims, have.dims, strict=True))
        return Layout(have.dims, owed), Layout(dims, both)
    rests = []
    for own, axes in zip(boundary.dims, have.dims, strict=True):
        rest = axes[len(own) :] if axes[: len(own)] == own else ()
        rests.append(tuple(a for a in rest if a not in boundary.region))
    dims = tuple(own + rest for own, rest in zip(boundary.dims, rests, strict=True))
    return Layout(dims, both), Layout(tuple(rests), owed)


def move_of(collective: Collective, layout: Layout) -> Move:
    """A hand-written collective as a move of the program."""
    c = collective
    return Move(c.kind, c.axes, c.dim, c.to_dim, layout, c.reduce, c.perm, c.groups)


def rank_of_device(*, offset: tuple[int, ...], device: str) -> torch.Tensor:
    """What `axis_index` runs: the runtime passes the rank."""
    return torch.tensor(offset[0], device=device)


rank_of_device.__name__ = "axis_index"
