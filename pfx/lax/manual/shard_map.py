"""`shard_map`: a function written for one device of a mesh, with explicit collectives.

The region is inlined: its arguments are taken apart (`pfx.lax.manual.boundary`), the function runs on
what one device holds, and its results are put together. Outside a trace that is done for all devices at
once (`pfx.lax.manual.local`); inside one, what is recorded are the ops of one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx import _torch, tree
from pfx.errors import MeshError, ShardingError, message
from pfx.lax.linear import apply
from pfx.lax.manual.boundary import Boundary
from pfx.lax.manual.collective import Collective, cast
from pfx.lax.manual.local import variance_of
from pfx.lax.manual.mixing import Mixing
from pfx.lax.region import Region, current_region, inside
from pfx.lax.vmap import spmd_axes
from pfx.mesh import Mesh
from pfx.spec import Axes, P, layout_of, spec_leaves


class ShardMap:
    """A function of global tensors that runs another one on each device; see `pfx.shard_map`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        mesh: Mesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: Sequence[str] | None,
        check: bool,
        strict: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.mesh = fn, mesh
        self.in_specs = tuple(in_specs) if type(in_specs) is list else in_specs
        self.out_specs = out_specs
        self.axis_names, self.check, self.strict = axis_names, check, strict
        self.name = f"shard_map({getattr(fn, '__name__', type(fn).__name__)})"

    def __call__(self, *args: Any) -> Any:
        outer = current_region()
        mesh, axes = self.bound(outer)
        if mesh.kind == "abstract" and not _torch.is_tracing():
            what = f"the mesh {mesh} is abstract: it holds no data and runs nothing."
            raise MeshError(message(f"{self.name}:", what, fix="pfx.jit(…).lower(…) to read it"))
        pairs, treedef = tree.flatten_with_path(args)
        inputs = [
            self.enter(leaf, spec, mesh, axes, f"{self.name}: args{tree.path_string(path)}")
            for (path, leaf), spec in zip(pairs, self.specs_of(args), strict=True)
        ]
        every = mesh.ordered((*axes, *(outer.axes if outer else ())))
        # An enclosing region's mode casts the operands of this one too.
        mixing = Mixing() if outer is None else contextlib.nullcontext()
        with inside(Region(mesh, every, strict=self.strict)), mixing:
            result = self.fn(*tree.unflatten(treedef, inputs))
        pairs, treedef = tree.flatten_with_path(result)
        specs = spec_leaves(self.out_specs, result, f"{self.name}: out_specs", "output")
        outs = [
            self.leave(leaf, spec, mesh, axes, f"{self.name}: output{tree.path_string(path)}")
            for (path, leaf), spec in zip(pairs, specs, strict=True)
        ]
        return tree.unflatten(treedef, outs)

    def specs_of(self, args: tuple[Any, ...]) -> list[Any]:
        """The spec of every leaf of the arguments."""
        return spec_leaves(self.in_specs, args, f"{self.name}: in_specs", "args")

    def bound(self, outer: Region | None) -> tuple[Mesh, Axes]:
        """The mesh and the axes that this region binds.

        Raises:
            ShardingError: without a mesh, for another mesh than that of the enclosing region, for an
                unknown axis, or one that is bound already.
        """
        mesh = self.mesh or (outer.mesh if outer else None)
        where = f"{self.name}:"
        if mesh is None:
            raise ShardingError(message(where, "has no mesh.", fix="pass mesh=make_mesh(…)"))
        taken = outer.axes if outer else ()
        if outer is not None and mesh != outer.mesh:
            what = f"is on {mesh}, inside a region on {outer.mesh}."
            raise ShardingError(message(where, what, fix="leave out mesh= in the inner one"))
        names = self.axis_names
        axes = (names,) if isinstance(names, str) else tuple(names or ())
        if names is None:
            # The axis that splits the batch of a vmap stays with the compiler.
            busy = {*taken, *spmd_axes()}
            axes = tuple(axis for axis in mesh.axis_names if axis not in busy)
        for axis in axes:
            if axis not in mesh.shape or axis in taken or axis in spmd_axes():
                why = "is not an axis of the mesh" if axis not in mesh.shape else "is bound already"
                fix = f"axis_names={[a for a in mesh.axis_names if a not in taken]}"
                raise ShardingError(
                    message(
                        f"{self.name}: axis_names: {axis!r}", f"{why}.", f"mesh: {mesh}", fix=fix
                    )
                )
        return mesh, mesh.ordered(axes)

    def enter(self, leaf: Any, spec: Any, mesh: Mesh, axes: Axes, where: str) -> Any:
        """Take an argument apart; one whose spec is None goes through as it is."""
        if spec is None:
            return leaf
        leaf = torch.as_tensor(leaf)
        self.check_spec(spec, axes, leaf.ndim, where, "in_specs")
        dims = _blocks(spec, leaf.shape, mesh, where)
        boundary = Boundary(mesh, axes, dims, spec.unreduced, spec.reduced, inward=True)
        return apply(boundary, leaf)

    def leave(self, leaf: Any, spec: Any, mesh: Mesh, axes: Axes, where: str) -> torch.Tensor:
        """Put a result together, after checking that it is to each axis what its spec says."""
        if spec is None:
            raise ShardingError(
                message(where, "has no spec.", fix="out_specs=P() if it is the same on all devices")
            )
        if not isinstance(leaf, torch.Tensor):
            leaf = torch.as_tensor(leaf, device=mesh.device)
        self.check_spec(spec, axes, leaf.ndim, where, "out_specs")
        counts = [mesh.count((e,) if isinstance(e, str) else e or ()) for e in spec]
        shape = [n * k for n, k in zip(leaf.shape, counts, strict=False)]
        dims = _blocks(spec, [*shape, *leaf.shape[len(shape) :]], mesh, where)
        boundary = Boundary(mesh, axes, dims, spec.unreduced, spec.reduced, inward=False)
        return apply(boundary, self.checked(leaf, boundary, axes, where))

    def check_spec(self, spec: Any, axes: Axes, rank: int, where: str, given: str) -> None:
        """Refuse a spec that is too long, or names an axis the region does not bind."""
        if not isinstance(spec, P):
            return  # `layout_of` says so
        if len(spec) > rank:
            raise ShardingError(
                message(
                    where,
                    f"has rank {rank}, its {given} entry {spec} names {len(spec)} dims.",
                    fix="return x[None]: blocks are joined along a dim that is there"
                    if given == "out_specs"
                    else f"{P(*spec[:rank])}",
                )
            )
        for axis in spec.axes:
            if axis not in axes:
                raise ShardingError(
                    message(
                        where,
                        f"names the axis {axis!r}, which this region does not bind.",
                        f"spec: {spec}",
                        f"bound axes: {', '.join(map(repr, axes)) or 'none'}",
                        fix=f"add {axis!r} to axis_names, or drop it from the spec",
                    )
                )

    def checked(self, x: torch.Tensor, boundary: Boundary, axes: Axes, where: str) -> torch.Tensor:
        """A result that is to every axis what its spec says; trusted to be with check=False."""
        split = [axis for dim in boundary.dims for axis in dim]
        for axis in axes:
            state = variance_of(x).state(axis)
            if state == "reduced" and axis not in boundary.reduced:
                x = cast(x, boundary.mesh, (axis,), "invarying")
            if state == "varying" and axis not in split:
                if axis in boundary.unreduced:
                    continue  # what the devices hold leaves as addends
                if self.check:
                    raise _still_varies(where, axis, x)
                trusted = Collective("cast", boundary.mesh, (axis,), "varying", "invarying")
                x = apply(trusted, x)
            if state == "unreduced" and axis not in boundary.unreduced:
                raise _still_owed(where, axis)
            if axis in boundary.unreduced and state in ("invarying", "reduced"):
                raise _not_addends(where, axis)
        return x


def _blocks(spec: Any, shape: Sequence[int], mesh: Mesh, where: str) -> tuple[Axes, ...]:
    """The axes of each dim; a region sees equal blocks in order, which not every deal makes."""
    dims = layout_of(spec, shape, mesh, where).dims
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        axis = mesh.dealt(axes, size)
        if axis is not None:
            raise ShardingError(
                message(
                    where,
                    "cannot be split into the blocks that a region works on.",
                    f"{spec} puts dim {dim} (size {size}) on {axis!r}.",
                    f"{axis!r} deals its rows as {mesh.rows(axis, size)}, not in equal blocks in order",
                    f"mesh: {mesh}",
                    fix=f"drop {axis!r} from this spec, or from deals= of the mesh",
                )
            )
    return dims


def _still_varies(where: str, axis: str, x: torch.Tensor) -> ShardingError:
    return ShardingError(
        message(
            where,
            f"varies over {axis!r}, which its out_specs do not mention.",
            f"it is {variance_of(x)}: the devices along {axis!r} may hold different values.",
            fix=f"pfx.lax.psum(x, {axis!r}) or pmean if they are to be combined; "
            f"{axis!r} in out_specs{' and x[None]' if not x.ndim else ''} if they are blocks of the "
            'result; all_gather(…, to="invarying")',
        )
    )


def _still_owed(where: str, axis: str) -> ShardingError:
    return ShardingError(
        message(
            where,
            f"is unreduced over {axis!r}, which its out_specs do not say.",
            fix=f"pfx.lax.psum(x, {axis!r}), or P(…, unreduced=({axis!r},))",
        )
    )


def _not_addends(where: str, axis: str) -> ShardingError:
    return ShardingError(
        message(
            where,
            f"is to be unreduced over {axis!r}, but holds no addends there.",
            fix=f'pfx.lax.pcast(x, {axis!r}, to="unreduced") of a varying value',
        )
    )
