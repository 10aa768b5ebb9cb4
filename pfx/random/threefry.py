"""Threefry-2x32 as two opaque torch ops that address random words by their global index.

A word depends on the key and on its own index only, so a shard draws exactly its slice of the
global array. A draw is one node: inlined, the rounds would add a hundred nodes to a trace.

- ``pfx::random_bits(key, shape, start, global_shape, width=32)``: the block of size ``shape`` that
  begins at index ``start`` of the ``global_shape`` array of unsigned words.
- ``pfx::threefry(key, counts)``: both output words of the hash for each 64-bit counter.

A key with leading dims is a batch of keys (what `torch.func.vmap` makes of one): ``random_bits``
puts its dims before ``shape``, ``threefry`` broadcasts them against ``counts``. On the CPU the
rounds run in numpy, because torch's uint32 has neither add nor shift there; other devices use int64
and a mask.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # C240 of the paper, the 32-bit half that key schedules are completed with
_MASK = 0xFFFFFFFF
_BLOCK = 1 << 16  # words a numpy pass: four buffers of this size stay in a core's cache
_DEVICE_BLOCK = 1 << 22  # words a device pass: bounds the int64 temporaries to 32 MiB each


def _hash_numpy(k0: np.ndarray, k1: np.ndarray, x0: np.ndarray, x1: np.ndarray) -> None:
    """Replace counters ``x0`` (high words) and ``x1`` (low words) by the two output words."""
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(_PARITY))
    shifted = np.empty_like(x1)
    np.add(x0, keys[0], out=x0)
    np.add(x1, keys[1], out=x1)
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            np.add(x0, x1, out=x0)
            np.left_shift(x1, np.uint32(rotation), out=shifted)
            np.right_shift(x1, np.uint32(32 - rotation), out=x1)
            np.bitwise_or(x1, shifted, out=x1)
            np.bitwise_xor(x1, x0, out=x1)
        np.add(x0, keys[(group + 1) % 3], out=x0)
        np.add(x1, keys[(group + 2) % 3] + np.uint32(group + 1), out=x1)


def _hash_torch(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The same hash on int64 tensors that hold 32-bit words."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (x0 + k0) & _MASK, (x1 + k1) & _MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << rotation) & _MASK) | (x1 >> (32 - rotation))) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + (group + 1)) & _MASK
    return x0, x1


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _runs(
    shape: Sequence[int], start: Sequence[int], global_shape: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Cut a block into equally long runs of consecutive indices: where each begins, their length."""
    strides = _strides(global_shape)
    run, outer = 1, len(shape)
    while outer:
        outer -= 1
        run *= shape[outer]
        if shape[outer] != global_shape[outer]:
            break
    begins = np.array([sum(at * stride for at, stride in zip(start, strides, strict=True))])
    for size, stride in zip(shape[:outer], strides[:outer], strict=True):
        begins = np.add.outer(begins, np.arange(size) * stride).reshape(-1)
    return begins, run


def _fill(out: np.ndarray, keys: np.ndarray, begins: np.ndarray) -> None:
    """Write the word of counter ``begins[run] + i`` into ``out[key, run, i]``, block by block."""
    num_keys, num_runs, run = out.shape
    cols = max(1, min(run, _BLOCK))
    rows = max(1, min(num_runs, _BLOCK // cols))
    batch = max(1, min(num_keys, _BLOCK // (cols * rows)))
    buffers = np.empty((2, batch * rows * cols), np.uint32)
    index = np.empty(rows * cols, np.int64)
    column = np.arange(cols)
    for a in range(0, num_keys, batch):
        k0, k1 = keys[a : a + batch, :, None, None].swapaxes(0, 1)
        for b in range(0, num_runs, rows):
            for c in range(0, run, cols):
                block = out[a : a + batch, b : b + rows, c : c + cols]
                x0, x1 = (buffer[: block.size].reshape(block.shape) for buffer in buffers)
                counts = index[: x0[0].size].reshape(x0[0].shape)
                np.add(begins[b : b + rows, None] + c, column[: block.shape[2]], out=counts)
                np.copyto(x1, counts, casting="unsafe")
                np.right_shift(counts, 32, out=counts)
                np.copyto(x0, counts, casting="unsafe")
                _hash_numpy(k0, k1, x0, x1)
                _combine(x0, x1, block)


def _combine(x0: np.ndarray, x1: np.ndarray, out: np.ndarray) -> None:
    if out.dtype == np.uint32:
        np.bitwise_xor(x0, x1, out=out)
    else:
        np.left_shift(x0, np.uint64(32), out=out)
        np.bitwise_or(out, x1, out=out)


def _word_dtype(width: int) -> torch.dtype:
    assert width in (32, 64), width
    return torch.uint32 if width == 32 else torch.uint64


def random_bits_numpy(
    key: Tensor, shape: list[int], start: list[int], global_shape: list[int], width: int = 32
) -> Tensor:
    """The kernel of ``pfx::random_bits`` on the CPU."""
    out = random_bits_fake(key, shape, start, global_shape, width)
    if out.numel():
        keys = key.numpy().reshape(-1, 2)
        begins, run = _runs(shape, start, global_shape)
        _fill(out.numpy().reshape(len(keys), len(begins), run), keys, begins)
    return out


def random_bits_torch(
    key: Tensor, shape: list[int], start: list[int], global_shape: list[int], width: int = 32
) -> Tensor:
    """The kernel of ``pfx::random_bits`` on every other device."""
    counts = torch.zeros((), dtype=torch.int64, device=key.device)
    for size, at, stride in zip(shape, start, _strides(global_shape), strict=True):
        counts = counts[..., None] + (torch.arange(size, device=key.device) + at) * stride
    k0, k1 = _key_words(key[..., None, :])
    words = []
    for block in counts.reshape(-1).split(_DEVICE_BLOCK):
        x0, x1 = _hash_torch(k0, k1, (block >> 32) & _MASK, block & _MASK)
        words.append((x0 << 32) | x1 if width == 64 else (x0 ^ x1).to(torch.int32))
    return torch.cat(words, -1).view(_word_dtype(width)).reshape((*key.shape[:-1], *shape))


def random_bits_fake(
    key: Tensor, shape: list[int], start: list[int], global_shape: list[int], width: int = 32
) -> Tensor:
    """The shape, dtype and device of the result, and nothing in it."""
    ends = [at + size for at, size in zip(start, shape, strict=True)]
    assert all(
        at >= 0 and end <= size for at, end, size in zip(start, ends, global_shape, strict=True)
    ), (shape, start, global_shape)
    size = (*key.shape[:-1], *shape)
    return torch.empty(size, dtype=_word_dtype(width), device=key.device)


def threefry_numpy(key: Tensor, counts: Tensor) -> Tensor:
    """The kernel of ``pfx::threefry`` on the CPU."""
    out = threefry_fake(key, counts)
    # A dim of size 1 in front, since numpy makes scalars of 0-d arrays and warns when those wrap.
    k, count, words = key.numpy()[None], counts.numpy()[None], out.numpy()[None]
    x0, x1 = (np.empty(words.shape[:-1], np.uint32) for _ in range(2))
    np.copyto(x0, count >> 32, casting="unsafe")
    np.copyto(x1, count, casting="unsafe")
    _hash_numpy(k[..., 0], k[..., 1], x0, x1)
    np.stack((x0, x1), -1, out=words)
    return out


def threefry_torch(key: Tensor, counts: Tensor) -> Tensor:
    """The kernel of ``pfx::threefry`` on every other device."""
    words = _hash_torch(*_key_words(key), (counts >> 32) & _MASK, counts & _MASK)
    return torch.stack(words, -1).to(torch.int32).view(torch.uint32)


def threefry_fake(key: Tensor, counts: Tensor) -> Tensor:
    """The shape, dtype and device of the result, and nothing in it."""
    shape = torch.broadcast_shapes(key.shape[:-1], counts.shape)
    return torch.empty((*shape, 2), dtype=torch.uint32, device=key.device)


def _key_words(key: Tensor) -> tuple[Tensor, Tensor]:
    k0, k1 = (key.view(torch.int32).to(torch.int64) & _MASK).unbind(-1)
    return k0, k1


def _random_bits_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    shape: list[int],
    start: list[int],
    global_shape: list[int],
    width: int = 32,
) -> tuple[Tensor, int]:
    key = _mapped_dim_first(key, in_dims[0], key.ndim)
    return torch.ops.pfx.random_bits(key, shape, start, global_shape, width), 0


def _threefry_vmap(
    info: Any, in_dims: tuple[int | None, ...], key: Tensor, counts: Tensor
) -> tuple[Tensor, int]:
    key_dim, count_dim = in_dims
    rank = max(key.ndim - (key_dim is not None) - 1, counts.ndim - (count_dim is not None))
    key = _mapped_dim_first(key, key_dim, rank + 2)
    return torch.ops.pfx.threefry(key, _mapped_dim_first(counts, count_dim, rank + 1)), 0


def _mapped_dim_first(x: Tensor, dim: int | None, rank: int) -> Tensor:
    """Move a mapped dim to the front and pad behind it with dims of size 1 up to ``rank`` dims.

    Padding keeps it in front under broadcasting. What is so already adds no node to a trace.
    """
    if dim is None:
        return x
    x = x if dim == 0 else x.movedim(dim, 0)
    return x if x.ndim >= rank else x.reshape(x.shape[0], *[1] * (rank - x.ndim), *x.shape[1:])


def _register(schema: str, cpu: Any, other: Any, fake: Any, vmap: Any) -> None:
    # No autograd formula: the results are integers, and torch.func.grad refuses ops that have one.
    name = schema.partition("(")[0]
    torch.library.define(name, schema.removeprefix(name))
    torch.library.impl(name, "cpu", cpu)
    torch.library.impl(name, "default", other)
    torch.library.register_fake(name, fake)
    torch.library.register_vmap(name, vmap)


_register(
    "pfx::random_bits(Tensor key, int[] shape, int[] start, int[] global_shape, int width=32)"
    " -> Tensor",
    random_bits_numpy,
    random_bits_torch,
    random_bits_fake,
    _random_bits_vmap,
)
_register(
    "pfx::threefry(Tensor key, Tensor counts) -> Tensor",
    threefry_numpy,
    threefry_torch,
    threefry_fake,
    _threefry_vmap,
)

random_bits = torch.ops.pfx.random_bits
threefry = torch.ops.pfx.threefry
