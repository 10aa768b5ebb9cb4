"""An error in one process becomes an error in all, so that none of them waits for it later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pfx.errors import message
from pfx.interop.hf.problems import WeightsError
from pfx.mesh import Mesh
from pfx.runtime.process_world import world_of


@contextlib.contextmanager
def together(where: str, mesh: Mesh | None) -> Iterator[None]:
    """Run a block in every process of a mesh; they meet at its end.

    Raises:
        WeightsError: where the block went well, but not in another process: which, and its error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = [str(error) if error else None]
    if mesh is not None and mesh.kind == "process":
        texts = world_of(mesh).exchange(texts[0], where)
    if error is not None:
        raise error
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if failed:
        text = failed[0][1]
        ranks = ", ".join(str(rank) for rank, _ in failed)
        raise WeightsError(message(where, f"failed on rank {ranks}.", *text.splitlines()))
