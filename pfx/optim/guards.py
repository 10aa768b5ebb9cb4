"""Wrappers that skip a step: the decision is a value of the step, so all devices make the same.

A skipped step leaves the parameters and the inner state, schedule counts and moments, as they were,
bit for bit; only the wrapper's own counters move.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import (
    GradientTransformation,
    check_at_least_zero,
    global_norm,
    update_with,
    updates_if,
    wide_dtype,
    zero_scalar,
)


class SkipCounts(NamedTuple):
    """Steps skipped in all and in a row (0-d int64), and the norm of the last gradients (0-d)."""

    skipped: Tensor
    consecutive: Tensor
    norm: Tensor


class SkipNonfiniteState(NamedTuple):
    """The counters, and the state of what is wrapped."""

    counts: SkipCounts
    inner: Any


def skip_nonfinite(inner: GradientTransformation) -> GradientTransformation:
    """Skip steps whose loss or gradients hold NaN or infinity.

    The gradients count as finite if their norm in float32 is: so a step is skipped too when the sum of
    their squares overflows, which clipping could not mend.

    Args:
        inner: what makes the update of all other steps.

    >>> from pfx import optim
    >>> guard = skip_nonfinite(optim.sgd(0.1))
    >>> params = {"w": torch.ones(1)}
    >>> updates, state = guard.update({"w": torch.full((1,), math.inf)}, guard.init(params), params)
    >>> optim.apply_updates(params, updates), state.counts.skipped
    ({'w': tensor([1.])}, tensor(1))
    """

    def init(params: Any) -> SkipNonfiniteState:
        return SkipNonfiniteState(no_skips(params), inner.init(params))

    def update(
        grads: Any, state: Any, params: Any = None, *, loss: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        norm = global_norm(grads)
        good = finite(norm, loss)
        updates, kept = guarded(inner, good, grads, state.inner, params, loss=loss, **extra)
        return updates, SkipNonfiniteState(counted(state.counts, good, norm), kept)

    return GradientTransformation(init, update)


class SkipSpikesState(NamedTuple):
    """The counters, how many steps the means were made of, the means, and the wrapped state."""

    counts: SkipCounts
    seen: Tensor
    loss_mean: Tensor
    norm_mean: Tensor
    inner: Any


def skip_spikes(
    inner: GradientTransformation,
    *,
    loss_factor: float | None = 10.0,
    norm_factor: float | None = 10.0,
    warmup: int = 100,
    decay: float = 0.99,
    max_consecutive: int = 10,
) -> GradientTransformation:
    """Skip steps that are not finite, or whose loss or gradient norm is far above its running mean.

    The running mean after n steps with values x is Adam's average (Kingma & Ba 2015,
    arXiv:1412.6980, section 3)::

        mean = (1 − decay) · Σᵢ decayⁿ⁻ⁱ xᵢ / (1 − decayⁿ)

    It is made of the steps that were not skipped and had a weight. A step is a spike if
    ``x > factor · mean``; a loss whose mean is not positive has no spikes.

    Args:
        inner: what makes the update of all other steps.
        loss_factor: above 1, how far the loss may lie over its mean; None does not look at it.
        norm_factor: above 1, the same for the global norm of the gradients.
        warmup: steps before the first that may be a spike.
        decay: of the running mean, in [0, 1).
        max_consecutive: spikes skipped in a row; the next is no spike but where the run is now: it is
            taken, and the means begin anew with it. What is not finite is skipped however often.

    Raises:
        ValueError: an argument is out of range; `update` was given no ``loss`` to look at.

    >>> from pfx import optim
    >>> guard = skip_spikes(optim.sgd(1.0), warmup=1)
    >>> params, state = {"w": torch.ones(1)}, guard.init({"w": torch.ones(1)})
    >>> for loss in (2.0, 21.0):
    ...     updates, state = guard.update(params, state, params, loss=torch.tensor(loss))
    >>> updates, state.counts.skipped
    ({'w': tensor([-0.])}, tensor(1))
    """
    where = "skip_spikes"
    for name, factor in (("loss_factor", loss_factor), ("norm_factor", norm_factor)):
        if factor is not None:
            _check_above_one(where, name, factor)
    check_at_least_zero(where, "warmup", warmup)
    check_at_least_zero(where, "decay", decay, below=1.0)
    check_at_least_zero(where, "max_consecutive", max_consecutive)

    def init(params: Any) -> SkipSpikesState:
        seen, mean = zero_scalar(params, torch.int64), zero_scalar(params, torch.float64)
        return SkipSpikesState(no_skips(params), seen, mean, mean.clone(), inner.init(params))

    def update(
        grads: Any,
        state: Any,
        params: Any = None,
        *,
        loss: Any = None,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        if loss is None and loss_factor is not None:
            raise ValueError(_no_loss(where))
        norm = global_norm(grads)
        armed = (state.seen >= warmup) & (state.counts.consecutive < max_consecutive)
        high = _above(norm, state.norm_mean, norm_factor) | _above(
            loss, state.loss_mean, loss_factor
        )
        good = finite(norm, loss) & ~(armed & high)
        anew = good & (state.seen >= warmup) & high  # what was not skipped although it is high
        counts = torch.ones_like(good) if weight is None else torch.as_tensor(weight) != 0
        seen, loss_mean, norm_mean = _moved(state, good & counts, anew, loss, norm, decay)
        known = {"loss": loss, "weight": weight, **extra}
        updates, kept = guarded(inner, good, grads, state.inner, params, **known)
        held = counted(state.counts, good, norm)
        return updates, SkipSpikesState(held, seen, loss_mean, norm_mean, kept)

    return GradientTransformation(init, update)


def _moved(
    state: SkipSpikesState, moves: Tensor, anew: Tensor, loss: Any, norm: Tensor, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The number of values and their means after this step, where it `moves` them."""
    before = torch.where(anew, 0, state.seen)
    now = before + 1
    share = (1 - decay) / (1 - torch.pow(decay, now.to(torch.float64)))  # 1 for the first

    def mean(old: Tensor, x: Any) -> Tensor:
        if x is None:
            return old
        x = torch.as_tensor(x).to(torch.float64)
        return torch.where(moves, torch.where(before == 0, x, old + share * (x - old)), old)

    seen = torch.where(moves, now, state.seen)
    return seen, mean(state.loss_mean, loss), mean(state.norm_mean, norm)


def _above(x: Any, mean: Tensor, factor: float | None) -> Tensor:
    if factor is None:
        return torch.zeros_like(mean, dtype=torch.bool)
    return (mean > 0) & (torch.as_tensor(x).to(torch.float64) > factor * mean)


def no_skips(params: Any) -> SkipCounts:
    """Counters of nothing, for a state.

    >>> no_skips({"w": torch.ones(2)}).skipped
    tensor(0)
    """
    wide = {wide_dtype(p, path) for path, p in tree.flatten_with_path(params)[0]}
    norm = zero_scalar(params, torch.float64 if torch.float64 in wide else torch.float32)
    count = zero_scalar(params, torch.int64)
    return SkipCounts(count, count.clone(), norm)


def counted(counts: SkipCounts, good: Tensor, norm: Tensor) -> SkipCounts:
    """The counters after a step that was taken if it is `good`.

    >>> counts = no_skips({"w": torch.ones(2)})
    >>> counted(counts, torch.tensor(False), torch.tensor(math.inf)).consecutive
    tensor(1)
    """
    bad = (~good).to(torch.int64)
    row = torch.where(good, 0, counts.consecutive + 1)
    return SkipCounts(counts.skipped + bad, row, norm.to(counts.norm.dtype))


def finite(norm: Tensor, loss: Any = None) -> Tensor:
    """Tell whether a gradient norm, and a loss if there is one, are finite: a 0-d bool.

    >>> finite(torch.tensor(1.0), torch.tensor(math.nan))
    tensor(False)
    """
    good = torch.isfinite(norm)
    return good if loss is None else good & torch.isfinite(torch.as_tensor(loss))


def guarded(
    inner: GradientTransformation, good: Tensor, grads: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Make the inner update, and undo it in all bits unless the step is `good`.

    Returns:
        The updates, zero where the step is not good, and the state, then as it was.

    >>> from pfx import optim
    >>> params, optimizer = {"w": torch.ones(1)}, optim.sgd(0.1)
    >>> guarded(optimizer, torch.tensor(False), params, optimizer.init(params), params)[0]
    {'w': tensor([-0.])}
    """
    updates, new_state = update_with(inner, grads, state, params, **extra)
    kept = tree.map(
        lambda new, old: old if new is old else torch.where(good, new, old), new_state, state
    )
    return updates_if(good, updates, params), kept


def _check_above_one(where: str, name: str, factor: float) -> None:
    if 1.0 < factor < math.inf:
        return
    raise ValueError(
        message(
            f"{where}: {name}",
            "is out of range.",
            f"{name} = {factor} must be finite and above 1.",
            fix=f"{name}=10.0, or {name}=None not to look at it",
        )
    )


def _no_loss(where: str) -> str:
    return message(
        f"{where}: loss",
        "is None.",
        "spikes of the loss are told by its running mean.",
        fix="optimizer.update(grads, state, params, loss=loss), or loss_factor=None",
    )
