"""Learning rates as pure functions of the number of updates already made.

A schedule gets the `count` of updates before this one: update k, counted from 1, uses
``schedule(k - 1)``. For an int it returns a float, for a 0-d tensor a 0-d float64 tensor with the
same value, without a Python branch on it.

Every schedule here is ``ramp · (peak · s + min_lr · (1 − s))``:

- `ramp` is ``min(k / warmup_steps, 1)``: update 1 takes a real step, update `warmup_steps` uses the
  peak; without warmup update 1 does.
- `s` falls from 1 to 0 over the decay, which ends at update `total_steps` and starts after the last
  update at the peak. (A decay over all steps starts after update 1, so it ends one update later.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pfx.errors import message
from pfx.optim.base import check_at_least_zero

Schedule = Callable[[Any], Any]
Shape = Literal["linear", "cosine", "sqrt"]


def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """Ramp up linearly, then stay at `peak`.

    Args:
        peak: the learning rate after the warmup.
        warmup_steps: how many updates the ramp takes.

    Raises:
        ValueError: an argument is out of range.

    >>> [constant(1.0, warmup_steps=4)(count) for count in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    check_at_least_zero("constant", "peak", peak)
    check_at_least_zero("constant", "warmup_steps", warmup_steps)

    return lambda count: _ramp(_number(count) + 1, warmup_steps) * peak


def linear(
    peak: float, total_steps: int, *, warmup_steps: int = 0, min_lr: float = 0.0
) -> Schedule:
    """Ramp up to `peak`, then fall on a straight line to `min_lr`: ``s = 1 − x``.

    `x` goes from 0 to 1 over the decay (Goyal et al. 2017, arXiv:1706.02677, section 2.2, for the
    gradual warmup).

    Args:
        peak: the highest learning rate.
        total_steps: the update at which `min_lr` is reached, to stay.
        warmup_steps: how many updates the ramp takes.
        min_lr: the learning rate at the end.

    Raises:
        ValueError: an argument is out of range, or no update is left for the decay.

    >>> [linear(1.0, 6, warmup_steps=2)(count) for count in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _schedule("linear", peak, total_steps, warmup_steps, warmup_steps, min_lr, "linear")


def cosine(
    peak: float, total_steps: int, *, warmup_steps: int = 0, min_lr: float = 0.0
) -> Schedule:
    """Ramp up to `peak`, then fall on half a cosine to `min_lr`: ``s = (1 + cos(π x)) / 2``.

    `x` goes from 0 to 1 over the decay (Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5, one
    period).

    Args:
        peak: the highest learning rate.
        total_steps: the update at which `min_lr` is reached, to stay.
        warmup_steps: how many updates the ramp takes.
        min_lr: the learning rate at the end.

    Raises:
        ValueError: an argument is out of range, or no update is left for the decay.

    >>> [round(cosine(1.0, 6, warmup_steps=2)(count), 3) for count in range(7)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return _schedule("cosine", peak, total_steps, warmup_steps, warmup_steps, min_lr, "cosine")


def wsd(
    peak: float,
    total_steps: int,
    *,
    decay_steps: int,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    shape: Shape = "linear",
) -> Schedule:
    """Warm up, stay at `peak`, and decay to `min_lr` in the last `decay_steps` updates.

    The warmup-stable-decay schedule (Hu et al. 2024, arXiv:2404.06395, section 4.2): a run can be
    prolonged from the stable phase. The ``"sqrt"`` decay ``s = 1 − sqrt(x)`` is that of Hägele et
    al. 2024, arXiv:2405.18392.

    Args:
        peak: the learning rate of the stable phase.
        total_steps: the update at which `min_lr` is reached, to stay.
        decay_steps: how many updates the decay takes.
        warmup_steps: how many updates the ramp takes.
        min_lr: the learning rate at the end.
        shape: how the decay falls: ``"linear"``, ``"cosine"`` or ``"sqrt"``.

    Raises:
        ValueError: an argument is out of range, or the phases are longer than the whole.

    >>> [wsd(1.0, 6, decay_steps=2, warmup_steps=2)(count) for count in range(7)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if decay_steps < 1:
        raise ValueError(
            message(
                "wsd: decay_steps", "is out of range.", f"{decay_steps} < 1.", fix="decay_steps=1"
            )
        )
    start = total_steps - decay_steps
    return _schedule("wsd", peak, total_steps, warmup_steps, start, min_lr, shape)


def start_at_zero(schedule: Schedule) -> Schedule:
    """Delay a schedule by one update: the first uses 0, as Megatron-LM's warmup does.

    Args:
        schedule: one of this module.

    >>> [start_at_zero(constant(1.0, warmup_steps=2))(count) for count in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return lambda count: schedule(count - 1)


def _schedule(
    where: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    decay_start: int,
    min_lr: float,
    shape: Shape,
) -> Schedule:
    _check(where, peak, total_steps, warmup_steps, decay_start, min_lr, shape)
    fall = _SHAPES[shape]
    # Update `decay_start` still has the peak; where that would be update 0, update 1 has it.
    last_at_peak, decay_steps = max(decay_start, 1), total_steps - decay_start

    def value(count: Any) -> Any:
        k = _number(count) + 1
        s = fall(_clamp((k - last_at_peak) / decay_steps))
        return _ramp(k, warmup_steps) * (s * peak + (1 - s) * min_lr)

    return value


def _check(
    where: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    decay_start: int,
    min_lr: float,
    shape: str,
) -> None:
    check_at_least_zero(where, "peak", peak)
    check_at_least_zero(where, "min_lr", min_lr)
    check_at_least_zero(where, "warmup_steps", warmup_steps)
    if min_lr > peak:
        raise ValueError(
            message(
                f"{where}: min_lr",
                "is above the peak.",
                f"min_lr = {min_lr}, peak = {peak}.",
                fix=f"min_lr={peak}",
            )
        )
    decay_steps = max(total_steps - decay_start, 1)
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            message(
                f"{where}: total_steps",
                "does not hold the warmup and the decay.",
                f"{warmup_steps} of warmup + {decay_steps} of decay > {total_steps}.",
                fix=f"total_steps={warmup_steps + decay_steps}",
            )
        )
    if shape not in _SHAPES:
        raise ValueError(
            message(f"{where}: shape", f"{shape!r} is unknown.", fix=f"one of {sorted(_SHAPES)}")
        )


def _number(count: Any) -> Any:
    """Return a count that divides exactly: torch would divide int64 in float32."""
    return count.to(torch.float64) if isinstance(count, Tensor) else count


def _clamp(x: Any) -> Any:
    return torch.clamp(x, 0.0, 1.0) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)


def _ramp(k: Any, warmup_steps: int) -> Any:
    return _clamp(k / max(warmup_steps, 1))  # no warmup is a ramp that update 1 completes


def _cosine(x: Any) -> Any:
    angle = x * math.pi
    return (1 + (torch.cos(angle) if isinstance(x, Tensor) else math.cos(angle))) / 2


def _one_minus_sqrt(x: Any) -> Any:
    return 1 - (torch.sqrt(x) if isinstance(x, Tensor) else math.sqrt(x))


_SHAPES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: 1 - x,
    "cosine": _cosine,
    "sqrt": _one_minus_sqrt,
}
