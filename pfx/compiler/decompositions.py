"""Composite ops in terms of simpler ones whose partial results combine rightly.

A mean over a split dim divides by the global count, a variance is taken about the global mean, and a
logsumexp is shifted by the global maximum. Sums of 16-bit floats run in float32, as torch's do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from pfx import _torch

aten = torch.ops.aten

_TORCH_DECOMPOSED = (
    aten._log_softmax, aten._log_softmax_backward_data, aten.nll_loss_forward,
    aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.huber_loss, aten.huber_loss_backward, aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
    aten.addr, aten.glu, aten.glu_backward, aten.rot90, aten.norm, aten.count_nonzero, aten.nansum,
    aten.eye, aten.trace, aten.native_batch_norm, aten.native_batch_norm_backward,
    aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training, aten.block_diag, aten.channel_shuffle,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.diag_embed, aten.take, aten.renorm,
    aten.log_sigmoid_forward, aten.diagonal_backward,
)  # fmt: skip
_COPIES = ("alias", "expand", "permute", "transpose", "t", "view", "squeeze", "unsqueeze", "select",
           "slice", "diagonal", "unbind", "split_with_sizes", "split", "unfold", "detach", "as_strided",
           "view_as_real", "view_as_complex", "narrow")  # fmt: skip


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or dim == [] or not x.ndim:
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The value in the dtype that sums of it run in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    wide = _wide(x if dtype is None else x.to(dtype))
    total = torch.sum(wide, dims, keepdim) if dims else wide
    return (total / count).to(x.dtype if dtype is None else dtype)


def _var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    if x.is_complex():
        parts = torch.view_as_real(x).unbind(-1)
        return sum(_var(part, dim, correction=correction, keepdim=keepdim) for part in parts)
    dims, wide = _dims(x, dim), _wide(x)
    count = math.prod(x.shape[d] for d in dims)
    spread = wide - _mean(wide, dims, True)
    freedom = count - (1 if correction is None else correction)
    total = torch.sum(spread * spread, dims, keepdim)
    return (total / max(freedom, 0)).to(x.dtype)


def _unbiased(
    x: torch.Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Any:
    """The older signature of var and std: ``(x, unbiased)`` or ``(x, dim, unbiased, keepdim)``."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return _var(x, dim, correction=int(unbiased), keepdim=keepdim)


def _var_mean(x: torch.Tensor, dim: Any = None, **options: Any) -> Any:
    return _var(x, dim, **options), _mean(x, dim, options.get("keepdim", False))


def _std_mean(x: torch.Tensor, dim: Any = None, **options: Any) -> Any:
    var, mean = _var_mean(x, dim, **options)
    return torch.sqrt(var), mean


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims = _dims(x, dim)
    top = torch.amax(x.real if x.is_complex() else x, dims, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0)
    out = torch.log(torch.sum(torch.exp(x - top), dims, keepdim=True)) + top
    return out if keepdim else torch.squeeze(out, dims)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    x = torch.abs(x if dtype is None else x.to(dtype))
    dims = _dims(x, dim)
    if ord == math.inf:
        return torch.amax(x, dims, keepdim)
    if ord == -math.inf:
        return torch.amin(x, dims, keepdim)
    wide = _wide(x)
    if ord == 0:
        out = torch.sum((wide != 0).to(wide.dtype), dims, keepdim)
    elif ord == 2:
        out = torch.sqrt(torch.sum(wide * wide, dims, keepdim))
    else:
        out = torch.pow(torch.sum(torch.pow(wide, ord), dims, keepdim), 1 / ord)
    return out.to(x.dtype)


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    exact = x.is_floating_point() or x.is_complex()
    return x if factor == 1 else x * (factor if exact else int(factor))


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    product = _scaled(a @ b, alpha)
    if beta == 0:  # then a NaN in the bias does not count
        return product + torch.zeros_like(bias)
    return product + _scaled(bias, beta)


def _addbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    m, n = a.shape[1], b.shape[2]
    return _addmm(bias, a.transpose(0, 1).reshape(m, -1), b.reshape(-1, n), beta=beta, alpha=alpha)


def _repeat(x: torch.Tensor, repeats: Any) -> torch.Tensor:
    shape = (1,) * (len(repeats) - x.ndim) + tuple(x.shape)
    spread = [size for n, size in zip(repeats, shape, strict=True) for size in (n, size)]
    lead = x.reshape([size for n in shape for size in (1, n)])
    return lead.expand(spread).reshape([n * size for n, size in zip(repeats, shape, strict=True)])


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return source.to(into.dtype).expand(into.shape)


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.mean: _mean,
    aten.var.correction: _var,
    aten.var: _unbiased,
    aten.std.correction: lambda *a, **k: torch.sqrt(_var(*a, **k)),
    aten.std: lambda *a, **k: torch.sqrt(_unbiased(*a, **k)),
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.logsumexp: _logsumexp,
    aten.linalg_vector_norm: _vector_norm,
    aten.addmm: _addmm,
    aten.addmv: _addmm,
    aten.baddbmm: _addmm,
    aten.addbmm: _addbmm,
    aten.repeat: _repeat,
    aten.copy: _copy,
    aten.dist: lambda x, y, p=2: _vector_norm(x - y, p),
    **{getattr(aten, f"{name}_copy"): getattr(aten, name) for name in _COPIES},
}


@functools.lru_cache(maxsize=1)
def _torch_decompositions() -> dict[Any, Callable[..., Any]]:
    return _torch.decompositions(_TORCH_DECOMPOSED)


def decomposition_of(target: Any) -> Callable[..., Any] | None:
    """The function that an op is replaced by, or None if the op stays."""
    if getattr(target, "inlined", False):  # a primitive that is what it computes
        return target.compute
    packet = getattr(target, "overloadpacket", None)
    own = _DECOMPOSED.get(target) or _DECOMPOSED.get(packet)
    return own or (_torch_decompositions().get(target) if packet in _TORCH_DECOMPOSED else None)
