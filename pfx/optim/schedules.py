"""Learning rates as pure functions of the number of updates already made.

A schedule gets the `count` of updates before this one: update k, counted from 1, uses
``schedule(k - 1)``. For an int it returns a float, for a 0-d tensor a 0-d float64 tensor with the
same value, without a Python branch on it.

Every schedule here is ``ramp · (peak · s + min_lr · (1 − s))``:

- `ramp` is ``min(k / warmup_steps, 1)``, or with ``warmup="log"``, which rises sooner,
  ``min(log(1 + k) / log(1 + warmup_steps), 1)``: update 1 takes a real step, update `warmup_steps`
  uses the peak; without warmup update 1 does.
- `s` falls from 1 to 0 over the decay, which ends at update `total_steps` and starts after the last
  update at the peak. (A decay over all steps starts after update 1, so it ends one update later.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pfx.errors import message
from pfx.optim.base import check_at_least_zero

Schedule = Callable[[Any], Any]
Shape = Literal["linear", "cosine", "sqrt"]
Warmup = Literal["linear", "log"]


def constant(peak: float, *, warmup_steps: int = 0, warmup: Warmup = "linear") -> Schedule:
    """Ramp up, then stay at `peak`.

    Args:
        peak: the learning rate after the warmup.
        warmup_steps: how many updates the ramp takes.
        warmup: how it rises, ``"linear"`` or ``"log"``.

    Raises:
        ValueError: an argument is out of range.

    >>> [constant(1.0, warmup_steps=4)(count) for count in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    check_at_least_zero("constant", "peak", peak)
    ramp = _ramp("constant", warmup_steps, warmup)
    return lambda count: ramp(_number(count) + 1) * peak


def linear(
    peak: float,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    warmup: Warmup = "linear",
) -> Schedule:
    """Ramp up to `peak`, then fall on a straight line to `min_lr`: ``s = 1 − x``.

    `x` goes from 0 to 1 over the decay (Goyal et al. 2017, arXiv:1706.02677, section 2.2, for the
    gradual warmup).

    Args:
        peak: the highest learning rate.
        total_steps: the update at which `min_lr` is reached, to stay.
        warmup_steps: how many updates the ramp takes.
        min_lr: the learning rate at the end.
        warmup: how the ramp rises, ``"linear"`` or ``"log"``.

    Raises:
        ValueError: an argument is out of range, or no update is left for the decay.

    >>> [linear(1.0, 6, warmup_steps=2)(count) for count in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    phases = total_steps, warmup_steps, warmup_steps
    return _schedule("linear", peak, *phases, min_lr, "linear", warmup)


def cosine(
    peak: float,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    warmup: Warmup = "linear",
) -> Schedule:
    """Ramp up to `peak`, then fall on half a cosine to `min_lr`: ``s = (1 + cos(π x)) / 2``.

    `x` goes from 0 to 1 over the decay (Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5, one
    period).

    Args:
        peak: the highest learning rate.
        total_steps: the update at which `min_lr` is reached, to stay.
        warmup_steps: how many updates the ramp takes.
        min_lr: the learning rate at the end.
        warmup: how the ramp rises, ``"linear"`` or ``"log"``.

    Raises:
        ValueError: an argument is out of range, or no update is left for the decay.

    >>> [round(cosine(1.0, 6, warmup_steps=2)(count), 3) for count in range(7)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    phases = total_steps, warmup_steps, warmup_steps
    return _schedule("cosine", peak, *phases, min_lr, "cosine", warmup)


def wsd(
    peak: float,
    total_steps: int,
    *,
    decay_steps: int,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    shape: Shape = "linear",
    warmup: Warmup = "linear",
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
        warmup: how the ramp rises, ``"linear"`` or ``"log"``.

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
    return _schedule("wsd", peak, total_steps, warmup_steps, start, min_lr, shape, warmup)


def inverse_sqrt(
    peak: float, *, warmup_steps: int, min_lr: float = 0.0, warmup: Warmup = "linear"
) -> Schedule:
    """Ramp up to `peak`, then fall as one over the root of the update: ``s = sqrt(warmup_steps / k)``.

    It never ends, so a run need not know how long it is (Vaswani et al. 2017, arXiv:1706.03762,
    equation 3, whose ``d^-0.5 · min(k^-0.5, k · warmup_steps^-1.5)`` has its peak at
    ``(d · warmup_steps)^-0.5``).

    Args:
        peak: the highest learning rate.
        warmup_steps: how many updates the ramp takes; 0 falls from update 1.
        min_lr: the learning rate that it falls to, in the limit.
        warmup: how the ramp rises, ``"linear"`` or ``"log"``.

    Raises:
        ValueError: an argument is out of range.

    >>> [round(inverse_sqrt(1.0, warmup_steps=2)(count), 3) for count in range(8)]
    [0.5, 1.0, 0.816, 0.707, 0.632, 0.577, 0.535, 0.5]
    """
    _check_rates("inverse_sqrt", peak, min_lr)
    ramp = _ramp("inverse_sqrt", warmup_steps, warmup)
    at_peak = max(warmup_steps, 1)

    def value(count: Any) -> Any:
        k = _number(count) + 1
        # Before the peak the root is held at 1, where the ramp alone decides.
        s = _sqrt(_clamp(at_peak / k))
        return ramp(k) * (s * peak + (1 - s) * min_lr)

    return value


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
    warmup: Warmup,
) -> Schedule:
    _check_rates(where, peak, min_lr)
    ramp = _ramp(where, warmup_steps, warmup)
    _check_phases(where, total_steps, warmup_steps, decay_start)
    fall = _one_of(where, "shape", shape, _SHAPES)
    # Update `decay_start` still has the peak; where that would be update 0, update 1 has it.
    last_at_peak, decay_steps = max(decay_start, 1), total_steps - decay_start

    def value(count: Any) -> Any:
        k = _number(count) + 1
        s = fall(_clamp((k - last_at_peak) / decay_steps))
        return ramp(k) * (s * peak + (1 - s) * min_lr)

    return value


def _check_rates(where: str, peak: float, min_lr: float) -> None:
    check_at_least_zero(where, "peak", peak)
    check_at_least_zero(where, "min_lr", min_lr)
    if min_lr > peak:
        raise ValueError(
            message(
                f"{where}: min_lr",
                "is above the peak.",
                f"min_lr = {min_lr}, peak = {peak}.",
                fix=f"min_lr={peak}",
            )
        )


def _check_phases(where: str, total_steps: int, warmup_steps: int, decay_start: int) -> None:
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


def _one_of(where: str, name: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise ValueError(
            message(f"{where}: {name}", f"{value!r} is unknown.", fix=f"one of {sorted(known)}")
        )
    return known[value]


def _number(count: Any) -> Any:
    """Return a count that divides exactly: torch would divide int64 in float32."""
    return count.to(torch.float64) if isinstance(count, Tensor) else count


def _clamp(x: Any) -> Any:
    return torch.clamp(x, 0.0, 1.0) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)


def _ramp(where: str, warmup_steps: int, warmup: Warmup) -> Callable[[Any], Any]:
    """The share of the peak at update k."""
    check_at_least_zero(where, "warmup_steps", warmup_steps)
    rise = _one_of(where, "warmup", warmup, _WARMUPS)
    steps = max(warmup_steps, 1)  # no warmup is a ramp that update 1 completes
    return lambda k: _clamp(rise(k, steps))


def _log1p(x: Any) -> Any:
    return torch.log1p(x) if isinstance(x, Tensor) else math.log1p(x)


def _sqrt(x: Any) -> Any:
    return torch.sqrt(x) if isinstance(x, Tensor) else math.sqrt(x)


def _cosine(x: Any) -> Any:
    angle = x * math.pi
    return (1 + (torch.cos(angle) if isinstance(x, Tensor) else math.cos(angle))) / 2


_SHAPES: Mapping[str, Callable[[Any], Any]] = {
    "linear": lambda x: 1 - x,
    "cosine": _cosine,
    "sqrt": lambda x: 1 - _sqrt(x),
}
_WARMUPS: Mapping[str, Callable[[Any, int], Any]] = {
    "linear": lambda k, steps: k / steps,
    "log": lambda k, steps: _log1p(k) / math.log1p(steps),
}
