"""The tensors among the arguments of a torch function: alone, or in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in an argument, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [x for item in value for x in tensors_in(item)]


def map_tensors(one: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """An argument with `one` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return one(value)
    if isinstance(value, dict):
        return {key: map_tensors(one, item) for key, item in value.items()}
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return value
    items = [map_tensors(one, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
