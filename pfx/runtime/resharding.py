"""Move an array from one layout to another: a program of collectives and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

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
