"""Move an array from one layout to another: a program of collectives and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pfx.array import Array
from pfx.compiler.lower import lower
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.runtime import runtime_of
from pfx.spec import Layout


def resharded(array: Array, layout: Layout) -> Array:
    """Move an array to another layout; the array itself if it has that layout already."""
    if array.layout == layout:
        return array
    move = _mover(array.shape, array.dtype, array.mesh, array.layout, layout)
    return move(array)


def parts_of(value: Any, mesh: Mesh, layout: Layout, *, keep: bool) -> list[torch.Tensor]:
    """The parts of an array, or of a global value: of its copy, where it is one to `keep`."""
    if isinstance(value, Array):
        return list(resharded(value, layout).parts)
    value = torch.as_tensor(value)
    return list(runtime_of(mesh).split(value.clone() if keep else value, layout))


@functools.lru_cache(maxsize=1024)
def _mover(
    shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, source: Layout, target: Layout
) -> Callable[[Array], Array]:
    """A program of moves only, from one layout to another."""
    lowered = lower(
        lambda x: [x], [TensorMeta(shape, dtype, mesh.device)], [source], lambda _: [target], mesh
    )
    runtime = runtime_of(mesh)
    run = runtime.prepare(lowered.program, check=False, deterministic=False, seed=None)

    def move(array: Array) -> Array:
        (parts,) = run([list(array.parts)])
        return Array(shape, dtype, mesh, target, tuple(parts), runtime.coordinate)

    return move
