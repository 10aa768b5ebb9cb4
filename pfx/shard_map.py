"""`shard_map` as users call it: on tensors, on Arrays, inside other functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx import _torch, tree
from pfx.api import Jitted, device_get, jit
from pfx.array import Array
from pfx.errors import TraceError, message
from pfx.lax.manual.shard_map import ShardMap
from pfx.lax.region import current_region
from pfx.mesh import Mesh


class ShardMapped:
    """A region that can also be called on its own: on Arrays, or on a process mesh, it is compiled.

    A compiled region is traced from shapes: a Python `if` on a value is then an error, also where the
    value is the same on all devices. Under a transform of torch.func, outside of `jit`, it is not
    compiled but computed for all devices from the global values: on a process mesh by every process,
    which is right, but neither faster nor smaller than on a simulated one.
    """

    def __init__(self, mapped: ShardMap) -> None:
        functools.update_wrapper(self, mapped.fn)
        self.region = mapped
        self.compiled: dict[Any, Jitted] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        arrays = any(isinstance(leaf, Array) for leaf in leaves)
        mesh = self.region.mesh
        inlined = _torch.is_transforming() or current_region() is not None
        if mesh is None or inlined or (mesh.kind == "simulated" and not arrays):
            return self.region(*args)
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in leaves):
            raise TraceError(
                message(
                    f"{self.region.name}: on {mesh}",
                    "is compiled, and plain backward() does not go through a compiled program.",
                    fix="pfx.jit(pfx.grad(loss), mesh=mesh), with the region inside; or x.detach()",
                )
            )
        specs = self.region.specs_of(args)
        held = tuple(
            spec is not None or isinstance(leaf, (Array, torch.Tensor))
            for leaf, spec in zip(leaves, specs, strict=True)
        )
        fixed = tuple(leaf for leaf, moves in zip(leaves, held, strict=True) if not moves)
        step = self.step(treedef, held, fixed, mesh)
        out = step(*(leaf for leaf, moves in zip(leaves, held, strict=True) if moves))
        return out if arrays else device_get(out)

    def step(
        self, treedef: tree.TreeDef, held: tuple[bool, ...], fixed: tuple[Any, ...], mesh: Mesh
    ) -> Jitted:
        """The compiled region for arguments of one structure; `fixed` leaves are not tensors."""
        key = (treedef, held, tuple(map(_key, fixed)))  # `run` below keeps them alive
        if key not in self.compiled:

            def run(*tensors: torch.Tensor) -> Any:
                moving, rest = iter(tensors), iter(fixed)
                return self.region(
                    *tree.unflatten(treedef, [next(moving if moves else rest) for moves in held])
                )

            run.__name__ = self.region.name
            # Where axes are left to the compiler, so is where they leave the results.
            whole = self.region.bound(None)[1] == mesh.axis_names
            out_specs = self.region.out_specs if whole else None
            self.compiled[key] = jit(run, mesh=mesh, out_specs=out_specs)
        return self.compiled[key]


def _key(leaf: Any) -> Any:
    """What tells one argument that is no tensor from another."""
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def shard_map(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Sequence[str] | None = None,
    check: bool = True,
    strict: bool = False,
) -> Any:
    """Run a function on each device of a mesh, on its own block of every argument.

    The function is written for one device and talks to others by `pfx.lax` collectives. Blocks keep the
    rank of the global values: ``P("dp")`` gives a device rows, not a row. Every value inside is
    varying, invarying, unreduced or reduced along each axis (see `pfx.lax.pcast`), which makes
    gradients right and a wrong `out_specs` an error. A gradient taken *inside* with respect to an
    invarying value is the sum over the devices; cast the value to varying first for the local one.

    Args:
        fn: a function of pytrees of tensors; it may close over tensors, which are the same
            everywhere. Without it, a decorator is returned.
        mesh: the devices; inside another region, its mesh.
        in_specs: a tuple with a pytree of `P` (or a prefix) per argument. None passes an argument
            through untouched.
        out_specs: a pytree of `P` (or a prefix) for the result.
        axis_names: the axes the function is written for; all by default. The others stay with the
            compiler.
        check: False trusts an output that may vary over an axis its spec does not mention to be the
            same on all devices along it, and takes the first.
        strict: make every automatic cast of an operand an error that says what to write.

    Returns:
        A function of global values, differentiable and vmappable: torch tensors in, torch tensors
        out; Arrays in, Arrays out. Inside `jit` it is part of the program.

    Raises:
        ShardingError: for specs that do not fit, or a result that varies where its spec says it does
            not, with the collective to call.

    >>> from pfx import P, make_mesh
    >>> from pfx.lax import psum
    >>> mesh = make_mesh(dp=4)
    >>> mean = shard_map(lambda x: psum(x.sum(), "dp") / psum(x.numel(), "dp"),
    ...                  mesh=mesh, in_specs=P("dp"), out_specs=P())
    >>> mean(torch.arange(8.))
    tensor(3.5000)
    """
    options: dict[str, Any] = {
        "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "axis_names": axis_names,
        "check": check, "strict": strict,
    }  # fmt: skip
    if fn is None:
        return functools.partial(shard_map, **options)
    return ShardMapped(ShardMap(fn, **options))
