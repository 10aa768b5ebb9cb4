"""An error in one process becomes an error in all of a mesh, so that none of them waits for it later."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pfx.interop.hf.problems import WeightsError
from pfx.mesh import Mesh
from pfx.runtime import process_world


def together(where: str, mesh: Mesh | None) -> AbstractContextManager[None]:
    """Run a block in every process of a mesh, or in this one alone; they meet at its end.

    Raises:
        WeightsError: where the block went well, but not in another process: which, and its error.
    """
    world = process_world.Alone() if mesh is None else process_world.world_of(mesh)
    return process_world.together(world, where, WeightsError)
