"""The floating-point operations of the ops that have many: products, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = Sequence[int]


def flops_of(name: str, args: Sequence[Any], result: Shape) -> int | None:
    """Count the operations of an aten op, an addition and a multiplication each one; None if few.

    Args:
        name: without the overload.
        args: its positional arguments, tensors by their shapes.
        result: the shape of its first result.

    >>> flops_of("mm", [(2, 3), (3, 5)], (2, 5))
    60
    """
    if name.startswith("_scaled_dot_product"):
        return _attention_backward(args) if name.endswith("_backward") else _attention(*args[:3])
    return FLOPS[name](args, result) if name in FLOPS else None


def _product(left: Shape, right: Shape) -> int:
    return 2 * math.prod(left) * right[-1]


def _attention(query: Shape, key: Shape, value: Shape) -> int:
    """Scores, then their weighted sum of the values."""
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _attention_backward(args: Sequence[Any]) -> int:
    """The scores again, then the gradients of weights, values, keys and queries: 5 for 2."""
    _, query, key, value = args[:4]
    return 5 * _attention(query, key, value) // 2


def _convolution(args: Sequence[Any], result: Shape) -> int:
    return 2 * math.prod(result) * math.prod(args[1][1:])


def _convolution_backward(args: Sequence[Any], _: Shape) -> int:
    """As the forward, for each of the two gradients that is wanted."""
    return sum(map(bool, args[-1][:2])) * 2 * math.prod(args[0]) * math.prod(args[2][1:])


FLOPS: Mapping[str, Callable[[Sequence[Any], Shape], int]] = {
    "mm": lambda args, _: _product(args[0], args[1]),
    "bmm": lambda args, _: _product(args[0], args[1]),
    "addmm": lambda args, _: _product(args[1], args[2]),
    "baddbmm": lambda args, _: _product(args[1], args[2]),
    "mv": lambda args, _: 2 * math.prod(args[0]),
    "dot": lambda args, _: 2 * math.prod(args[0]),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
