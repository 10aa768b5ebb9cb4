"""LAMB: Adam whose step is as long as the weights of the layer it moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import GradientTransformation, chain, stateless, widen
from pfx.optim.dims import STACK, all_dims, total
from pfx.optim.masking import masked
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import add_decayed_weights, scale_by_adam, scale_by_learning_rate


def scale_by_trust_ratio(
    *, axes: Any, stack: Sequence[str] = STACK, mask: Any = None
) -> GradientTransformation:
    """Give the update of each layer the norm of the layer's parameter: ``u · ‖p‖ / ‖u‖``.

    The ratio is 1 where either norm is 0 (You et al. 2020, arXiv:1904.00962, algorithm 2, with φ the
    identity). Norms are taken layer by layer: stacking parameters changes no number.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names; ``None`` where nothing
            is stacked.
        stack: names of the leading dims that only stack parameters.
        mask: which leaves are scaled, as in `masked`; the others keep the ratio 1.

    Raises:
        TreeError: `axes` or `mask` does not fit the parameters.
        ValueError: `update` was given no `params`.

    >>> trust = scale_by_trust_ratio(axes={"w": "layers embed"})
    >>> params = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
    >>> trust.update({"w": torch.ones(2, 2)}, trust.init(params), params)[0]
    {'w': tensor([[3.5355, 3.5355],
            [1.0000, 1.0000]])}
    """

    def scaled(grads: Any, params: Any) -> Any:
        if params is None:
            what = "is None."
            why = "the ratio is that of the norm of the parameters."
            fix = "optimizer.update(grads, state, params)"
            raise ValueError(message("scale_by_trust_ratio: params", what, why, fix=fix))
        dims = iter(all_dims("scale_by_trust_ratio", axes, params, stack=stack))
        return tree.map(lambda u, p: _trusted(u, p, next(dims).layer), widen(grads), params)

    transform = stateless(scaled)
    return transform if mask is None else masked(transform, mask)


def _trusted(u: Tensor, p: Tensor, layer: tuple[int, ...]) -> Tensor:
    p = p.to(u.dtype)
    ours, theirs = (torch.sqrt(total(x * x, layer)) for x in (p, u))
    known = (ours > 0) & (theirs > 0)
    one = torch.ones_like(ours)
    # Never a division by 0, not even in the branch that is not taken.
    return u * (torch.where(known, ours, one) / torch.where(known, theirs, one))


def lamb(
    learning_rate: float | Schedule,
    *,
    axes: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Any = None,
    trust_mask: Any = None,
    stack: Sequence[str] = STACK,
) -> GradientTransformation:
    """Adam with decoupled weight decay, layerwise scaled to the size of the weights.

    ``p = p − lr · (‖p‖ / ‖r‖) · r`` with ``r = m̂ / (sqrt(v̂) + eps) + weight_decay · p``
    (You et al. 2020, arXiv:1904.00962, algorithm 2); see `scale_by_adam`, `scale_by_trust_ratio`.

    Args:
        learning_rate: a number or a schedule.
        axes: what the dims of the parameters are, as in `scale_by_trust_ratio`.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: at least 0.
        mask: which leaves decay, as in `adamw`.
        trust_mask: which leaves are scaled to the size of their weights; without one all are. The
            paper's BERT leaves out norms and biases in both, ``decay_mask(axes)``.
        stack: names of the leading dims that only stack parameters.

    Raises:
        ValueError: an argument is out of range.
        TreeError: `axes` or a mask does not fit the parameters.

    >>> optimizer = lamb(0.1, axes={"w": "embed"}, weight_decay=0.0)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)[0]
    {'w': tensor([-0.3536, -0.3536])}
    """
    return chain(
        scale_by_adam(b1=b1, b2=b2, eps=eps),
        add_decayed_weights(weight_decay, mask=mask),
        scale_by_trust_ratio(axes=axes, stack=stack, mask=trust_mask),
        scale_by_learning_rate(learning_rate),
    )
