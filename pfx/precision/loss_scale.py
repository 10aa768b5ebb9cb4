"""Loss scaling: gradients in 16 bits are kept off both ends of their range by a power of two.

The loss is multiplied by the scale before it is differentiated; the gradients, once they are wide, are
divided by it, exactly. A gradient that overflows skips the step and lowers the scale (Micikevicius et
al. 2018, arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx.errors import message
from pfx.optim import GradientTransformation, SkipCounts, find_state
from pfx.optim.base import check_at_least_zero, global_norm, scaled, zero_scalar
from pfx.optim.guards import counted, finite, guarded, no_skips


class LossScaleState(NamedTuple):
    """The scale (0-d float32), the good steps since it moved, the overflows still endured, the rest.

    `good` and `patience` are 0-d int64; `counts` are of skipped steps.
    """

    scale: Tensor
    good: Tensor
    patience: Tensor
    counts: SkipCounts
    inner: Any


def dynamic(
    inner: GradientTransformation,
    *,
    initial: float = 2.0**16,
    window: int = 1000,
    factor: float = 2.0,
    backoff: float = 0.5,
    hysteresis: int = 2,
    replenish: bool = False,
    floor: float = 1.0,
    ceiling: float = 2.0**24,
) -> GradientTransformation:
    """Scale the loss by as much as the gradients bear.

    It takes the gradients of the scaled loss, as wide as they are summed, and gives `inner` those of the
    loss. A step whose gradients are not finite is skipped. The scale then moves as Megatron-LM's and
    DeepSpeed's does: an overflow uses up one of `hysteresis`, and the one that uses up the last, and
    every one after it, multiplies the scale by `backoff`. After `window` good steps without an
    overflow between them, it is multiplied by `factor`, and `hysteresis` is full again.

    Args:
        inner: what makes the update of the steps that are not skipped.
        initial: the scale at first. It, `factor`, `backoff`, `floor` and `ceiling` are powers of two.
        window: good steps in a row that raise the scale.
        factor: above 1, by how much.
        backoff: below 1, the factor of an overflow.
        hysteresis: overflows it takes to lower the scale; 1: each does.
        replenish: every good step makes `hysteresis` full again (DeepSpeed's
            ``consecutive_hysteresis``), not only one that raises the scale.
        floor, ceiling: between which the scale stays.

    Raises:
        ValueError: an argument is out of range.

    >>> from pfx import optim
    >>> optimizer = dynamic(optim.sgd(1.0), initial=4.0, hysteresis=1)
    >>> params = {"w": torch.ones(1)}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": torch.full((1,), 2.0)}, state, params)
    >>> updates, of(state)
    ({'w': tensor([-0.5000])}, tensor(4.))
    >>> of(optimizer.update({"w": torch.full((1,), math.inf)}, state, params)[1])
    tensor(2.)
    """
    where = "loss_scale.dynamic"
    powers = {"initial": initial, "factor": factor, "backoff": backoff, "floor": floor,
              "ceiling": ceiling}  # fmt: skip
    for name, value in powers.items():
        check_power_of_two(where, name, value)
    for name, value in (("window", window), ("hysteresis", hysteresis)):
        check_at_least_zero(where, name, value - 1)
    if not (backoff < 1 < factor and floor <= initial <= ceiling):
        raise ValueError(
            message(
                where,
                "would move the scale the wrong way.",
                f"backoff = {backoff} < 1 < factor = {factor}, and "
                f"floor = {floor} <= initial = {initial} <= ceiling = {ceiling} must hold.",
                fix=f"{where}(inner, initial={initial})",
            )
        )

    def moved(state: LossScaleState, good: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = torch.where(good, state.patience, torch.clamp(state.patience - 1, min=0))
        lowered = torch.clamp(state.scale * backoff, min=floor)
        scale = torch.where(good | (left > 0), state.scale, lowered)
        row = torch.where(good, state.good + 1, 0)
        grows = row >= window
        scale = torch.where(grows, torch.clamp(scale * factor, max=ceiling), scale)
        full = grows | good if replenish else grows
        return scale, torch.where(grows, 0, row), torch.where(full, hysteresis, left)

    return _scaling(inner, initial, hysteresis, moved)


def fixed(inner: GradientTransformation, scale: float) -> GradientTransformation:
    """Scale the loss by a number that stays; gradients that overflow skip the step.

    Args:
        inner: what makes the update of the steps that are not skipped.
        scale: a power of two.

    Raises:
        ValueError: `scale` is no power of two.

    >>> from pfx import optim
    >>> optimizer = fixed(optim.sgd(1.0), 4.0)
    >>> params = {"w": torch.ones(1)}
    >>> optimizer.update({"w": torch.full((1,), 2.0)}, optimizer.init(params), params)[0]
    {'w': tensor([-0.5000])}
    """
    check_power_of_two("loss_scale.fixed", "scale", scale)
    return _scaling(inner, scale, 0, lambda state, good: (state.scale, state.good, state.patience))


def _scaling(
    inner: GradientTransformation, initial: float, hysteresis: int, moved: Any
) -> GradientTransformation:
    """A transformation whose scale moves as `moved` says of its state and whether the step is good."""

    def init(params: Any) -> LossScaleState:
        scale, zero = zero_scalar(params, torch.float32), zero_scalar(params, torch.int64)
        counts = no_skips(params)
        return LossScaleState(scale + initial, zero, zero + hysteresis, counts, inner.init(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads = scaled(grads, 1 / state.scale)
        norm = global_norm(grads)
        good = finite(norm)
        updates, kept = guarded(inner, good, grads, state.inner, params, **extra)
        scale, row, patience = moved(state, good)
        held = counted(state.counts, good, norm)
        return updates, LossScaleState(scale, row, patience, held, kept)

    return GradientTransformation(init, update)


def of(opt_state: Any) -> Any:
    """Return the scale of the next loss, a 0-d tensor; ``None`` where nothing scales it.

    >>> from pfx import optim
    >>> of(dynamic(optim.sgd(0.1)).init({"w": torch.ones(1)}))
    tensor(65536.)
    """
    found = find_state(opt_state, LossScaleState)
    return None if found is None else found.scale


def check_power_of_two(where: str, name: str, value: Any) -> None:
    """Raise `ValueError` unless a number is a power of two that float32 can multiply and divide by.

    >>> check_power_of_two("loss_scale.fixed", "scale", 2.0**16)
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number > 0 and math.isfinite(number) and math.frexp(number)[0] == 0.5:
        if 2.0**-100 <= number <= 2.0**100:
            return
    raise ValueError(
        message(
            f"{where}: {name}={value!r}",
            "is no power of two.",
            "multiplying by a power of two, and dividing by it again, rounds nothing.",
            fix=f"{name}={2.0**16:g}",
        )
    )
