"""One update for the gradients of several steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import GradientTransformation, zero_scalar
from pfx.optim.guards import guarded
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import value_at, zero_moments


class AccumulateState(NamedTuple):
    """Gradients averaged since the last update and how many they are, updates made, inner state."""

    waiting: Tensor
    updates: Tensor
    mean: Any
    inner: Any


def accumulate(inner: GradientTransformation, every: int | Schedule) -> GradientTransformation:
    """Average the gradients of `every` steps, and let `inner` update with the mean.

    The law: k · every steps equal k steps of `inner` on the means. In between updates are exactly zero
    and the inner state, its schedules too, stays as it is, bit for bit. There is no branch: `inner`
    is computed at each step and counts at every last one.

    Args:
        inner: the optimizer.
        every: how many steps, at least 1; or a function of the updates made so far, for a batch that
            grows during training.

    Raises:
        ValueError: `every` is no integer of at least 1.

    >>> from pfx import optim
    >>> optimizer = accumulate(optim.sgd(1.0), 2)
    >>> params = {"w": torch.zeros(1)}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": torch.tensor([1.0])}, state, params)
    >>> optimizer.update({"w": torch.tensor([3.0])}, state, params)[0], updates
    ({'w': tensor([-2.])}, {'w': tensor([-0.])})
    """
    if not callable(every) and (type(every) is not int or every < 1):
        what = "must be an integer of at least 1, or a function of the updates made."
        raise ValueError(message(f"accumulate: every={every!r}", what))

    def init(params: Any) -> AccumulateState:
        zero = zero_scalar(params, torch.int64)
        return AccumulateState(zero, zero.clone(), zero_moments(params), inner.init(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        count = state.waiting + 1
        share = 1 / count.to(torch.float64)
        mean = tree.map(lambda m, g: m + ((g - m) * share).to(m.dtype), state.mean, grads)
        last = count >= value_at(every, state.updates)
        updates, kept = guarded(inner, last, mean, state.inner, params, **extra)
        mean = tree.map(lambda m: torch.where(last, torch.zeros_like(m), m), mean)
        waiting = torch.where(last, torch.zeros_like(count), count)
        return updates, AccumulateState(waiting, state.updates + last, mean, kept)

    return GradientTransformation(init, update)
