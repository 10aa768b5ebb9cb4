"""The ingredients that optimizers are chained from.

Numbers that all leaves share (bias corrections, the clip factor, the learning rate) are computed
once, as 0-d tensors: a step of `adamw` costs nine operations a leaf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import (
    GradientTransformation,
    check_at_least_zero,
    global_norm,
    scaled,
    stateless,
    wide_dtype,
    widen,
    zero_scalar,
)
from pfx.optim.masking import masked
from pfx.optim.schedules import Schedule


def scale(factor: float) -> GradientTransformation:
    """Multiply by a constant: ``u = factor · g``.

    Args:
        factor: any number; negative turns gradients into descent.

    >>> scale(-0.5).update({"w": torch.ones(2)}, ())[0]
    {'w': tensor([-0.5000, -0.5000])}
    """
    return stateless(lambda grads, params: tree.map(lambda g: g * factor, widen(grads)))


class ScaleByAdamState(NamedTuple):
    """Updates made so far (0-d int64), and the averages of the gradient and of its square."""

    count: Tensor
    mu: Any
    nu: Any


def scale_by_adam(
    *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Divide the averaged gradient by the root of the averaged squared gradient.

    At update t, from m₀ = v₀ = 0 (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1)::

        m = b1 · m + (1 − b1) · g        v = b2 · v + (1 − b2) · g²
        u = (m / (1 − b1ᵗ)) / (sqrt(v / (1 − b2ᵗ)) + eps)

    The moments are float32, or float64 for float64 parameters.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root, at least 0.

    Raises:
        ValueError: a beta or `eps` is out of range.

    >>> params = {"w": torch.zeros(2)}
    >>> adam = scale_by_adam()
    >>> updates, state = adam.update({"w": torch.tensor([10.0, -0.1])}, adam.init(params))
    >>> updates["w"].round(decimals=4), state.count
    (tensor([ 1., -1.]), tensor(1))
    """
    check_at_least_zero("scale_by_adam", "b1", b1, below=1.0)
    check_at_least_zero("scale_by_adam", "b2", b2, below=1.0)
    check_at_least_zero("scale_by_adam", "eps", eps)

    def init(params: Any) -> ScaleByAdamState:
        return ScaleByAdamState(
            zero_scalar(params, torch.int64), zero_moments(params), zero_moments(params)
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = tree.map(lambda m, g: g.to(m.dtype), state.mu, grads)
        mu = tree.map(lambda m, g: torch.lerp(m, g, 1 - b1), state.mu, grads)
        nu = tree.map(lambda v, g: torch.addcmul(v * b2, g, g, value=1 - b2), state.nu, grads)
        count = state.count + 1
        t = count.to(torch.float64)
        correction1, correction2 = 1 - b1**t, 1 - b2**t
        # Both corrections and eps folded into the denominator: u = m / (sqrt(v) · slope + offset).
        slope, offset = correction1 / torch.sqrt(correction2), correction1 * eps

        def normalize(m: Tensor, v: Tensor) -> Tensor:
            return (m / (torch.sqrt(v) * slope + offset)).to(m.dtype)  # casts 0-d leaves only

        return tree.map(normalize, mu, nu), ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)


class TraceState(NamedTuple):
    """The accumulated gradients."""

    trace: Any


def trace(decay: float, *, nesterov: bool = False) -> GradientTransformation:
    """Accumulate gradients with momentum.

    From v₀ = 0 (Sutskever et al. 2013, ICML; torch's form, with the learning rate outside)::

        v = decay · v + g        u = g + decay · v if nesterov else v

    Args:
        decay: the momentum, in [0, 1).
        nesterov: look one step of momentum ahead.

    Raises:
        ValueError: `decay` is out of range.

    >>> momentum = trace(0.9)
    >>> grads = {"w": torch.ones(1)}
    >>> _, state = momentum.update(grads, momentum.init(grads))
    >>> momentum.update(grads, state)[0]
    {'w': tensor([1.9000])}
    """
    check_at_least_zero("trace", "decay", decay, below=1.0)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = tree.map(lambda v, g: g.to(v.dtype), state.trace, grads)
        velocity = tree.map(lambda v, g: torch.add(g, v, alpha=decay), state.trace, grads)
        if not nesterov:
            return velocity, TraceState(velocity)
        ahead = tree.map(lambda v, g: torch.add(g, v, alpha=decay), velocity, grads)
        return ahead, TraceState(velocity)

    return GradientTransformation(lambda params: TraceState(zero_moments(params)), update)


class ClipByGlobalNormState(NamedTuple):
    """The norm of the last gradients before they were clipped (0-d)."""

    norm: Tensor


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Shrink all leaves by one factor so that their `global_norm` is at most `max_norm`.

    ``u = g · min(1, max_norm / ‖g‖)`` (Pascanu et al. 2013, arXiv:1211.5063, algorithm 1).
    Gradients within the limit are unchanged bit for bit, zeros stay zeros for every limit. A norm
    that is not finite is kept in the state as it is: the caller decides whether to skip the step.

    Args:
        max_norm: the limit, at least 0.

    Raises:
        ValueError: `max_norm` is out of range.

    >>> clip = clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> clip.update(grads, clip.init(grads))
    ({'w': tensor([0.6000, 0.8000])}, ClipByGlobalNormState(norm=tensor(5.)))
    """
    check_at_least_zero("clip_by_global_norm", "max_norm", max_norm)

    def init(params: Any) -> ClipByGlobalNormState:
        any_double = any(p.dtype == torch.float64 for p in tree.leaves(params))
        dtype = torch.float64 if any_double else torch.float32
        return ClipByGlobalNormState(zero_scalar(params, dtype))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(grads)
        limit = torch.full((), max_norm, dtype=norm.dtype, device=norm.device)
        one = torch.ones((), dtype=norm.dtype, device=norm.device)
        within = norm <= limit  # false for NaN, which then reaches every leaf
        # Never 0 / 0, not even in the branch that is not taken: its derivative would be NaN.
        factor = torch.where(within, one, limit) / torch.where(within, one, norm)
        updates = scaled(grads, factor)
        return updates, ClipByGlobalNormState(norm.to(state.norm.dtype))

    return GradientTransformation(init, update)


def clip_by_value(max_value: float) -> GradientTransformation:
    """Clip every element: ``u = min(max(g, −max_value), max_value)``.

    Args:
        max_value: the limit, at least 0.

    Raises:
        ValueError: `max_value` is out of range.

    >>> clip_by_value(1.0).update({"w": torch.tensor([3.0, -0.5])}, ())[0]
    {'w': tensor([ 1.0000, -0.5000])}
    """
    check_at_least_zero("clip_by_value", "max_value", max_value)

    def clip(grads: Any, params: Any) -> Any:
        return tree.map(lambda g: torch.clamp(g, -max_value, max_value), widen(grads))

    return stateless(clip)


def add_decayed_weights(weight_decay: float, *, mask: Any = None) -> GradientTransformation:
    """Add a multiple of the parameters: ``u = g + weight_decay · p``.

    After `scale_by_adam` this is decoupled weight decay (Loshchilov & Hutter 2019,
    arXiv:1711.05101, algorithm 2); before it, an L2 penalty.

    Args:
        weight_decay: the multiple, at least 0; the learning rate that follows scales it.
        mask: which leaves decay, as in `masked`; `decay_mask` makes one from the logical dims.

    Raises:
        ValueError: `weight_decay` is out of range, or `update` was given no `params`.

    >>> decay = add_decayed_weights(0.1, mask={"w": True, "bias": False})
    >>> params = {"w": torch.ones(2), "bias": torch.ones(2)}
    >>> grads = {"w": torch.zeros(2), "bias": torch.zeros(2)}
    >>> decay.update(grads, decay.init(params), params)[0]
    {'bias': tensor([0., 0.]), 'w': tensor([0.1000, 0.1000])}
    """
    check_at_least_zero("add_decayed_weights", "weight_decay", weight_decay)

    def add(grads: Any, params: Any) -> Any:
        if params is None:
            raise ValueError(
                message(
                    "add_decayed_weights: params",
                    "is None.",
                    "the decay is a multiple of the parameters.",
                    fix="optimizer.update(grads, state, params)",
                )
            )
        return tree.map(lambda g, p: torch.add(g, p, alpha=weight_decay), widen(grads), params)

    transform = stateless(add)
    return transform if mask is None else masked(transform, mask)


class ScaleByLearningRateState(NamedTuple):
    """Updates made so far (0-d int64) and the learning rate of the last one (0-d float64)."""

    count: Tensor
    learning_rate: Tensor


def scale_by_learning_rate(learning_rate: float | Schedule) -> GradientTransformation:
    """Turn gradients into descent: ``u = −lr(count) · g``.

    The state keeps `count` and, to be read, the rate that was used; the rate itself is always
    computed from `learning_rate` and `count`. So a run that resumes with another schedule follows
    the new one from there, and a decayed rate is never decayed again.

    Args:
        learning_rate: a number at least 0, or a schedule of the updates made before this one.

    Raises:
        ValueError: a number that is negative or not finite.

    >>> descent = scale_by_learning_rate(lambda count: 0.5 / (count + 1))
    >>> grads = {"w": torch.ones(1)}
    >>> _, state = descent.update(grads, descent.init(grads))
    >>> descent.update(grads, state)[0]
    {'w': tensor([-0.2500])}
    """
    if not callable(learning_rate):
        check_at_least_zero("scale_by_learning_rate", "learning_rate", learning_rate)

    def init(params: Any) -> ScaleByLearningRateState:
        return ScaleByLearningRateState(
            zero_scalar(params, torch.int64), zero_scalar(params, torch.float64)
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rate = value_at(learning_rate, state.count)
        updates = scaled(grads, torch.neg(rate))
        return updates, ScaleByLearningRateState(state.count + 1, rate)

    return GradientTransformation(init, update)


def value_at(value: float | Schedule, count: Tensor) -> Tensor:
    """Return a number, or what a schedule says at a count, as a 0-d float64 tensor.

    >>> value_at(0.5, torch.tensor(3)), value_at(lambda count: count / 2, torch.tensor(3))
    (tensor(0.5000, dtype=torch.float64), tensor(1.5000, dtype=torch.float64))
    """
    now = value(count) if callable(value) else value
    if isinstance(now, Tensor):
        return now.to(torch.float64)
    return torch.full((), now, dtype=torch.float64, device=count.device)


def zero_moments(params: Any) -> Any:
    """Return zeros like the parameters, in the dtype to compute with.

    >>> zero_moments({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([0., 0.])}
    """
    return tree.map_with_path(
        lambda path, p: torch.zeros_like(p, dtype=wide_dtype(p, path)), params
    )
