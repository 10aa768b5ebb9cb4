"""Global tensors out of Arrays, one position of a stack at a time."""

from __future__ import annotations

import torch

from pfx.api import device_get
from pfx.array import Array
from pfx.spec import Layout


def row(value: Array | torch.Tensor, number: int) -> torch.Tensor:
    """Return the global tensor at one position of dim 0; every process of a mesh calls it.

    Only that position is communicated, bit for bit, whichever axes split the stack.

    >>> from pfx import P, device_put, make_mesh
    >>> row(device_put(torch.arange(4.0).reshape(4, 1), make_mesh(pp=2), P("pp")), 2)
    tensor([2.])
    """
    if isinstance(value, torch.Tensor):
        return value.detach()[number]
    axes, *dims = value.layout.dims
    if not axes:
        parts = tuple(part[number] for part in value.parts)
        one = _with(value, value.shape[1:], value.dtype, Layout(tuple(dims)), parts)
        return device_get(one)
    # Who does not have it adds zeros; as bytes, since -0.0 + 0.0 is 0.0.
    parts = tuple(_bytes_at(shard.data, shard.index[0], number) for shard in value.shards)
    layout = Layout((*dims, ()), partial=value.mesh.ordered(axes))
    shape = (*value.shape[1:], value.dtype.itemsize)
    return device_get(_with(value, shape, torch.uint8, layout, parts)).view(value.dtype).squeeze(-1)


def _bytes_at(data: torch.Tensor, held: slice | tuple[int, ...], number: int) -> torch.Tensor:
    rows = range(held.start, held.stop) if isinstance(held, slice) else held
    here = data.narrow(0, 0, 1)[0] if number not in rows else data[rows.index(number)]
    as_bytes = here.contiguous().unsqueeze(-1).view(torch.uint8)
    return as_bytes if number in rows else torch.zeros_like(as_bytes)


def _with(
    value: Array,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    parts: tuple[torch.Tensor, ...],
) -> Array:
    return Array(tuple(shape), dtype, value.mesh, layout, parts, value.coordinate)
