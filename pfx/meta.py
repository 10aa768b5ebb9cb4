"""What a trace knows of a tensor, and what it asks of an op of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TensorMeta:
    """What a trace knows of a tensor: no data, only its form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    stride: tuple[int, ...] | None = None
    variance: Any = (
        None  # what it is along each axis of a manual region, see `pfx.lax.manual.variance`
    )

    @staticmethod
    def of(value: Any) -> TensorMeta:
        """Read the meta of a tensor, or of anything with a shape and a dtype."""
        if isinstance(value, TensorMeta):
            return value
        if isinstance(value, torch.Tensor):
            stride = tuple(value.stride())
            return TensorMeta(tuple(value.shape), value.dtype, value.device.type, stride)
        return TensorMeta(tuple(value.shape), value.dtype)


class Primitive(Protocol):
    """An op of ours: a value with a name, whose parameters are its own fields.

    Calling it applies it under whatever transform is active, so a graph that holds it can be run
    and traced again; `compute` is what it does to plain tensors.
    """

    @property
    def compute(self) -> Callable[..., tuple[torch.Tensor, ...]]: ...
