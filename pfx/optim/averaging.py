"""A moving average of the parameters, to be evaluated or kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import (
    GradientTransformation,
    apply_updates,
    check_at_least_zero,
    find_state,
    wide_dtype,
    zero_scalar,
)
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import value_at


class EmaState(NamedTuple):
    """Updates made so far (0-d int64), and the average of the parameters."""

    count: Tensor
    average: Any


def ema(decay: float | Schedule) -> GradientTransformation:
    """Average the parameters as they will be after the update, which passes through untouched.

    From the parameters that training starts with (Polyak & Juditsky 1992; Tarvainen & Valpola 2017,
    arXiv:1703.01780, equation 3)::

        average = decay · average + (1 − decay) · (p + u)

    The last in a `chain`, so that it sees the update that is made. The average is float32, or float64
    for float64 parameters; `ema_params` reads it.

    Args:
        decay: in [0, 1), or a function of the updates made so far: an average that forgets its start
            sooner has ``lambda count: torch.clamp((1 + count) / (10 + count), max=0.999)``.

    Raises:
        ValueError: `decay` is out of range, or `update` was given no `params`.

    >>> from pfx import optim
    >>> optimizer = optim.chain(optim.sgd(1.0), ema(0.9))
    >>> params = {"w": torch.ones(1)}
    >>> _, state = optimizer.update({"w": torch.ones(1)}, optimizer.init(params), params)
    >>> ema_params(state)
    {'w': tensor([0.9000])}
    """
    if not callable(decay):
        check_at_least_zero("ema", "decay", decay, below=1.0)

    def init(params: Any) -> EmaState:
        start = tree.map_with_path(lambda path, p: p.to(wide_dtype(p, path), copy=True), params)
        return EmaState(zero_scalar(params, torch.int64), start)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            what, why = "is None.", "the average is one of the parameters."
            fix = "optimizer.update(grads, state, params)"
            raise ValueError(message("ema: params", what, why, fix=fix))
        now = apply_updates(params, grads)
        share = _share(decay, state.count)

        def moved(a: Tensor, p: Tensor) -> Tensor:
            weight = share.to(a.dtype) if isinstance(share, Tensor) else share
            return torch.lerp(a, p.to(a.dtype), weight)

        average = tree.map(moved, state.average, now)
        return grads, EmaState(state.count + 1, average)

    return GradientTransformation(init, update)


def _share(decay: float | Schedule, count: Tensor) -> float | Tensor:
    """The share of the parameters: a number stays one, which costs a pass over memory less."""
    return 1 - value_at(decay, count) if callable(decay) else float(1 - decay)


def ema_params(opt_state: Any, like: Any = None) -> Any:
    """Return the average that `ema` keeps; ``None`` where the state has none.

    Args:
        opt_state: the state of an optimizer.
        like: parameters, whose dtypes the average is rounded to; without them it is as it is kept.

    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> ema_params(ema(0.9).init(params), params)
    {'w': tensor([1.], dtype=torch.bfloat16)}
    """
    found = find_state(opt_state, EmaState)
    if found is None or like is None:
        return None if found is None else found.average
    return tree.map(lambda p, a: a.to(p.dtype), like, found.average)
