"""Keys: where random streams begin, how one becomes many, and the bits they stand for.

A key is a uint32 tensor of shape (2,), an ordinary value: pass it in, split it, never use it twice.
All results are those of ``jax.random`` with threefry2x32 in its partitionable mode, bit for bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from pfx.errors import PfxError, message
from pfx.random.threefry import random_bits, threefry

_MASK = 0xFFFFFFFF
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class RandomError(PfxError, ValueError):
    """A shape, bound or seed from which no random numbers can be drawn."""


class RandomTypeError(PfxError, TypeError):
    """A key, shape or dtype that is not of the kind random numbers need."""


def check_key(name: str, key: Tensor) -> None:
    """Raise unless ``key`` is one random key; ``name`` is the public function that got it."""
    where = f"pfx.random.{name}: key"
    if not isinstance(key, Tensor):
        got = f"got {key!r}; a key is a uint32 tensor of shape (2,)."
        seed = key if isinstance(key, int) else 0
        fix = f"key = pfx.random.key({seed})"
        raise RandomTypeError(message(where, "is not a random key.", got, fix=fix))
    if key.dtype != torch.uint32 or key.ndim == 0 or key.shape[-1] != 2:
        got = f"got {key.dtype} of shape {tuple(key.shape)}; a key is torch.uint32 of shape (2,)."
        fix = "key = pfx.random.key(0)"
        raise RandomTypeError(message(where, "is not a random key.", got, fix=fix))
    if key.ndim > 1:
        got = f"got {math.prod(key.shape[:-1])} keys, shape {tuple(key.shape)}; one has shape (2,)."
        fix = f"pfx.vmap(lambda key: pfx.random.{name}(key, ...))(keys)"
        raise RandomError(message(where, "is a batch of keys.", got, fix=fix))


def check_shape(name: str, shape: Sequence[int], argument: str = "shape") -> list[int]:
    """Return ``shape`` as a list of sizes, or raise."""
    where = f"pfx.random.{name}: {argument}"
    try:
        sizes = [operator.index(size) for size in shape]
    except TypeError:
        fix = f"{argument}=({shape},)" if isinstance(shape, int) else f"{argument}=(2, 3)"
        got = f"got {shape!r}."
        raise RandomTypeError(message(where, "is not a sequence of ints.", got, fix=fix)) from None
    if any(size < 0 for size in sizes):
        fix = f"{argument}={tuple(max(size, 0) for size in sizes)}"
        raise RandomError(message(where, "has a negative size.", f"got {tuple(sizes)}.", fix=fix))
    return sizes


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """Make a random key from a seed.

    The key holds the 64 bits of the seed, high word first, as ``jax.random.key`` does when
    ``jax_enable_x64`` is set (without it JAX drops the high word; seeds below 2**32 agree).

    Args:
        seed: an int of at most 64 bits, or a 0-d integer tensor.
        device: where the key lives; default: torch's default device, or the seed's own.

    Returns:
        A uint32 tensor of shape (2,).

    Raises:
        RandomError: the seed does not fit in 64 bits, or has dims.
        RandomTypeError: the seed is not an integer.

    >>> from pfx import random
    >>> random.key(2**32 + 7)
    tensor([1, 7], dtype=torch.uint32)
    """
    if isinstance(seed, Tensor):
        low = _check_integer("key", "seed", seed)
        high = low >> 32 if seed.element_size() == 8 else low & 0
        words = torch.stack([high & _MASK, low & _MASK]).to(torch.uint32)
        return words if device is None else words.to(device)
    where = "pfx.random.key: seed"
    try:
        seed = operator.index(seed)
    except TypeError:
        fix = "key = pfx.random.key(0)"
        got = f"got {seed!r}."
        raise RandomTypeError(message(where, "is not an int.", got, fix=fix)) from None
    if not -(2**63) <= seed < 2**64:
        fix = f"key = pfx.random.key({seed % 2**64})"
        raise RandomError(message(where, "does not fit in 64 bits.", f"got {seed}.", fix=fix))
    # Two fills rather than torch.tensor, which would be a constant tensor captured by a trace.
    words = (seed >> 32 & _MASK, seed & _MASK)
    return torch.stack([torch.full((), w, dtype=torch.uint32, device=device) for w in words])


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """Make ``num`` new keys from one, independent of each other and of the old one.

    The key at linear index ``i`` is the hash of counter ``i``, so the first keys do not depend on
    how many are made.

    Args:
        key: a random key.
        num: how many, or the shape of an array of keys.

    Returns:
        A uint32 tensor of shape (*num, 2).

    Raises:
        RandomError, RandomTypeError: not one key, or not a shape.

    >>> from pfx import random
    >>> first, second = random.split(random.key(0))
    >>> first
    tensor([1797259609, 2579123966], dtype=torch.uint32)
    >>> random.split(first, (3, 4)).shape
    torch.Size([3, 4, 2])
    """
    check_key("split", key)
    sizes = check_shape("split", (num,) if isinstance(num, int) else num, "num")
    counts = torch.arange(math.prod(sizes), device=key.device)
    counts = counts if len(sizes) == 1 else counts.reshape(sizes)
    return threefry(key, counts)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Make a new key from a key and a number, such as a step or a layer index.

    Args:
        key: a random key.
        data: an int in [0, 2**32), or a 0-d integer tensor, of which the low 32 bits count.

    Returns:
        A uint32 tensor of shape (2,).

    Raises:
        RandomError: ``data`` has dims or does not fit in 32 bits.
        RandomTypeError: ``data`` is not an integer.

    >>> from pfx import random
    >>> random.fold_in(random.key(42), 7)
    tensor([2547012911, 1371500959], dtype=torch.uint32)
    """
    check_key("fold_in", key)
    if isinstance(data, Tensor):
        counts = _check_integer("fold_in", "data", data) & _MASK
        return threefry(key, counts)
    where = "pfx.random.fold_in: data"
    try:
        data = operator.index(data)
    except TypeError:
        fix = "key = pfx.random.fold_in(key, 0)"
        got = f"got {data!r}."
        raise RandomTypeError(message(where, "is not an int.", got, fix=fix)) from None
    if not 0 <= data <= _MASK:
        fix = f"key = pfx.random.fold_in(key, {data & _MASK})"
        got = f"got {data}; 0 <= data < 2**32."
        raise RandomError(message(where, "does not fit in 32 bits.", got, fix=fix))
    counts = torch.full((), data, dtype=torch.int64, device=key.device)
    return threefry(key, counts)


def bits(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Draw uniform random words.

    The word at global linear index ``i`` depends on the key and on ``i`` only.

    Args:
        key: a random key.
        shape: the shape of the result.
        dtype: uint8, uint16 (the low bits of a 32-bit word), uint32 or uint64.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, or not such a dtype.

    >>> from pfx import random
    >>> random.bits(random.key(42), (3,))
    tensor([2098992034, 2919706841, 2646866425], dtype=torch.uint32)
    """
    check_key("bits", key)
    sizes = check_shape("bits", shape)
    if dtype not in _UNSIGNED:
        raise dtype_error("bits", dtype, "torch.uint32")
    if dtype == torch.uint64:
        return words(key, sizes, 64)
    return words(key, sizes) if dtype == torch.uint32 else words(key, sizes).to(dtype)


def words(key: Tensor, sizes: list[int], width: int = 32) -> Tensor:
    """Draw unsigned words of ``width`` bits as one opaque op, arguments unchecked."""
    return random_bits(key, sizes, [0] * len(sizes), sizes, width)


def dtype_error(name: str, dtype: torch.dtype, example: str) -> RandomTypeError:
    """The error for a dtype that function ``name`` cannot draw."""
    where = f"pfx.random.{name}: dtype"
    return RandomTypeError(
        message(where, "cannot be drawn.", f"got {dtype}.", fix=f"dtype={example}")
    )


def _check_integer(name: str, argument: str, value: Tensor) -> Tensor:
    where = f"pfx.random.{name}: {argument}"
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        got = f"got {value.dtype}."
        fix = f"{argument}.to(torch.int64)"
        raise RandomTypeError(message(where, "is not an integer tensor.", got, fix=fix))
    if value.ndim:
        got = f"got shape {tuple(value.shape)}."
        fix = f"pfx.vmap(lambda {argument}: pfx.random.{name}(..., {argument}))({argument})"
        raise RandomError(message(where, "has more than one number.", got, fix=fix))
    return value.to(torch.int64)
