"""Discrete distributions: coin flips, integers, permutations and categories."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pfx.errors import message
from pfx.random.distributions import check_broadcast, check_float, draw_uniform, gumbel, rounded
from pfx.random.keys import (
    RandomError,
    check_key,
    check_shape,
    dtype_error,
    split,
    words,
)

_MASK = 0xFFFFFFFF
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32),
)


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """Draw booleans that are true with probability ``p``: uniform < p.

    Bit-equal to ``jax.random.bernoulli``.

    Args:
        key: a random key.
        p: a number in [0, 1], or a tensor of a float dtype that broadcasts to ``shape``.
        shape: the shape of the result; default: that of ``p``.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, or not a probability.

    >>> from pfx import random
    >>> random.bernoulli(random.key(42), 0.6, (3,))
    tensor([ True, False, False])
    """
    check_key("bernoulli", key)
    if isinstance(p, Tensor):
        check_float("bernoulli", "p", p)
        sizes = check_shape("bernoulli", p.shape if shape is None else shape)
        check_broadcast("bernoulli", "p", p, sizes)
        return draw_uniform(key, sizes, p.dtype, 0.0, 1.0) < p
    if not 0 <= p <= 1:
        where = "pfx.random.bernoulli: p"
        raise RandomError(message(where, "is not a probability.", f"got {p!r}.", fix="p=0.5"))
    sizes = check_shape("bernoulli", () if shape is None else shape)
    uniform = draw_uniform(key, sizes, torch.float32, 0.0, 1.0)
    return uniform < rounded(p, torch.float32)


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: int | Tensor,
    maxval: int | Tensor,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """Draw integers from [minval, maxval).

    Bit-equal to ``jax.random.randint``: two words are drawn and combined modulo the span, which
    favours some values slightly unless the span is a power of two or small against 2**32 (int64:
    2**64).

    Args:
        key: a random key.
        shape: the shape of the result.
        minval: the least value, an int or an integer tensor that broadcasts to ``shape``.
        maxval: one more than the greatest value, likewise. Tensors are clipped to the range of
            ``dtype``, and where they leave no value, ``minval`` is drawn.
        dtype: a signed integer dtype, uint8, uint16 or uint32; int64 for spans up to 2**62.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, no such dtype, or a bad range.

    >>> from pfx import random
    >>> random.randint(random.key(42), (3,), 0, 10)
    tensor([4, 4, 1], dtype=torch.int32)
    """
    check_key("randint", key)
    sizes = check_shape("randint", shape)
    if dtype not in _INTEGERS:
        raise dtype_error("randint", dtype, "torch.int32")
    low, high = _integer_bounds(minval, maxval, dtype, sizes)
    span = (high - low).clamp(min=1) if isinstance(high - low, Tensor) else high - low
    width = 64 if dtype == torch.int64 else 32
    higher, lower = (_signed(words(k, sizes, width)) for k in split(key).unbind())
    # What the higher word counts for: 2**width modulo the span, squared up as JAX does, wrapping.
    root = (1 << width // 2) % span
    multiplier = _modulo(root * root, span, width)
    offset = _modulo(higher, span, width) * multiplier + _modulo(lower, span, width)
    return (_modulo(offset, span, width) + low).to(dtype)


def permutation(key: Tensor, x: int | Tensor, dim: int = 0, *, independent: bool = False) -> Tensor:
    """Shuffle a tensor along a dim, or the numbers 0 to x - 1.

    Bit-equal to ``jax.random.permutation``: stable sorts by random words, as many as make it
    unlikely that two elements tie in all of them.

    Args:
        key: a random key.
        x: a tensor, or how many numbers.
        dim: the dim to shuffle along.
        independent: shuffle each vector along ``dim`` on its own.

    Returns:
        A tensor like ``x``; int64 where ``x`` is an int.

    Raises:
        RandomError, RandomTypeError: not one key, or nothing to shuffle.

    >>> from pfx import random
    >>> random.permutation(random.key(42), 5)
    tensor([4, 2, 3, 0, 1])
    """
    check_key("permutation", key)
    if isinstance(x, Tensor):
        dim = _check_dim("permutation", "x", x, dim)
        if independent:
            return x.gather(dim, _shuffle(key, list(x.shape), dim))
        return x.index_select(dim, _shuffle(key, [x.shape[dim]], 0))
    (size,) = check_shape("permutation", (x,), "x")
    return _shuffle(key, [size], 0)


def categorical(
    key: Tensor, logits: Tensor, dim: int = -1, shape: Sequence[int] | None = None
) -> Tensor:
    """Draw indices with probabilities softmax(logits, dim), by the Gumbel-max trick.

    Equal to ``jax.random.categorical`` except where the two best are within rounding of each other.

    Args:
        key: a random key.
        logits: unnormalized log-probabilities.
        dim: the dim of ``logits`` to choose from.
        shape: the shape of the result; must end in that of ``logits`` without ``dim``, its default.

    Returns:
        An int64 tensor of indices into ``dim``.

    Raises:
        RandomError, RandomTypeError: not one key, or not such a shape.

    >>> from pfx import random
    >>> random.categorical(random.key(42), torch.tensor([0.0, 0.0, 9.0]), shape=(4,))
    tensor([2, 2, 2, 2])

    Maddison, Tarlow, Minka, "A* sampling" (NeurIPS 2014), section 2.
    """
    check_key("categorical", key)
    check_float("categorical", "logits", logits)
    dim = _check_dim("categorical", "logits", logits, dim)
    batch = [size for d, size in enumerate(logits.shape) if d != dim]
    sizes = batch if shape is None else check_shape("categorical", shape)
    num_prefix = len(sizes) - len(batch)
    if num_prefix < 0 or sizes[num_prefix:] != batch:
        where = "pfx.random.categorical: logits"
        text = f"logits without dim {dim} have shape {tuple(batch)}, the result {tuple(sizes)}."
        fix = f"shape={tuple(batch)}"
        raise RandomError(message(where, "does not fit the result.", text, fix=fix))
    noise = gumbel(key, sizes[:num_prefix] + list(logits.shape), logits.dtype)
    return (noise + logits).argmax(num_prefix + dim)


def _check_dim(name: str, argument: str, x: Tensor, dim: int) -> int:
    if -x.ndim <= dim < x.ndim:
        return dim % x.ndim
    where = f"pfx.random.{name}: {argument}"
    fix = "dim=-1" if x.ndim else f"{argument}.reshape(-1)"
    got = f"got shape {tuple(x.shape)}."
    raise RandomError(message(where, f"has no dim {dim}.", got, fix=fix))


def _shuffle(key: Tensor, sizes: list[int], dim: int) -> Tensor:
    """Indices that shuffle a tensor of shape ``sizes`` along ``dim``, each vector on its own."""
    # An element's words have 3 log2(size) bits in all: enough to tell every two apart.
    rounds = math.ceil(3 * math.log(max(1, math.prod(sizes))) / math.log(2**32 - 1))
    index = torch.arange(sizes[dim], device=key.device)
    index = index.reshape([-1 if d == dim else 1 for d in range(len(sizes))]).expand(sizes)
    for _ in range(rounds):
        key, subkey = split(key).unbind()
        sort_keys = _signed(words(subkey, sizes)) & _MASK
        index = index.gather(dim, torch.argsort(sort_keys, dim=dim, stable=True))
    return index


def _signed(word: Tensor) -> Tensor:
    """The same bits in int64, which unlike the unsigned dtypes has arithmetic."""
    if word.dtype == torch.uint64:
        return word.view(torch.int64)
    return word.view(torch.int32).to(torch.int64)


def _modulo(x: Any, span: Any, width: int) -> Any:
    """The low ``width`` bits of ``x``, taken as an unsigned number, modulo ``span``."""
    if isinstance(x, int):
        return x % (1 << width) % span
    if width == 32:
        return (x & _MASK) % span
    # int64 has no room for the top bit: halve, then bring the lowest bit back (span <= 2**62).
    return (((x >> 1) & (2**63 - 1)) % span * 2 + (x & 1)) % span


def _integer_bounds(
    minval: int | Tensor, maxval: int | Tensor, dtype: torch.dtype, sizes: list[int]
) -> tuple[Any, Any]:
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor):
        return _check_range(operator.index(minval), operator.index(maxval), dtype)
    check_broadcast("randint", "minval", minval, sizes)
    check_broadcast("randint", "maxval", maxval, sizes)
    low, high = (b.to(torch.int64) if isinstance(b, Tensor) else b for b in (minval, maxval))
    low = low.clamp(least, greatest) if isinstance(low, Tensor) else max(low, least)
    limit = min(greatest + 1, 2**63 - 1)
    high = high.clamp(least, limit) if isinstance(high, Tensor) else min(high, limit)
    return low, high


def _check_range(low: int, high: int, dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    where = "pfx.random.randint: minval"
    text = f"minval={low}, maxval={high}; {dtype} holds {info.min} to {info.max}."
    if low >= high:
        fix = f"minval={min(low, high)}, maxval={max(low, high) + (low == high)}"
        raise RandomError(message(where, "is not below maxval.", text, fix=fix))
    if low < info.min or high > info.max + 1:
        fix = f"minval={max(low, info.min)}, maxval={min(high, info.max + 1)}"
        raise RandomError(message(where, "or maxval does not fit the dtype.", text, fix=fix))
    if high - low > 2**62:
        fix = f"maxval={low + 2**62}"
        raise RandomError(message(where, "is too far from maxval.", text, fix=fix))
    return low, high
