"""The collectives of a manual region as one linear primitive, and the one table of their transposes.

A collective is typed by what its operand and its result are along its axes (`pfx.lax.manual.variance`), and
its transpose follows from that: a psum takes a varying value to an invarying one, so its transpose takes
an invarying cotangent to a varying one, which moves nothing. Every gradient in a region, and Megatron's
pair of conjugate operators f and g (Shoeybi et al. 2019, arXiv:1909.08053, section 3), comes from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx.errors import TraceError, message
from pfx.lax.linear import apply
from pfx.lax.manual.local import local, part_at, variance_of
from pfx.lax.manual.transport import Groups, Perm, alone, joint, pick, team
from pfx.lax.manual.variance import Variance
from pfx.lax.region import shown
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import Axes

# (kind, what the operand is, what the result is): each is the transpose of the other.
_PAIRS = (
    (("cast", "invarying", "varying"), ("all_reduce", "varying", "invarying")),
    (("cast", "invarying", "reduced"), ("all_reduce", "unreduced", "invarying")),
    (("cast", "reduced", "varying"), ("cast", "varying", "unreduced")),
    (("all_gather", "varying", "varying"), ("reduce_scatter", "varying", "varying")),
    (("all_gather", "varying", "invarying"), ("slice", "invarying", "varying")),
    (("all_gather", "varying", "reduced"), ("reduce_scatter", "unreduced", "varying")),
    (("all_to_all", "varying", "varying"), ("all_to_all", "varying", "varying")),
    (("permute", "varying", "varying"), ("permute", "varying", "varying")),
    # Not for users: a value taken on trust to be the same, and one that the first device owns.
    (("cast", "varying", "invarying"), ("own", "invarying", "varying")),
    (("cast", "reduced", "invarying"), ("own", "invarying", "unreduced")),
)
TRANSPOSE = dict(_PAIRS) | {b: a for a, b in _PAIRS}


@dataclass(frozen=True)
class Collective:
    """One collective over the product of some axes, row-major in the order given.

    `dim` is the dim that is gathered, scattered, sliced or concatenated along; `to_dim` the one that an
    all_to_all splits. `perm` lists a permutation's (source, destination) pairs; `groups` restricts
    the collective to disjoint lists of ranks.
    """

    kind: str
    mesh: Mesh
    axes: Axes
    source: str
    target: str
    dim: int = -1
    to_dim: int = -1
    perm: Perm = ()
    groups: Groups = ()
    reduce: str = "sum"

    @property
    def __name__(self) -> str:
        return self.kind

    @property
    def recompute(self) -> bool:
        """Tell what is never saved for a backward part: what moves nothing."""
        return self.kind in ("cast", "slice")

    @property
    def only_types(self) -> bool:
        """Tell a cast that changes no device's tensor, nor how many there are that differ."""
        return self.kind == "cast" and (self.source, self.target) != ("varying", "invarying")

    @property
    def public_name(self) -> str:
        """The name users call it by."""
        names = {"all_reduce": f"p{self.reduce}", "reduce_scatter": "psum_scatter"}
        return names.get(self.kind, "ppermute" if self.kind == "permute" else self.kind)

    @property
    def size(self) -> int:
        """How many devices take part together."""
        return len(self.groups[0]) if self.groups else self.mesh.count(self.axes)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (apply(self, x),)

    def transposed(self) -> Collective:
        """The collective that the cotangent goes through.

        Raises:
            TraceError: for a maximum or minimum, which is not linear.
        """
        if self.reduce != "sum":
            raise _not_differentiable(self)
        kind, source, target = TRANSPOSE[self.kind, self.source, self.target]
        dim, to_dim = (self.to_dim, self.dim) if kind == "all_to_all" else (self.dim, self.to_dim)
        perm = tuple((to, start) for start, to in self.perm)
        return replace(
            self, kind=kind, source=source, target=target, dim=dim, to_dim=to_dim, perm=perm
        )

    def pushed(self) -> Collective:
        """The collective that the tangent goes through.

        Raises:
            TraceError: for a maximum or minimum.
        """
        if self.reduce != "sum":
            raise _not_differentiable(self)
        return self

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """The operand, cast along the axes to what the collective takes."""
        return cast(x, self.mesh, self.axes, self.source)

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        """The same for a value with one more leading dim."""
        return apply(replace(self, dim=_next(self.dim), to_dim=_next(self.to_dim)), x)

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Variance, ...]:
        """What the result is along each axis."""
        (before,) = operands
        assert all(before.state(axis) == self.source for axis in self.axes), (self, before)
        return (before.having(self.axes, self.target),)

    def out_meta(self, x: torch.Tensor) -> TensorMeta:
        """The form of the result on one device."""
        shape = list(x.shape)
        if self.kind in ("all_gather", "all_to_all"):
            shape[self.dim] *= self.size
        if self.kind in ("reduce_scatter", "slice"):
            shape[self.dim] //= self.size
        if self.kind == "all_to_all":
            shape[self.to_dim] //= self.size
        return TensorMeta(tuple(shape), x.dtype, x.device.type)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do it for all devices at once, to a value that holds all their parts."""
        (after,) = self.result_variances([variance_of(x)])
        make, take = _together(self)
        done: dict[tuple[tuple[int, ...], int], Any] = {}
        parts = []
        for place in self.mesh.coordinates(self.mesh.ordered(tuple(after.axes))):
            full = {axis: place.get(axis, 0) for axis in self.mesh.axis_names}
            rank = self.mesh.index(full, self.axes)
            members, mine = team(self.groups, rank, self.mesh.count(self.axes))
            elsewhere = {**full, **dict.fromkeys(self.axes, 0)}
            key = members, self.mesh.index(elsewhere)
            if key not in done:
                held = [part_at(x, {**full, **self.coordinate(m)}) for m in members]
                done[key] = make(held)
            # A copy, as on devices of their own: a later change in place must stay with one of them.
            parts.append(take(done[key], mine).clone())
        return (local(self.mesh, after, parts),)

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """Where along the axes the device with this rank is."""
        place = {}
        for axis in reversed(self.axes):
            rank, place[axis] = divmod(rank, self.mesh.shape[axis])
        return place


def _next(dim: int) -> int:
    return dim if dim < 0 else dim + 1


def _together(c: Collective) -> tuple[Any, Any]:
    """What the members make together, and what one of them takes of it."""
    if c.kind in ("cast", "slice", "own"):
        own = alone(c.kind, dim=c.dim, size=c.size)
        return list, lambda parts, rank: own(parts[rank], rank)
    made = joint(c.kind, dim=c.dim, reduce=c.reduce)
    return made, pick(c.kind, dim=c.dim, to_dim=c.to_dim, size=c.size, perm=c.perm)


def _brought(x: Any, mesh: Mesh, axes: Axes, source: str, target: str) -> torch.Tensor:
    """A value cast to another state along some axes, in one step or two."""
    for kind, before, after in _CASTS.get((source, target), ()):
        x = apply(Collective(kind, mesh, axes, before, after), x)
    if (source, target) in _CASTS:
        return x
    raise TraceError(
        message(
            f"a value that is {source} over {', '.join(map(repr, axes))}",
            f"is where one that is {target} belongs: {tuple(x.shape)}.",
            "a cotangent must be to its axes what the dual of its primal is.",
            fix=f"pfx.lax.psum(x, {shown(axes)!r})",
        )
    )


# How a value gets from one state to another without communication.
_CASTS = {
    ("invarying", "varying"): (("cast", "invarying", "varying"),),
    ("invarying", "reduced"): (("cast", "invarying", "reduced"),),
    ("invarying", "unreduced"): (("own", "invarying", "unreduced"),),
    ("reduced", "varying"): (("cast", "reduced", "varying"),),
    ("reduced", "invarying"): (("cast", "reduced", "invarying"),),
    ("reduced", "unreduced"): (
        ("cast", "reduced", "invarying"),
        ("own", "invarying", "unreduced"),
    ),
    ("varying", "unreduced"): (("cast", "varying", "unreduced"),),
}


def cast(x: torch.Tensor, mesh: Mesh, axes: Axes, state: str) -> torch.Tensor:
    """Say that a value is to be in another state along some axes; moves nothing."""
    for source in ("invarying", "reduced", "varying"):
        moving = tuple(a for a in axes if variance_of(x).state(a) == source != state)
        if moving:
            x = _brought(x, mesh, moving, source, state)
    return x


def _not_differentiable(collective: Collective) -> TraceError:
    name = f"p{collective.reduce}"
    return TraceError(
        message(
            f"{name} over {', '.join(map(repr, collective.axes))}",
            "has no derivative here: which device holds the extremum is not differentiated.",
            fix=f"pfx.lax.{name}(pfx.lax.stop_gradient(x), {shown(collective.axes)!r})",
        )
    )
