"""Muon: momentum whose singular values are all made one, for the matrices of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import TreeError, message
from pfx.lax import constrain
from pfx.optim.alias import adamw
from pfx.optim.base import GradientTransformation, chain, check_at_least_zero, widen
from pfx.optim.decay import decay_mask, role_mask
from pfx.optim.dims import FUSED, Dims, all_dims, dims_of
from pfx.optim.groups import partition
from pfx.optim.schedules import Schedule
from pfx.optim.transforms import add_decayed_weights, scale_by_learning_rate, zero_moments

Adjust = Literal["original", "match_rms_adamw"]
Outputs = Literal["first", "last"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STACK = ("layers", "experts")
APART = ("qkv",)
ELSEWHERE = ("vocab", "positions")


class ScaleByMuonState(NamedTuple):
    """The average of the gradient."""

    mu: Any


def orthogonalize(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> Tensor:
    """Move the singular values of matrices to about 1, by Newton-Schulz iterations.

    From ``X = x / max(‖x‖, eps)``, on the side where it is wide (Jordan et al. 2024, "Muon")::

        A = X Xᵀ        X = a X + (b A + c A²) X

    With the usual coefficients singular values end at about 0.7 to 1.2, in five steps.

    Args:
        x: matrices in the last two dims, one or a batch (1 dim) of them.
        steps: how many iterations, at least 0.
        coefficients: a, b and c.
        eps: the least norm that is divided by.

    >>> orthogonalize(torch.diag(torch.tensor([3.0, 1.0]))).diagonal()
    tensor([0.7530, 1.1337])
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.sqrt(torch.sum(x * x, (-2, -1), keepdim=True))
    x = x / torch.clamp(norm, min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_by_muon(
    *,
    axes: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    adjust: Adjust = "original",
    outputs: Outputs = "last",
    dtype: torch.dtype | None = None,
    stack: Sequence[str] = STACK,
    apart: Sequence[str] = APART,
    fused: Sequence[Sequence[str]] = FUSED,
) -> GradientTransformation:
    """Orthogonalize the averaged gradient, matrix by matrix.

    From m = 0 (Jordan et al. 2024, "Muon"), in the form of `torch.optim.Muon`::

        m = momentum · m + (1 − momentum) · g
        u = adjust · orthogonalize(momentum · m + (1 − momentum) · g if nesterov else m)

    `adjust` is ``sqrt(max(1, outputs / inputs))`` ("original"), or ``0.2 · sqrt(max(outputs, inputs))``
    (Liu et al. 2025, arXiv:2502.16982, equation 4: the size of AdamW's updates, whose learning rate
    and weight decay then fit). A stack of layers is many matrices, heads and their dim are one dim of
    one, and q, k and v three: how parameters are stored changes no number.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names; ``None`` where all are
            plain matrices.
        momentum: decay of the average, in [0, 1).
        nesterov: look one step of momentum ahead.
        steps: Newton-Schulz iterations, at least 0.
        coefficients: of `orthogonalize`.
        eps: the least norm that is divided by.
        adjust: how far a matrix moves for its shape.
        outputs: which dim of a matrix counts what the layer returns: the last where a layer computes
            ``x @ W``, the first for the weights of `torch.nn.Linear`.
        dtype: to iterate in; ``None``: float32 (float64 for float64 leaves). torch takes bfloat16.
        stack: names of the leading dims that only count matrices.
        apart: names of dims that do so wherever they are.
        fused: runs of names that are one dim of a matrix.

    Raises:
        ValueError: an argument is out of range.
        TreeError: `axes` does not fit the parameters, or a leaf is no matrix.

    >>> muon = scale_by_muon(axes={"w": "embed mlp"}, steps=20, coefficients=(1.5, -0.5, 0.0))
    >>> grads = {"w": torch.diag(torch.tensor([3.0, -1.0]))}
    >>> muon.update(grads, muon.init(grads))[0]
    {'w': tensor([[ 1.,  0.],
            [ 0., -1.]])}
    """
    where = "scale_by_muon"
    check_at_least_zero(where, "momentum", momentum, below=1.0)
    check_at_least_zero(where, "steps", steps)
    check_at_least_zero(where, "eps", eps)
    for name, value, known in (("adjust", adjust, Adjust), ("outputs", outputs, Outputs)):
        if value not in get_args(known):
            fix = f"one of {list(get_args(known))}"
            raise ValueError(message(f"{where}: {name}", f"{value!r} is unknown.", fix=fix))

    def one(m: Tensor, g: Tensor, dims: Dims) -> Tensor:
        ahead = torch.lerp(g, m, momentum) if nesterov else m
        x = _matrices(_gathered(ahead, dims), dims)
        made = orthogonalize(
            x.to(dtype or m.dtype), steps=steps, coefficients=coefficients, eps=eps
        )
        size = _adjusted(adjust, *(x.shape[-2:] if outputs == "first" else x.shape[:-3:-1]))
        return _stored(made.to(m.dtype) * size, dims, m.shape)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        options = {"stack": stack, "apart": apart, "fused": fused}
        dims = all_dims(where, axes, grads, **options)
        _check_matrices(dims, grads)
        grads = tree.map(lambda m, g: g.to(m.dtype), state.mu, grads)
        mu = tree.map(lambda m, g: torch.lerp(m, g, 1 - momentum), state.mu, grads)
        each = iter(dims)
        updates = tree.map(lambda m, g: one(m, g, next(each)), mu, widen(grads))
        return updates, ScaleByMuonState(mu)

    return GradientTransformation(lambda params: ScaleByMuonState(zero_moments(params)), update)


def _check_matrices(dims: list[Dims], values: Any) -> None:
    for (path, x), found in zip(tree.flatten_with_path(values)[0], dims, strict=True):
        if len(found.groups) != 2:
            raise TreeError(
                message(
                    f"scale_by_muon: {tree.path_string(path, 'params')}",
                    f"is no matrix: {len(found.groups)} dims that are not stacked.",
                    f"shape: {tuple(x.shape)}",
                    fix="pfx.optim.muon(..., axes=axes), which gives the others to AdamW",
                )
            )


def _order(dims: Dims) -> tuple[int, ...]:
    return (*dims.stack, *dims.layer)


def _gathered(x: Tensor, dims: Dims) -> Tensor:
    """Bring the short side of split matrices together, once for all iterations.

    A product of X with itself sums over the long side, which may stay as its names say; devices that
    hold parts of the short side would need each other's in every product.
    """
    if not dims.names:
        return x
    sizes = [math.prod(x.shape[dim] for dim in group) for group in dims.groups]
    short = dims.groups[sizes[0] > sizes[1]]
    return constrain(x, " ".join("_" if i in short else n for i, n in enumerate(dims.names)))


def _matrices(x: Tensor, dims: Dims) -> Tensor:
    """See a stored parameter as one matrix, or as a batch of them."""
    shape = [x.shape[dim] for dim in _order(dims)]
    cuts = (0, len(dims.stack), len(dims.stack) + len(dims.groups[0]), len(shape))
    sizes = [math.prod(shape[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    return x.permute(_order(dims)).reshape(sizes if dims.stack else sizes[1:])


def _stored(x: Tensor, dims: Dims, shape: Sequence[int]) -> Tensor:
    """The inverse of `_matrices`."""
    order = _order(dims)
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.reshape([shape[dim] for dim in order]).permute(back)


def _adjusted(adjust: Adjust, outputs: int, inputs: int) -> float:
    if adjust == "original":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(outputs, inputs))


def matrix_mask(
    axes: Any,
    *,
    elsewhere: Sequence[str] = ELSEWHERE,
    stack: Sequence[str] = STACK,
    apart: Sequence[str] = APART,
    fused: Sequence[Sequence[str]] = FUSED,
) -> Any:
    """Mark the matrices between hidden dims: what Muon is for.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names.
        elsewhere: names of dims that make a leaf an embedding or an output, which is none.
        stack: names of the leading dims that only count matrices.
        apart: names of dims that do so wherever they are.
        fused: runs of names that are one dim of a matrix.

    Raises:
        TypeError: a leaf of `axes` is not a string; names the key path.

    >>> matrix_mask({"up": "layers embed mlp", "bias": "layers mlp", "table": "vocab embed"})
    {'bias': False, 'table': False, 'up': True}
    """

    def is_matrix(names: tuple[str, ...]) -> bool:
        groups = dims_of(names, stack=stack, apart=apart, fused=fused).groups
        return len(groups) == 2 and not set(names) & set(elsewhere)

    return role_mask(axes, is_matrix)


def muon(
    learning_rate: float | Schedule,
    *,
    axes: Any,
    others: GradientTransformation | None = None,
    weight_decay: float = 0.1,
    elsewhere: Sequence[str] = ELSEWHERE,
    stack: Sequence[str] = STACK,
    apart: Sequence[str] = APART,
    fused: Sequence[Sequence[str]] = FUSED,
    **options: Any,
) -> GradientTransformation:
    """Muon for the hidden matrices, AdamW for all else; equal to `torch.optim.Muon` on a matrix.

    ``p = p − lr · (adjust · orthogonalize(m) + weight_decay · p)`` (Jordan et al. 2024, "Muon"; Liu et
    al. 2025, arXiv:2502.16982); see `scale_by_muon`.

    Args:
        learning_rate: a number or a schedule, of the matrices.
        axes: a tree like the parameters whose leaves are strings of dim names.
        others: what embeddings, outputs, norms and biases get; ``None``: `adamw` with the same learning
            rate (which fits with ``adjust="match_rms_adamw"``) and weight decay, of matrices only.
        weight_decay: at least 0, scaled by the learning rate.
        elsewhere: names of dims that make a leaf an embedding or an output.
        stack: names of the leading dims that only count matrices.
        apart: names of dims that do so wherever they are.
        fused: runs of names that are one dim of a matrix.
        options: momentum, nesterov, steps, coefficients, eps, adjust, outputs, dtype, as in
            `scale_by_muon`.

    Raises:
        ValueError: an argument is out of range.
        TreeError: `axes` does not fit the parameters.
        TypeError: a leaf of `axes` is not a string.

    >>> optimizer = muon(0.1, axes={"w": "embed mlp", "b": "mlp"}, weight_decay=0.0)
    >>> params = {"w": torch.eye(2), "b": torch.zeros(2)}
    >>> grads = {"w": torch.diag(torch.tensor([3.0, 1.0])), "b": torch.ones(2)}
    >>> optimizer.update(grads, optimizer.init(params), params)[0]
    {'b': tensor([-0.1000, -0.1000]), 'w': tensor([[-0.0753, -0.0000],
            [-0.0000, -0.1134]])}
    """
    dims: dict[str, Any] = {"stack": stack, "apart": apart, "fused": fused}
    matrices = chain(
        scale_by_muon(axes=axes, **dims, **options),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    if others is None:
        decays = decay_mask(axes, stack=stack, fused=fused)
        others = adamw(learning_rate, weight_decay=weight_decay, mask=decays)
    mask = matrix_mask(axes, elsewhere=elsewhere, **dims)
    labels = tree.map(lambda flag: "matrices" if flag else "others", mask)
    used = set(tree.leaves(labels))
    groups = {"matrices": matrices, "others": others}
    return partition({name: groups[name] for name in groups if name in used}, labels)
