"""Adafactor: second moments kept as their rows' and columns' means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim.base import (
    GradientTransformation,
    chain,
    check_at_least_zero,
    stateless,
    wide_dtype,
    widen,
    zero_scalar,
)
from pfx.optim.dims import FUSED, STACK, Dims, all_dims, mean, mean_square
from pfx.optim.masking import masked
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import ScaleByLearningRateState, scale_by_learning_rate, value_at


class ScaleByFactoredRmsState(NamedTuple):
    """Updates made so far (0-d int64), and averages of the squared gradient.

    `row` and `column` are its means over the columns and the rows of matrices, `full` is itself for
    parameters that are none; each is ``None`` where another stands for it.
    """

    count: Tensor
    row: Any
    column: Any
    full: Any


def scale_by_factored_rms(
    *,
    axes: Any,
    decay_rate: float = 0.8,
    eps: float | None = None,
    stack: Sequence[str] = STACK,
    fused: Sequence[Sequence[str]] = FUSED,
) -> GradientTransformation:
    """Divide by the root of an averaged square that is kept as a product of two vectors.

    For the last two dims of each layer's parameter, at update t (Shazeer & Stern 2018,
    arXiv:1804.04235, algorithm 4, in the form of `torch.optim.Adafactor`)::

        β = 1 − t^−decay_rate
        R = β · R + (1 − β) · mean over columns of g²       C likewise, over rows
        u = g / max(sqrt(R C / max(mean(R), eps)), eps)

    A parameter with fewer than two dims keeps its averaged square whole. Layers are apart: stacking
    them changes no number.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names; ``None`` where nothing
            is stacked.
        decay_rate: how fast the average grows long, at least 0.
        eps: the least root; ``None`` takes the rounding unit of the dtype computed with.
        stack: names of the leading dims that only stack parameters.
        fused: runs of names that are one dim of the layer.

    Raises:
        TreeError: `axes` does not fit the parameters.
        ValueError: an argument is out of range.

    >>> rms = scale_by_factored_rms(axes={"w": "embed mlp"})
    >>> grads = {"w": torch.tensor([[1.0, 2.0], [2.0, 4.0]])}
    >>> rms.update(grads, rms.init(grads))[0]
    {'w': tensor([[1., 1.],
            [1., 1.]])}
    """
    check_at_least_zero("scale_by_factored_rms", "decay_rate", decay_rate)
    if eps is not None:
        check_at_least_zero("scale_by_factored_rms", "eps", eps)

    def dims_in(values: Any) -> list[Dims]:
        return all_dims("scale_by_factored_rms", axes, values, stack=stack, fused=fused)

    def init(params: Any) -> ScaleByFactoredRmsState:
        pairs, treedef = tree.flatten_with_path(params)
        made = [
            _zeros(p, wide_dtype(p, path), dims)
            for (path, p), dims in zip(pairs, dims_in(params), strict=True)
        ]
        columns = (tree.unflatten(treedef, list(c)) for c in _transposed(made))
        return ScaleByFactoredRmsState(zero_scalar(params, torch.int64), *columns)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        share = count.to(torch.float64) ** -decay_rate
        leaves, treedef = tree.flatten(widen(grads))
        kept = [tree.match(treedef, part, []) for part in state[1:]]
        made = [
            _scaled(g, old, share.to(g.dtype), dims, eps)
            for g, dims, *old in zip(leaves, dims_in(grads), *kept, strict=True)
        ]
        updates, *new = (tree.unflatten(treedef, list(c)) for c in _transposed(made, 4))
        return updates, ScaleByFactoredRmsState(count, *new)

    return GradientTransformation(init, update)


def _transposed(rows: list[tuple[Any, ...]], width: int = 3) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


def _zeros(p: Tensor, dtype: torch.dtype, dims: Dims) -> tuple[Tensor | None, ...]:
    """The three averages of one leaf at the start: rows, columns, whole."""
    if len(dims.groups) < 2:
        return None, None, torch.zeros_like(p, dtype=dtype)

    def without(group: tuple[int, ...]) -> Tensor:
        shape = [1 if i in group else size for i, size in enumerate(p.shape)]
        return torch.zeros(shape, dtype=dtype, device=p.device)

    return without(dims.groups[-1]), without(dims.groups[-2]), None


def _scaled(
    g: Tensor, old: list[Tensor | None], share: Tensor, dims: Dims, eps: float | None
) -> tuple[Tensor | None, ...]:
    """The update of one leaf, and its averages after it."""
    least = torch.finfo(g.dtype).eps if eps is None else eps
    row, column, full = old
    if row is None or column is None:
        assert full is not None
        full = torch.lerp(full, g * g, share)
        estimate = full
    else:
        rows, columns = dims.groups[-2:]
        squares = g * g
        row = torch.lerp(row, mean(squares, columns), share)
        column = torch.lerp(column, mean(squares, rows), share)
        scale = mean(row, rows)
        estimate = row * column / torch.clamp(scale, min=least)
    u = g * torch.rsqrt(torch.clamp(estimate, min=least * least))
    return u, row, column, full


def clip_by_layer_rms(
    threshold: float, *, axes: Any, stack: Sequence[str] = STACK
) -> GradientTransformation:
    """Shrink the update of each layer so that its root mean square is at most a threshold.

    ``u / max(1, RMS(u) / threshold)`` (Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4).

    Args:
        threshold: the paper's d, above 0.
        axes: what the dims of the parameters are, as in `scale_by_factored_rms`.
        stack: names of the leading dims that only stack parameters.

    Raises:
        ValueError: `threshold` is out of range.
        TreeError: `axes` does not fit the parameters.

    >>> clip = clip_by_layer_rms(1.0, axes={"w": "layers embed"})
    >>> clip.update({"w": torch.tensor([[4.0, 4.0], [0.5, 0.5]])}, ())[0]
    {'w': tensor([[1.0000, 1.0000],
            [0.5000, 0.5000]])}
    """
    check_at_least_zero("clip_by_layer_rms", "threshold", threshold)
    if threshold == 0:
        raise ValueError(message("clip_by_layer_rms: threshold", "is 0.", fix="threshold=1.0"))

    def clip(grads: Any, params: Any) -> Any:
        dims = iter(all_dims("clip_by_layer_rms", axes, grads, stack=stack))

        def one(u: Tensor) -> Tensor:
            rms = torch.sqrt(mean_square(u, next(dims).layer))
            return u / torch.clamp(rms / threshold, min=1.0)

        return tree.map(one, widen(grads))

    return stateless(clip)


def scale_by_parameter_rms(
    *, axes: Any, least: float = 1e-3, stack: Sequence[str] = STACK
) -> GradientTransformation:
    """Multiply the update of each layer by the root mean square of the layer's parameter.

    ``u · max(least, RMS(p))`` (Shazeer & Stern 2018, arXiv:1804.04235, section 8).

    Args:
        axes: what the dims of the parameters are, as in `scale_by_factored_rms`.
        least: so that parameters that start at 0 can leave it; at least 0.
        stack: names of the leading dims that only stack parameters.

    Raises:
        ValueError: `least` is out of range, or `update` was given no `params`.
        TreeError: `axes` does not fit the parameters.

    >>> relative = scale_by_parameter_rms(axes={"w": "embed"})
    >>> relative.update({"w": torch.ones(2)}, (), {"w": torch.tensor([3.0, 3.0])})[0]
    {'w': tensor([3., 3.])}
    """
    check_at_least_zero("scale_by_parameter_rms", "least", least)

    def relative(grads: Any, params: Any) -> Any:
        if params is None:
            what, why = "is None.", "the update is scaled to the size of the parameters."
            fix = "optimizer.update(grads, state, params)"
            raise ValueError(message("scale_by_parameter_rms: params", what, why, fix=fix))
        dims = iter(all_dims("scale_by_parameter_rms", axes, params, stack=stack))

        def one(u: Tensor, p: Tensor) -> Tensor:
            rms = torch.sqrt(mean_square(p.to(u.dtype), next(dims).layer))
            return u * torch.clamp(rms, min=least)

        return tree.map(one, widen(grads), params)

    return stateless(relative)


def adafactor(
    learning_rate: float | Schedule = 1e-2,
    *,
    axes: Any,
    decay_rate: float = 0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    threshold: float = 1.0,
    weight_decay: float = 0.0,
    mask: Any = None,
    stack: Sequence[str] = STACK,
    fused: Sequence[Sequence[str]] = FUSED,
) -> GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235); equal to `torch.optim.Adafactor`.

    ``p = p − lr · weight_decay · p − max(eps₂, RMS(p)) · min(lr, 1/√t) · u / max(1, RMS(u)/threshold)``
    with u of `scale_by_factored_rms`, layer by layer. For a matrix of n × m it keeps n + m numbers.

    Args:
        learning_rate: a number or a schedule; relative to the size of the parameters.
        axes: a tree like the parameters whose leaves are strings of dim names; ``None`` where nothing
            is stacked.
        decay_rate: how fast the average of squares grows long, at least 0.
        eps: the least root of that average (``None``: the rounding unit of the dtype computed with),
            and the least size of a parameter.
        threshold: the largest root mean square of a layer's update, above 0.
        weight_decay: at least 0, scaled by the learning rate.
        mask: which leaves decay, as in `adamw`.
        stack: names of the leading dims that only stack parameters.
        fused: runs of names that are one dim of the layer.

    Raises:
        ValueError: an argument is out of range.
        TreeError: `axes` or `mask` does not fit the parameters.

    >>> optimizer = adafactor(axes={"w": "embed"})
    >>> params = {"w": torch.ones(2)}
    >>> optimizer.update({"w": torch.tensor([5.0, -5.0])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.0100,  0.0100])}
    """
    if not callable(learning_rate):
        check_at_least_zero("adafactor", "learning_rate", learning_rate)

    def rate(count: Tensor) -> Tensor:
        asked = value_at(learning_rate, count)
        return torch.minimum(asked, torch.rsqrt(count.to(torch.float64) + 1))

    parts = [
        scale_by_factored_rms(
            axes=axes, decay_rate=decay_rate, eps=eps[0], stack=stack, fused=fused
        ),
        clip_by_layer_rms(threshold, axes=axes, stack=stack),
        scale_by_parameter_rms(axes=axes, least=eps[1], stack=stack),
        scale_by_learning_rate(rate),
    ]
    check_at_least_zero("adafactor", "weight_decay", weight_decay)
    if weight_decay:
        decay = _decay(learning_rate, weight_decay)
        parts.append(decay if mask is None else masked(decay, mask))
    return chain(*parts)


def _decay(learning_rate: float | Schedule, weight_decay: float) -> GradientTransformation:
    """Subtract ``lr · weight_decay · p`` from a finished update."""

    def init(params: Any) -> ScaleByLearningRateState:
        zero = zero_scalar(params, torch.float64)
        return ScaleByLearningRateState(zero_scalar(params, torch.int64), zero)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rate = value_at(learning_rate, state.count)
        share = rate * -weight_decay
        updates = tree.map(lambda u, p: (u + p.to(u.dtype) * share).to(u.dtype), grads, params)
        return updates, ScaleByLearningRateState(state.count + 1, rate)

    return GradientTransformation(init, update)
