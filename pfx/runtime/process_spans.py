"""The measured spans of all devices along an axis, on one clock and on every rank."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist

from pfx.errors import RuntimeMismatchError
from pfx.mesh import Coordinate, Mesh
from pfx.runtime.fingerprint import Store, late
from pfx.runtime.timed import Spans
from pfx.schedules import Action


def shared_spans(
    store: Store, mesh: Mesh, axis: str, here: Coordinate, spans: Spans, timeout: float
) -> Spans:
    """Exchange spans; those of the ranks that are at 0 along all other axes stand for all.

    Clocks are set by a barrier, so those of two devices differ by as long as they take to leave it.

    Raises:
        RuntimeMismatchError: naming the ranks that do not come in time.
    """
    dist.barrier()
    zero = time.perf_counter()
    rank = mesh.index(here)
    number = store.add(f"pfx/spans/count/{rank}", 1)
    keys = [f"pfx/spans/{number}/{place}" for place in range(mesh.shape[axis])]
    if all(place == 0 for name, place in here.items() if name != axis):
        rows = [(str(a), start - zero, end - zero) for a, (start, end) in spans.items()]
        store.set(keys[here[axis]], json.dumps(rows))
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [
            mesh.index({**dict.fromkeys(mesh.axis_names, 0), axis: place})
            for place, key in enumerate(keys)
            if not store.check([key])
        ]
        what = late(missing, mesh.size, "the times of a pipeline", timeout)
        raise RuntimeMismatchError(f"process mesh {mesh}: {what}") from error
    return {
        Action.parse(name): (start, end)
        for key in keys
        for name, start, end in json.loads(store.get(key))
    }
