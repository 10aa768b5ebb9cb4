"""An error in one process becomes an error in all, so that none of them waits for it later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pfx.api import device_get
from pfx.array import Array
from pfx.errors import message
from pfx.interop.hf.problems import WeightsError
from pfx.mesh import Mesh
from pfx.runtime import runtime_of
from pfx.spec import Layout


@contextlib.contextmanager
def together(where: str, mesh: Mesh | None) -> Iterator[None]:
    """Run a block in every process of a mesh; they meet at its end.

    Raises:
        WeightsError: where the block went well, but not in another process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = _failures(mesh, error)
    if error is not None:
        raise error
    if failed:
        raise WeightsError(message(where, f"failed in {failed} other processes; see their errors."))


def _failures(mesh: Mesh | None, error: Exception | None) -> int:
    here = int(error is not None)
    if mesh is None or mesh.kind != "process":
        return here
    flag = torch.tensor([here], device=mesh.device)
    layout = Layout(((),), partial=mesh.axis_names)
    coordinate = runtime_of(mesh).coordinate
    return int(device_get(Array((1,), flag.dtype, mesh, layout, (flag,), coordinate)).item())
