"""The collectives of a manual region as users call them; jax.lax's names and meanings.

All take a pytree, and one axis or a tuple of axes: devices are then numbered row-major in the order
given. Their gradients come from the table in `pfx.lax.manual.collective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pfx import tree
from pfx.errors import ShardingError, message
from pfx.lax.linear import apply
from pfx.lax.manual.axis_index import AxisIndex
from pfx.lax.manual.checks import check_perm, check_split, dim_of, groups_of, refuse_addends
from pfx.lax.manual.collective import Collective
from pfx.lax.manual.local import variance_of
from pfx.lax.region import Region, bound
from pfx.spec import Axes

Axis = str | Sequence[str]
GroupsArg = Sequence[Sequence[int]] | None


def psum(x: Any, axis: Axis, *, groups: GroupsArg = None) -> Any:
    """Sum over the devices along an axis; the result is the same on all of them.

    Varying → invarying, and its transpose is the cast back, which moves nothing; of an unreduced value
    it adds the addends. A value that does not vary is counted once per device. A Python number is
    multiplied by the size of the axis. Booleans are counted, in int32.

    Args:
        axis: one mesh axis, or a tuple.
        groups: disjoint lists of ranks, equally long, to sum within; the result then varies.

    Raises:
        NameError: for an axis that no enclosing `shard_map` binds.

    >>> from pfx import P, make_mesh, shard_map
    >>> total = shard_map(lambda x: psum(x, "dp"), mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P())
    >>> total(torch.arange(4.))
    tensor([2., 4.])
    """
    if not axis:  # over no axis there is nothing to do
        return x
    region, axes = bound("psum", axis)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf * (len(groups[0]) if groups else region.mesh.count(axes))
        leaf = leaf.to(torch.int32) if leaf.dtype == torch.bool else leaf
        if groups is not None:
            gathered = all_gather(leaf, axis, groups=groups)
            return gathered.sum(0, dtype=leaf.dtype)
        return _reduced(leaf, region, axes)

    return tree.map(one, x)


def _reduced(x: torch.Tensor, region: Region, axes: Axes) -> torch.Tensor:
    owed = tuple(axis for axis in axes if variance_of(x).state(axis) == "unreduced")
    rest = tuple(axis for axis in axes if axis not in owed)
    for source, some in (("unreduced", owed), ("varying", rest)):
        if some:
            x = apply(Collective("all_reduce", region.mesh, some, source, "invarying"), x)
    return x


def pmean(x: Any, axis: Axis, *, groups: GroupsArg = None) -> Any:
    """Average over the devices along an axis; integers and booleans become float32.

    >>> from pfx import P, make_mesh, shard_map
    >>> mean = shard_map(lambda x: pmean(x, "dp"), mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P())
    >>> mean(torch.tensor([1., 3.]))
    tensor([2.])
    """
    if not axis:  # over no axis there is nothing to do
        return x
    bound("pmean", axis)
    size = psum(1, axis, groups=groups)

    def one(leaf: Any) -> Any:
        leaf = torch.as_tensor(leaf)
        exact = not (leaf.is_floating_point() or leaf.is_complex())
        return psum(leaf.to(torch.float32) if exact else leaf, axis, groups=groups) / size

    return tree.map(one, x)


def pmax(x: Any, axis: Axis, *, groups: GroupsArg = None) -> Any:
    """The largest value among the devices along an axis, elementwise; not differentiable.

    Varying → invarying, every dtype kept; of NaN and a number, NaN.

    Args:
        axis: one mesh axis, or a tuple.
        groups: disjoint lists of ranks, equally long, to compare within; the result then varies.

    Raises:
        NameError: for an axis that no enclosing `shard_map` binds.
        TraceError: a TypeError, when it is differentiated: apply `stop_gradient` to its operand.

    >>> from pfx import P, make_mesh, shard_map
    >>> largest = shard_map(lambda x: pmax(x, "dp"), mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P())
    >>> largest(torch.tensor([3., 1., 2., 4.]))
    tensor([3., 4.])
    """
    return _extremum(x, "max", axis, groups)


def pmin(x: Any, axis: Axis, *, groups: GroupsArg = None) -> Any:
    """The smallest value among the devices along an axis, elementwise; not differentiable.

    As `pmax` in all else.

    >>> from pfx import P, make_mesh, shard_map
    >>> least = shard_map(lambda x: pmin(x, "dp"), mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P())
    >>> least(torch.tensor([3., 1., 2., 4.]))
    tensor([2., 1.])
    """
    return _extremum(x, "min", axis, groups)


def _extremum(x: Any, reduce: str, axis: Axis, groups: GroupsArg) -> Any:
    if not axis:  # over no axis there is nothing to do
        return x
    region, axes = bound(f"p{reduce}", axis)

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        refuse_addends(leaf, f"p{reduce}", region.axes)  # over others, too, it is not linear
        if groups is not None:
            gathered = all_gather(leaf, axis, groups=groups)
            return gathered.amax(0) if reduce == "max" else gathered.amin(0)
        if leaf.dtype == torch.bool:
            return one(leaf.to(torch.int32)).to(torch.bool)
        made = Collective("all_reduce", region.mesh, axes, "varying", "invarying", reduce=reduce)
        return apply(made, leaf)

    return tree.map(one, x)


def all_gather(
    x: Any,
    axis: Axis,
    *,
    dim: int = 0,
    tiled: bool = False,
    to: str = "varying",
    groups: GroupsArg = None,
) -> Any:
    """Bring together the values of all devices along an axis, on each of them.

    Args:
        dim: where they lie: a new dim of the size of the axis, or with `tiled` the dim along which they
            are concatenated.
        to: what the result is along the axis. It still "varies" by default, and the transpose is then a
            psum_scatter; "invarying": all have the same, and the transpose takes one's own block;
            "reduced": the cotangent comes unreduced and is scattered.
        groups: disjoint lists of ranks, equally long, to gather within.

    >>> from pfx import P, make_mesh, shard_map
    >>> gather = shard_map(lambda x: all_gather(x, "dp", tiled=True, to="invarying"),
    ...                    mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P())
    >>> gather(torch.arange(4.))
    tensor([0., 1., 2., 3.])
    """
    region, axes = bound("all_gather", axis)
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(message("all_gather:", f"to={to!r} is unknown.", fix='to="invarying"'))
    ranks = groups_of("all_gather", groups, region, axes)
    if ranks and to != "varying":
        raise ShardingError(
            message("all_gather:", f"groups hold different values, so the result is not {to}.",
                    fix='to="varying"')
        )  # fmt: skip

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        refuse_addends(leaf, "all_gather", axes)
        at = dim_of("all_gather", dim, leaf.ndim + (not tiled))
        leaf = leaf if tiled else leaf.unsqueeze(at)
        made = Collective("all_gather", region.mesh, axes, "varying", to, dim=at, groups=ranks)
        return apply(made, leaf)

    return tree.map(one, x)


def psum_scatter(
    x: Any, axis: Axis, *, dim: int = 0, tiled: bool = False, groups: GroupsArg = None
) -> Any:
    """Sum over the devices along an axis and leave each its own block of the sum.

    Takes a varying value, or the addends of an unreduced one.

    Args:
        dim: the dim that is split. It has the size of the axis and vanishes, or with `tiled` a multiple
            of it and becomes that much smaller.
        groups: disjoint lists of ranks, equally long, to sum within.

    Raises:
        ShardingError: when the dim does not divide.

    >>> from pfx import P, make_mesh, shard_map
    >>> scatter = shard_map(lambda x: psum_scatter(x, "dp", tiled=True),
    ...                     mesh=make_mesh(dp=2), in_specs=P(), out_specs=P("dp"))
    >>> scatter(torch.arange(4.))
    tensor([0., 2., 4., 6.])
    """
    region, axes = bound("psum_scatter", axis)
    ranks = groups_of("psum_scatter", groups, region, axes)
    size = len(ranks[0]) if ranks else region.mesh.count(axes)

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        at = dim_of("psum_scatter", dim, leaf.ndim)
        check_split("psum_scatter", leaf, at, size, axes, tiled=tiled)
        variance = variance_of(leaf)
        owed = all(variance.state(axis) == "unreduced" for axis in axes)
        if not owed:
            refuse_addends(leaf, "psum_scatter", axes)
        source = "unreduced" if owed else "varying"
        made = Collective(
            "reduce_scatter", region.mesh, axes, source, "varying", dim=at, groups=ranks
        )
        out = apply(made, leaf)
        return out if tiled else out.squeeze(at)

    return tree.map(one, x)


def all_to_all(
    x: Any,
    axis: Axis,
    split_dim: int,
    concat_dim: int,
    *,
    tiled: bool = False,
    groups: GroupsArg = None,
) -> Any:
    """Split a dim among the devices along an axis, and put together what comes from each.

    Args:
        split_dim: the dim whose i-th block goes to the i-th device. Untiled it has the size of the axis
            and vanishes.
        concat_dim: the dim along which the blocks that arrive are concatenated; untiled, where their
            new dim is in the result.

    >>> from pfx import P, make_mesh, shard_map
    >>> move = shard_map(lambda x: all_to_all(x, "tp", 1, 0, tiled=True),
    ...                  mesh=make_mesh(tp=2), in_specs=P("tp"), out_specs=P(None, "tp"))
    >>> bool((move(torch.eye(4)) == torch.eye(4)).all())
    True
    """
    region, axes = bound("all_to_all", axis)
    ranks = groups_of("all_to_all", groups, region, axes)
    size = len(ranks[0]) if ranks else region.mesh.count(axes)

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        refuse_addends(leaf, "all_to_all", axes)
        split = dim_of("all_to_all", split_dim, leaf.ndim)
        concat = dim_of("all_to_all", concat_dim, leaf.ndim)
        check_split("all_to_all", leaf, split, size, axes, tiled=tiled)
        if not tiled:  # the blocks meet in a new dim, and the split one, now of size 1, goes
            at = concat + (concat > split)
            leaf, split = leaf.unsqueeze(at), split + (at <= split)
            concat = at
        made = Collective(
            "all_to_all", region.mesh, axes, "varying", "varying", concat, split, groups=ranks
        )
        out = apply(made, leaf)
        return out if tiled else out.squeeze(split)

    return tree.map(one, x)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Send each device's value along an axis to another; who is sent nothing gets zeros.

    Args:
        perm: (source, destination) pairs of ranks along the axis.

    Raises:
        ShardingError: a ValueError, when a source or a destination occurs twice or is no rank.

    >>> from pfx import P, make_mesh, shard_map
    >>> ring = shard_map(lambda x: ppermute(x, "dp", [(0, 1), (1, 0)]),
    ...                  mesh=make_mesh(dp=2), in_specs=P("dp"), out_specs=P("dp"))
    >>> ring(torch.arange(4.))
    tensor([2., 3., 0., 1.])
    """
    region, axes = bound("ppermute", axis)
    pairs = tuple((int(start), int(to)) for start, to in perm)
    check_perm(pairs, region.mesh.count(axes), axes)

    def one(leaf: Any) -> torch.Tensor:
        leaf = torch.as_tensor(leaf)
        refuse_addends(leaf, "ppermute", axes)
        made = Collective("permute", region.mesh, axes, "varying", "varying", perm=pairs)
        return apply(made, leaf)

    return tree.map(one, x)


def pshuffle(x: Any, axis: Axis, perm: Sequence[int]) -> Any:
    """Give the i-th device along an axis the value of device ``perm[i]``.

    Args:
        perm: a permutation of the ranks along the axis.

    Raises:
        ShardingError: a ValueError, when `perm` does not name each rank once.

    >>> from pfx import P, make_mesh, shard_map
    >>> turned = shard_map(lambda x: pshuffle(x, "dp", [2, 0, 1]),
    ...                    mesh=make_mesh(dp=3), in_specs=P("dp"), out_specs=P("dp"))
    >>> turned(torch.arange(3.))
    tensor([2., 0., 1.])
    """
    size = axis_size(axis)
    if sorted(perm) != list(range(size)):
        raise ShardingError(
            message("pshuffle:", f"{list(perm)} is no permutation of {size} ranks.",
                    fix=f"list each of 0 … {size - 1} once")
        )  # fmt: skip
    return ppermute(x, axis, [(start, to) for to, start in enumerate(perm)])


def axis_index(axis: Axis) -> torch.Tensor:
    """The rank of a device along an axis, int64; over several, row-major in the order given.

    >>> from pfx import P, make_mesh, shard_map
    >>> shard_map(lambda: axis_index("dp")[None], mesh=make_mesh(dp=3), in_specs=(), out_specs=P("dp"))()
    tensor([0, 1, 2])
    """
    region, axes = bound("axis_index", axis)
    return AxisIndex(region.mesh, axes)()[0]


def axis_size(axis: Axis) -> int:
    """The number of devices along an axis, or along the product of several, as a Python number.

    >>> from pfx import P, make_mesh, shard_map
    >>> shard_map(lambda: torch.tensor(axis_size(("dp", "tp"))), mesh=make_mesh(dp=2, tp=3),
    ...           in_specs=(), out_specs=P())()
    tensor(6)
    """
    region, axes = bound("axis_size", axis)
    return region.mesh.count(axes)
