"""The two sides of a manual region: global values are taken apart going in, put together going out.

Each is the transpose of the other: the cotangent of a block is the block of the cotangent. Addends and
copies change places: what comes in unreduced gets a cotangent that is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pfx.array import assemble
from pfx.errors import ShardingError, message
from pfx.lax.constrain import Constraint
from pfx.lax.linear import apply
from pfx.lax.manual.collective import cast
from pfx.lax.manual.local import local, part_at, variance_of
from pfx.lax.manual.variance import Variance
from pfx.lax.vmap import spmd_axis
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import Axes, Layout, distinct_coordinates, local_shape, part_of


@dataclass(frozen=True)
class Boundary:
    """From global to local (`inward`) or back, for a value split as `dims` say.

    `region` names the axes that the region is written for. Along `unreduced` ones the devices hold
    addends, along `reduced` ones copies whose cotangent is addends, along all others copies.
    """

    mesh: Mesh
    region: Axes
    dims: tuple[Axes, ...]
    unreduced: Axes
    reduced: Axes
    inward: bool

    @property
    def __name__(self) -> str:
        return "enter" if self.inward else "leave"

    @property
    def layout(self) -> Layout:
        """Where the parts of the global value live, as far as the region's axes are concerned."""
        return Layout(self.dims, self.unreduced)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (apply(self, x),)

    def transposed(self) -> Boundary:
        """The way of the cotangent."""
        return replace(self, unreduced=self.reduced, reduced=self.unreduced, inward=not self.inward)

    def pushed(self) -> Boundary:
        """The way of the tangent."""
        return self

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """A value that is about to leave must be to each axis what the boundary says."""
        if self.inward:
            return x
        split = tuple(axis for dim in self.dims for axis in dim)  # copies are blocks too
        for axes, state in ((split, "varying"), (self.unreduced, "unreduced")):
            x = cast(x, self.mesh, axes, state)
        return cast(x, self.mesh, self.reduced, "reduced")

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        """The same for a value with one more leading dim, which the region does not split.

        Where a vmap has said so, the compiler splits it, outside and inside.
        """
        axis, batched = spmd_axis(), replace(self, dims=((), *self.dims))
        if axis is None:
            return apply(batched, x)
        spec = Layout(((axis,), *self.dims), self.unreduced).spec
        beside = Constraint(spec, spec.dual)
        return apply(batched, apply(beside, x)) if self.inward else apply(beside, apply(batched, x))

    def result_variances(self, operands: Sequence[Variance]) -> tuple[Variance, ...]:
        """What the result is along each axis: on the way out, nothing special."""
        (before,) = operands
        if not self.inward:
            self.check(before)
        states = (("varying", self.layout.axes), ("unreduced", self.unreduced))
        for state, axes in (*states, ("reduced", self.reduced)):
            before = before.having(axes, state if self.inward else "invarying")
        return (before,)

    def check(self, leaving: Variance) -> None:
        """Refuse what would leave as one device's value though the devices' values differ.

        On the way forward `shard_map` has said so already. On the way back it is a cotangent that
        some function computed without knowing of the region.
        """
        for axis in self.region:
            wanted = next(
                (
                    state
                    for state, axes in (
                        ("varying", [a for dim in self.dims for a in dim]),
                        ("unreduced", self.unreduced),
                        ("reduced", self.reduced),
                    )
                    if axis in axes
                ),
                "invarying",
            )
            if leaving.state(axis) != wanted:
                raise ShardingError(
                    message(
                        "shard_map: a value or a gradient that leaves it",
                        f"is {leaving.state(axis)} over {axis!r} and must be {wanted}.",
                        "an op that does not know of the region, such as a torch.autograd.Function "
                        "under plain backward(), was given operands that differ along the axis.",
                        fix=f'cast what it is given: pfx.lax.pcast(x, {axis!r}, to="varying"); '
                        "pfx.custom_vjp for a rule of your own",
                    )
                )

    def out_meta(self, x: torch.Tensor) -> TensorMeta:
        """The form of a part, or of the whole."""
        if self.inward:
            shape = local_shape(tuple(x.shape), self.layout, self.mesh)
        else:
            counts = [self.mesh.count(axes) for axes in self.dims]
            shape = tuple(n * k for n, k in zip(x.shape, counts, strict=True))
        return TensorMeta(shape, x.dtype, x.device.type)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split or assemble, for all devices at once."""
        (after,) = self.result_variances([variance_of(x)])
        places = self.mesh.coordinates(self.mesh.ordered(tuple(after.axes)))
        one = self.split if self.inward else self.joined
        return (local(self.mesh, after, [one(x, place) for place in places]),)

    def split(self, x: torch.Tensor, place: Mapping[str, int]) -> torch.Tensor:
        """What one device gets of a value."""
        return part_of(part_at(x, place), self.layout, self.mesh, place).clone()

    def joined(self, x: torch.Tensor, place: Mapping[str, int]) -> torch.Tensor:
        """The whole that the devices at a place of an enclosing region hold together."""
        blocks = distinct_coordinates(self.layout, self.mesh)
        parts = tuple(part_at(x, {**place, **block}) for block in blocks)
        return assemble(self.out_meta(x).shape, x.dtype, self.layout, self.mesh, parts)
