"""``x[i]`` where `i` is a tensor without dims, as `axis_index` returns: torch would read its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def picked(x: torch.Tensor, key: Any) -> torch.Tensor | None:
    """Index by one integer tensor without dims among slices, ints, None and an ellipsis.

    Returns:
        What ``x[key]`` is, or None for any other key.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    spots = [i for i, one in enumerate(keys) if _is_index(one)]
    plain = all(
        one is None or isinstance(one, (int, slice, type(...), torch.Tensor)) for one in keys
    )
    if len(spots) != 1 or not plain or sum(isinstance(one, torch.Tensor) for one in keys) > 1:
        return None
    (spot,) = spots
    index = keys[spot]
    before, after = keys[:spot], keys[spot + 1 :]
    dim = -1 - _dims(after) if any(one is ... for one in before) else _dims(before)
    rest = x[(*before, slice(None), *after)]
    index = torch.where(index < 0, index + rest.shape[dim], index).to(torch.int64)
    return rest.index_select(dim, index.reshape(1)).squeeze(dim)


def _is_index(one: Any) -> bool:
    whole = (torch.int64, torch.int32, torch.int16, torch.int8)
    return isinstance(one, torch.Tensor) and one.ndim == 0 and one.dtype in whole


def _dims(keys: Sequence[Any]) -> int:
    return sum(one is None or isinstance(one, slice) for one in keys)
