"""Continuous distributions: a draw of random words and a few pointwise ops on them.

A uniform number is made from as many bits of a word as the dtype's fraction has, so each dtype has
its own recipe. XLA rounds ``fraction * (maxval - minval) + minval`` once (a fused multiply-add) in
float32 and float16. Here the sum is taken in the next wider dtype, where the product is exact, and
is rounded to the same value on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfx.errors import message
from pfx.random.keys import (
    RandomError,
    RandomTypeError,
    check_key,
    check_shape,
    dtype_error,
    words,
)


class _Recipe(NamedTuple):
    """How a float of one dtype is made from a word."""

    width: int  # bits of the word
    bits: torch.dtype  # the signed integers the word is viewed as
    shift: int  # how far right the fraction's bits lie after this
    fraction: int  # how many bits the fraction has
    sum: torch.dtype  # where a product that is not exact is added and rounded


_RECIPES = {
    torch.float64: _Recipe(64, torch.int64, 12, 52, torch.float64),
    torch.float32: _Recipe(32, torch.int32, 9, 23, torch.float64),
    torch.float16: _Recipe(32, torch.int32, 6, 10, torch.float32),
    torch.bfloat16: _Recipe(32, torch.int32, 1, 7, torch.bfloat16),
}


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Draw from the uniform distribution on [minval, maxval).

    Bit-equal to ``jax.random.uniform`` on the CPU (float64: to one rounding where the span is not a
    power of two). Rounding may give ``maxval`` itself if ``minval`` is not 0.

    Args:
        key: a random key.
        shape: the shape of the result.
        dtype: float16, bfloat16, float32 or float64.
        minval: a number or a tensor that broadcasts to ``shape``.
        maxval: likewise.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, no such dtype, or minval > maxval.

    >>> from pfx import random
    >>> random.uniform(random.key(42), (3,), minval=-1.0)
    tensor([-0.0226,  0.3596,  0.2325])
    """
    sizes = _check("uniform", key, shape, dtype)
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        check_broadcast("uniform", "minval", minval, sizes)
        check_broadcast("uniform", "maxval", maxval, sizes)
    else:
        minval, maxval = _check_numbers("uniform", minval=minval, maxval=maxval)
    return draw_uniform(key, sizes, dtype, minval, maxval)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the standard normal distribution: sqrt(2) erfinv(u), u uniform on (-1, 1).

    Equal to ``jax.random.normal`` as far as the two inverse error functions are: mostly within 3
    ulp in float32, up to 6e-6 relative in the tails, where torch's is the more exact one.

    Args:
        key: a random key.
        shape: the shape of the result.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, or not such a dtype.

    >>> from pfx import random
    >>> random.normal(random.key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    sizes = _check("normal", key, shape, dtype)
    lowest = -1 + torch.finfo(dtype).eps / 2
    return _erfinv(draw_uniform(key, sizes, dtype, lowest, 1.0))


def truncated_normal(
    key: Tensor,
    lower: float,
    upper: float,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw from the standard normal distribution, conditioned on lower < x < upper.

    Equal to ``jax.random.truncated_normal`` as far as the error functions and their inverses are.

    Args:
        key: a random key.
        lower: the lower bound, a number of standard deviations.
        upper: the upper bound, likewise.
        shape: the shape of the result.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        RandomError, RandomTypeError: not one key, not a shape, no such dtype, or lower >= upper.

    >>> from pfx import random
    >>> random.truncated_normal(random.key(42), -2.0, 2.0, (3,))
    tensor([-0.0270,  0.4444,  0.2819])
    """
    sizes = _check("truncated_normal", key, shape, dtype)
    lower, upper = _check_numbers("truncated_normal", lower=lower, upper=upper)
    if lower == upper:
        where, text = "pfx.random.truncated_normal: lower", f"lower={lower!r}, upper={upper!r}."
        fix = f"upper={lower + 1}"
        raise RandomError(message(where, "leaves no room below upper.", text, fix=fix))
    least, greatest = _next(lower, 1, dtype), _next(upper, -1, dtype)
    u = draw_uniform(key, sizes, dtype, _erf(lower, dtype), _erf(upper, dtype))
    # Rounding, or u == erf(lower), must not put a draw on or beyond a bound.
    return _erfinv(u).clamp(least, greatest)


def draw_uniform(
    key: Tensor,
    sizes: list[int],
    dtype: torch.dtype,
    minval: float | Tensor,
    maxval: float | Tensor,
) -> Tensor:
    """Draw uniform numbers, arguments unchecked: a word, its top bits, their scale and offset."""
    recipe = _RECIPES[dtype]
    word = words(key, sizes, recipe.width).view(recipe.bits)
    fraction = (word >> recipe.shift) & ((1 << recipe.fraction) - 1)
    low, span = _low_and_span(minval, maxval, dtype)
    if isinstance(span, float) and math.frexp(span)[0] == 0.5:
        result = fraction.to(dtype) * math.ldexp(span, -recipe.fraction)  # exact: a power of two
        return result if isinstance(low, float) and low == 0 else result + low
    unit = fraction.to(recipe.sum) * math.ldexp(1.0, -recipe.fraction)
    result = (unit * span + low).to(dtype)
    return result.clamp(min=low) if isinstance(span, Tensor) else result


def gumbel(key: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Draw from the standard Gumbel distribution, arguments unchecked: -log(-log(u))."""
    return -torch.log(-torch.log(draw_uniform(key, sizes, dtype, torch.finfo(dtype).tiny, 1.0)))


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a Python number to the nearest one of ``dtype``, without a tensor for a trace to capture."""
    if value == 0 or not math.isfinite(value):
        return float(value)
    ulp = _ulp(value, dtype)
    result = round(value / ulp) * ulp
    return result if abs(result) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def check_broadcast(name: str, argument: str, value: object, sizes: list[int]) -> None:
    """Raise if a tensor argument would make the result larger than ``sizes``."""
    if not isinstance(value, Tensor):
        return
    have, want = tuple(value.shape), tuple(sizes)
    pairs = zip(reversed(have), reversed(want), strict=False)
    if len(have) <= len(want) and all(size in (1, other) for size, other in pairs):
        return
    where = f"pfx.random.{name}: {argument}"
    text = f"{argument} has shape {have}, the result has shape {want}."
    raise RandomError(
        message(where, "does not broadcast to the result.", text, fix=f"shape={have}")
    )


def check_float(name: str, argument: str, value: Tensor) -> None:
    """Raise unless numbers of the dtype of ``value`` can be drawn."""
    if value.dtype not in _RECIPES:
        where, got = f"pfx.random.{name}: {argument}", f"got {value.dtype}."
        fix = f"{argument}.to(torch.float32)"
        raise RandomTypeError(message(where, "is not a float tensor.", got, fix=fix))


def _check(name: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    check_key(name, key)
    if dtype not in _RECIPES:
        raise dtype_error(name, dtype, "torch.float32")
    return check_shape(name, shape)


def _check_numbers(name: str, **bounds: float) -> list[float]:
    (first, low), (second, high) = bounds.items()
    where = f"pfx.random.{name}: {first}"
    text = f"{first}={low!r}, {second}={high!r}."
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        fix = f"{first}=-2.0, {second}=2.0"
        raise RandomTypeError(message(where, "is not a number.", text, fix=fix))
    if not low <= high:
        fix = f"{first}={high!r}, {second}={low!r}"
        raise RandomError(message(where, f"is greater than {second}.", text, fix=fix))
    return [float(low), float(high)]


def _low_and_span(
    minval: float | Tensor, maxval: float | Tensor, dtype: torch.dtype
) -> tuple[float | Tensor, float | Tensor]:
    low, high = (
        bound.to(dtype) if isinstance(bound, Tensor) else rounded(bound, dtype)
        for bound in (minval, maxval)
    )
    span = high - low
    return low, span if isinstance(span, Tensor) else rounded(span, dtype)


def _erf(x: float, dtype: torch.dtype) -> float:
    return rounded(math.erf(rounded(x / _sqrt2(dtype), dtype)), dtype)


def _erfinv(u: Tensor) -> Tensor:
    return torch.erfinv(u) * _sqrt2(u.dtype)


def _sqrt2(dtype: torch.dtype) -> float:
    return rounded(math.sqrt(2), dtype)


def _ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from a number to the next one of ``dtype`` that is larger in magnitude."""
    info = torch.finfo(dtype)
    smallest = math.frexp(info.tiny)[1]
    exponent = max(math.frexp(value)[1], smallest) if value else smallest
    return math.ldexp(info.eps, exponent - 1)


def _next(value: float, sign: int, dtype: torch.dtype) -> float:
    """The number of ``dtype`` next to ``value``, upwards for ``sign`` 1, downwards for -1."""
    value = rounded(value, dtype)
    if math.isinf(value):
        return math.copysign(torch.finfo(dtype).max, value)
    # Towards zero from a power of two the gap is half an ulp: 0.6 ulp finds the neighbour anyway.
    return rounded(value + sign * 0.6 * _ulp(value, dtype), dtype)
