"""Lion: the sign of an average of gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pfx import tree
from pfx.optim.base import GradientTransformation, chain, check_at_least_zero
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import add_decayed_weights, scale_by_learning_rate, zero_moments


class ScaleByLionState(NamedTuple):
    """The average of the gradient."""

    mu: Any


def scale_by_lion(*, b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    """Take the sign of the gradient blended with its average.

    From m = 0 (Chen et al. 2023, arXiv:2302.06675, program 1)::

        u = sign(b1 · m + (1 − b1) · g)        m = b2 · m + (1 − b2) · g

    Args:
        b1: the share of the average in the blend, in [0, 1).
        b2: decay of the average, in [0, 1).

    Raises:
        ValueError: a beta is out of range.

    >>> lion, params = scale_by_lion(), {"w": torch.zeros(3)}
    >>> lion.update({"w": torch.tensor([10.0, -0.1, 0.0])}, lion.init(params))[0]
    {'w': tensor([ 1., -1.,  0.])}
    """
    check_at_least_zero("scale_by_lion", "b1", b1, below=1.0)
    check_at_least_zero("scale_by_lion", "b2", b2, below=1.0)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = tree.map(lambda m, g: g.to(m.dtype), state.mu, grads)
        signs = tree.map(lambda m, g: torch.sign(torch.lerp(m, g, 1 - b1)), state.mu, grads)
        mu = tree.map(lambda m, g: torch.lerp(m, g, 1 - b2), state.mu, grads)
        return signs, ScaleByLionState(mu)

    return GradientTransformation(lambda params: ScaleByLionState(zero_moments(params)), update)


def lion(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675, program 1).

    ``p = p − lr · (sign(b1 · m + (1 − b1) · g) + weight_decay · p)``; see `scale_by_lion`. Every
    element moves by the learning rate: the paper takes one 3 to 10 times smaller than for AdamW,
    and a weight decay larger by as much.

    Args:
        learning_rate: a number or a schedule.
        b1: the share of the average in the blend, in [0, 1).
        b2: decay of the average, in [0, 1).
        weight_decay: at least 0, scaled by the learning rate.
        mask: which leaves decay, as in `adamw`.

    Raises:
        ValueError: an argument is out of range.
        TreeError: the mask does not fit the parameters.

    >>> optimizer = lion(0.1)
    >>> params = {"w": torch.zeros(2)}
    >>> optimizer.update({"w": torch.tensor([3.0, -0.5])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.1000,  0.1000])}
    """
    return chain(
        scale_by_lion(b1=b1, b2=b2),
        add_decayed_weights(weight_decay, mask=mask),
        scale_by_learning_rate(learning_rate),
    )
