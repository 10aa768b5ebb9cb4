"""The two sides of a manual region: global values are taken apart going in, put together going out.

Each is the transpose of the other: the cotangent of a block is the block of the cotangent. Addends and
copies change places: what comes in unreduced gets a cotangent that is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch
from pfx._torch import TensorMeta
from pfx.errors import ShardingError, message
from pfx.lax.collective import cast
from pfx.lax.collective_math import ordered_sum
from pfx.lax.constrain import Constraint
from pfx.lax.local import local, part_at, variance_of
from pfx.lax.spmd_axis import spmd_axis
from pfx.lax.variance import Variance
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout, local_shape, local_slices


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
        return (_torch.apply(_Boundary, self, x),)

    def transposed(self) -> Boundary:
        """The way of the cotangent."""
        return replace(self, unreduced=self.reduced, reduced=self.unreduced, inward=not self.inward)

    def batched(self) -> Boundary:
        """The same for a value with one more leading dim, which the region does not split."""
        return replace(self, dims=((), *self.dims))

    def beside(self, axis: str) -> Constraint:
        """On the global side: the leading dim of a batch is split over an axis of the compiler's."""
        spec = Layout(((axis,), *self.dims[1:]), self.unreduced).spec
        return Constraint(spec, spec.dual)

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
        whole = part_at(x, place)
        part = whole[local_slices(whole.shape, self.layout, self.mesh, place)].clone()
        return torch.zeros_like(part) if any(place[a] for a in self.unreduced) else part

    def joined(self, x: torch.Tensor, place: Mapping[str, int]) -> torch.Tensor:
        """The whole that the devices at a place of an enclosing region hold together."""
        shape = self.out_meta(x).shape
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        split = Layout(self.dims)
        for block in self.mesh.coordinates(split.axes):
            addends = [
                part_at(x, {**place, **block, **owed})
                for owed in self.mesh.coordinates(self.unreduced)
            ]
            out[local_slices(shape, split, self.mesh, block)] = ordered_sum(addends)
        return out


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(boundary: Boundary, x: torch.Tensor) -> torch.Tensor:
        return _torch.bind(boundary, [x], [boundary.out_meta(x)])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.boundary = inputs[0]
        if not output.is_floating_point() and not output.is_complex():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, Any]:  # type: ignore[override]
        return None, cross(ctx.boundary.transposed(), cotangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, boundary: Boundary, x: torch.Tensor) -> tuple[Any, int]:
        axis, boundary, x = spmd_axis(), boundary.batched(), x.movedim(in_dims[1], 0)
        if axis is None:
            return cross(boundary, x), 0
        if boundary.inward:
            return cross(boundary, boundary.beside(axis)(x)[0]), 0
        return boundary.beside(axis)(cross(boundary, x))[0], 0

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cross(ctx.boundary, tangent)


def cross(boundary: Boundary, x: torch.Tensor) -> torch.Tensor:
    """Bring a value across; on the way out it must first be to each axis what the boundary says."""
    if not boundary.inward:
        x = agreeing(boundary, x)
    return _torch.apply(_Boundary, boundary, x)


def agreeing(boundary: Boundary, x: torch.Tensor) -> torch.Tensor:
    """Cast a value that is about to leave: copies beside blocks are blocks too."""
    split = tuple(axis for dim in boundary.dims for axis in dim)
    for axes, state in ((split, "varying"), (boundary.unreduced, "unreduced")):
        x = cast(x, boundary.mesh, axes, state)
    return cast(x, boundary.mesh, boundary.reduced, "reduced")
