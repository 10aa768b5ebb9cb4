"""torch's operator database as cases: pure functions of tensors, with sizes that meshes divide."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import pkgutil
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.testing._internal.common_methods_invocations as database
import torch.testing._internal.opinfo.definitions as definitions
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

EVERYTHING = os.environ.get("PFX_OP_DB") == "all"  # a sweep of minutes rather than seconds
# The database's size constants are odd (5, 3); these divide by 2 and mostly by 4.
_SIZES = {"XS": 2, "S": 4, "M": 8, "L": 12}

# What no compiler of pure functions of known shape can run: what draws from a global generator, and
# what has a shape, or takes a branch, by value.
RANDOM = frozenset(
    [
        "bernoulli",
        "multinomial",
        "nn.functional.alpha_dropout",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.feature_alpha_dropout",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "nn.functional.rrelu",
        "normal",
        "pca_lowrank",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "svd_lowrank",
    ]
)
UNTRACEABLE = RANDOM | frozenset(
    [
        "_batch_norm_with_update",
        "_native_batch_norm_legit",  # these write the running statistics they are given
        "native_batch_norm",
        "nn.functional.batch_norm",
        "allclose",
        "argwhere",
        "bincount",
        "cauchy",
        "combinations",
        "corrcoef",
        "cov",
        "equal",
        "exponential",
        "geometric",
        "istft",
        "item",
        "linalg.lstsq",
        "log_normal",
        "masked_select",
        "nn.functional.ctc_loss",
        "nn.functional.gaussian_nll_loss",
        "nonzero",
        "resize_",
        "resize_as_",
        "tensor_split",
        "uniform",
        "unique",
        "unique_consecutive",
    ]
)
# What says nothing about a rule: uninitialized memory, sparse results, no tensors, kernels that need
# CUDA, a dtype without comparison, and two whose samples read out of bounds at other sizes.
LEFT_OUT = frozenset(
    [
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "to_sparse",
        "sparse.mm",
        "sparse.sampled_addmm",
        "jiterator_2inputs_2outputs",
        "jiterator_4inputs_with_extra_args",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
        "jiterator_unary",
        "torch._scaled_mm",
        "torch._scaled_mm_v2",
        "torch.ops.aten._efficient_attention_forward",
        "torch.ops.aten._flash_attention_forward",
        "chalf",
        "_segment_reduce",
        "ormqr",
        "broadcast_shapes",
    ]
)


@dataclass(frozen=True)
class Case:
    """One sample: ``fn(*tensors) -> list of tensors``, and what to print of it."""

    name: str
    fn: Callable[..., list[torch.Tensor]]
    tensors: list[torch.Tensor]
    differentiable: bool

    def __str__(self) -> str:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in self.tensors)
        return f"{self.name}({shapes})"

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The (tensor, dim) pairs that two devices can split."""
        return [
            (i, d)
            for i, tensor in enumerate(self.tensors)
            for d, n in enumerate(tensor.shape)
            if n and n % 2 == 0
        ]

    def size(self, slot: tuple[int, int]) -> int:
        """The size of one dim."""
        return self.tensors[slot[0]].shape[slot[1]]

    def with_gradient(self) -> Callable[..., list[torch.Tensor]]:
        """The function followed by the gradient of a fixed random projection of its results."""
        if not self.differentiable:
            return self.fn
        outs = self.fn(*[t.clone() for t in self.tensors])
        random_ = torch.Generator().manual_seed(1)
        weights = [
            torch.randn(o.shape, dtype=o.dtype, generator=random_)
            if o.is_floating_point()
            else None
            for o in outs
        ]
        floats = tuple(i for i, t in enumerate(self.tensors) if t.is_floating_point())
        if not floats or all(w is None for w in weights):
            return self.fn

        def loss(*tensors: torch.Tensor) -> torch.Tensor:
            pairs = zip(self.fn(*tensors), weights, strict=True)
            return torch.stack([(out * w).sum() for out, w in pairs if w is not None]).sum()

        def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [*self.fn(*tensors), *torch.func.grad(loss, argnums=floats)(*tensors)]

        return both


@functools.cache
def operators() -> dict[str, list[Any]]:
    """The database by name; several variants share one."""
    found: dict[str, list[Any]] = {}
    for op in database.op_db:
        if op.name not in LEFT_OUT:
            found.setdefault(op.name, []).append(op)
    return found


@functools.cache
def _sample_modules() -> tuple[Any, ...]:
    names = [f"{definitions.__name__}.{m.name}" for m in pkgutil.iter_modules(definitions.__path__)]
    return database, *map(importlib.import_module, names)


@contextlib.contextmanager
def _even_sizes() -> Iterator[None]:
    """Replace the database's size constants for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for module, (name, size) in itertools.product(_sample_modules(), _SIZES.items()):
            if hasattr(module, name):
                patch.setattr(module, name, size)
        yield


def cases(name: str, limit: int, *, ints: int = 0) -> Iterator[Case]:
    """The same cases every time, for each variant of an op: floats, and `ints` of integers.

    An op without floats comes with `limit` cases of complex numbers, or else of integers or bools.
    """
    for op in operators()[name]:
        kinds = (torch.float64, torch.complex128, torch.int64, torch.bool)
        main = next(dtype for dtype in kinds if dtype in op.dtypes)
        yield from _cases_of(op, main, limit)
        others = (torch.int64, torch.bool) if EVERYTHING else (torch.int64,) * (ints > 0)
        for dtype in others:
            if dtype in op.dtypes and dtype is not main:
                yield from _cases_of(op, dtype, limit if EVERYTHING else ints)


def _cases_of(op: Any, dtype: torch.dtype, limit: int) -> Iterator[Case]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = []
    most = 200 if EVERYTHING else 25
    with _even_sizes(), contextlib.suppress(RuntimeError, IndexError, ValueError):
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), most):
            found.append(_case(op, sample))  # until one was made for the constants replaced here
    yield from itertools.islice(filter(_runs, _spread(found)), limit)


def _spread(found: list[Case]) -> Iterator[Case]:
    """All cases: the one with most to split, then the others by halves and quarters."""
    order = sorted(range(len(found)), key=lambda i: -len(found[i].slots))[:1]
    step = len(found)
    while step:
        order += range(step // 2, len(found), step)
        step //= 2
    yield from (found[i] for i in dict.fromkeys(order))


def _case(op: Any, sample: Any) -> Case:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            full[i] = tensor
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        out = op.op(first, *args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]

    tensors = [leaves[i] for i in places]
    floating = any(t.is_floating_point() for t in tensors)
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    return Case(name, fn, tensors, floating and op.supports_autograd)


def _runs(case: Case) -> bool:
    """Tell whether torch runs the sample at the new sizes, purely, and without reading a value."""
    clones = [t.clone() for t in case.tensors]
    try:
        case.fn(*clones)
        with FakeTensorMode() as mode:
            case.fn(*[mode.from_tensor(t) for t in case.tensors])
    except (RuntimeError, IndexError, ValueError, DataDependentOutputException):
        return False
    pairs = zip(clones, case.tensors, strict=True)
    return not any(a._version or difference(a, b) for a, b in pairs)  # batch norms do not say so


def difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with a value; empty if it equals the wanted one to rounding."""
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, not {want.dtype}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(got, want) else "other values"
    rounding = 1e3 * torch.finfo(want.dtype).eps if want.dtype.itemsize < 4 else 1e-4
    tolerance = 1e-9 if want.dtype in (torch.float64, torch.complex128) else min(rounding, 0.1)
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"values off by {(got - want).abs().max().item():.3g}"
