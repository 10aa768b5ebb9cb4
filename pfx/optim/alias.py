"""Named optimizers: each is a chain of ingredients, in the order in which they apply."""

from __future__ import annotations

from typing import Any

from pfx.errors import message
from pfx.optim.base import GradientTransformation, chain, check_at_least_zero
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import (
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    trace,
)


def sgd(
    learning_rate: float | Schedule, *, momentum: float = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Gradient descent, with momentum if asked for; equal to `torch.optim.SGD`.

    ``p = p − lr · g``; with momentum g is replaced by the accumulated gradient of `trace`
    (Sutskever et al. 2013, ICML).

    Args:
        learning_rate: a number or a schedule.
        momentum: in [0, 1); 0 keeps no state for it.
        nesterov: look one step of momentum ahead.

    Raises:
        ValueError: an argument is out of range, or `nesterov` has no momentum to look ahead with.

    >>> import torch
    >>> optimizer = sgd(0.1)
    >>> params = {"w": torch.ones(1)}
    >>> optimizer.update({"w": torch.ones(1)}, optimizer.init(params), params)[0]
    {'w': tensor([-0.1000])}
    """
    check_at_least_zero("sgd", "momentum", momentum, below=1.0)
    if nesterov and momentum == 0:
        raise ValueError(message("sgd: nesterov", "needs a momentum.", fix="momentum=0.9"))
    descent = scale_by_learning_rate(learning_rate)
    if momentum == 0:
        return chain(descent)
    return chain(trace(momentum, nesterov=nesterov), descent)


def adam(
    learning_rate: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1); equal to `torch.optim.Adam`.

    ``p = p − lr · m̂ / (sqrt(v̂) + eps)``; see `scale_by_adam`. The defaults are the paper's.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root, at least 0.

    Raises:
        ValueError: an argument is out of range.

    >>> import torch
    >>> optimizer = adam(0.1)
    >>> params = {"w": torch.zeros(1)}
    >>> optimizer.update({"w": torch.ones(1)}, optimizer.init(params), params)[0]
    {'w': tensor([-0.1000])}
    """
    return chain(scale_by_adam(b1=b1, b2=b2, eps=eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Any = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay; equal to `torch.optim.AdamW`, with its defaults.

    ``p = p − lr · (m̂ / (sqrt(v̂) + eps) + weight_decay · p)`` (Loshchilov & Hutter 2019,
    arXiv:1711.05101, algorithm 2, with its α and η in one learning rate that scales both terms; see
    `scale_by_adam`).

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: at least 0, scaled by the learning rate.
        mask: which leaves decay, as in `masked`; ``decay_mask(axes)`` leaves out norms and biases.
            Without one every leaf decays.

    Raises:
        ValueError: an argument is out of range.
        TreeError: the mask does not fit the parameters.

    >>> import torch
    >>> optimizer = adamw(0.1, weight_decay=0.5)
    >>> params = {"w": torch.ones(1)}
    >>> optimizer.update({"w": torch.zeros(1)}, optimizer.init(params), params)[0]
    {'w': tensor([-0.0500])}
    """
    return chain(
        scale_by_adam(b1=b1, b2=b2, eps=eps),
        add_decayed_weights(weight_decay, mask=mask),
        scale_by_learning_rate(learning_rate),
    )
