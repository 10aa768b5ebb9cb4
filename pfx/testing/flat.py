"""A function of pytrees as one from a list of float tensors to a list of float tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import tree
from pfx.api import ShapeDtype, device_get
from pfx.array import Array
from pfx.compiler.signature import arg_name
from pfx.errors import TraceError, message
from pfx.testing.compare import FLOOR, failure, is_float, size

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Flat:
    """`call` maps the float leaves of the arguments, the others held fixed, to the float results."""

    call: Callable[..., Tensors]
    at: Tensors
    names: tuple[str, ...]
    outs: Tensors
    out_names: tuple[str, ...]


def flat_function(
    where: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    dtype: torch.dtype | None,
    generator: torch.Generator,
) -> Flat:
    """Flatten `fn`; `ShapeDtype` leaves are drawn, and float leaves are cast to `dtype`'s width."""
    pairs, treedef = tree.flatten_with_path(tuple(args))
    leaves = [_value(leaf, dtype, generator) for _, leaf in pairs]
    active = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    out_names: list[str] = []

    def call(*xs: torch.Tensor) -> Tensors:
        given = list(leaves)
        for i, x in zip(active, xs, strict=True):
            given[i] = x
        result = fn(*tree.unflatten(treedef, given))
        outs = [(path, _plain(leaf)) for path, leaf in tree.flatten_with_path(result)[0]]
        outs = [(path, leaf) for path, leaf in outs if is_float(leaf)]
        out_names[:] = [tree.path_string(path, "output") for path, _ in outs]
        return tuple(leaf for _, leaf in outs)

    at = tuple(leaves[i] for i in active)
    outs = call(*at)
    if not at or not outs:
        missing = "argument" if not at else "result"
        raise TraceError(message(where, f"needs a float tensor as {missing}."))
    names = tuple(arg_name(fn, pairs[i][0]) for i in active)
    return Flat(call, at, names, outs, tuple(out_names))


def draw_like(xs: Sequence[torch.Tensor], generator: torch.Generator) -> Tensors:
    """Normal draws in the form of each tensor."""
    return tuple(random_like(x, generator) for x in xs)


def random_like(x: Any, generator: torch.Generator) -> torch.Tensor:
    """Normal draws in the form of a tensor, an Array or a `ShapeDtype`."""
    device = getattr(x, "device", "cpu")
    return torch.randn(tuple(x.shape), generator=generator, dtype=x.dtype).to(device)


def inner(left: Sequence[Any], right: Sequence[Any]) -> torch.Tensor:
    """The real inner product of two lists of tensors; None counts nothing.

    >>> inner([torch.ones(3), None], [torch.full((3,), 2.0), torch.ones(1)])
    tensor(6.)
    """
    pairs = zip(left, right, strict=True)
    parts = [(a.conj() * b).sum() for a, b in pairs if a is not None and b is not None]
    return torch.as_tensor(sum(part.real if part.is_complex() else part for part in parts))


def push_forward(call: Callable[..., Tensors], at: Tensors, along: Tensors) -> Tensors:
    """The derivative of `call` at one point in one direction, by forward mode."""
    # The first use of forward mode in a process makes torch warn of its own torch.jit.script.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = torch.ones(())
        torch.func.jvp(torch.clone, (one,), (one,))
    return torch.func.jvp(call, at, along)[1]


def magnitude(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """What an inner product would be if nothing cancelled: the scale of its rounding."""
    return float(inner([x.abs() for x in left], [x.abs() for x in right]))


def assert_agree(
    where: str, what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor],
    names: Sequence[str], rtol: float, least: float = 0.0,
) -> None:  # fmt: skip
    """Assert that two lists of tensors are equal to `rtol` of their scale, and at least `least`."""
    least = max([FLOOR * size(x) for x in expected] + [least])
    for got, want, name in zip(found, expected, names, strict=True):
        if got.shape != want.shape:
            shapes = f"{tuple(got.shape)} is not {tuple(want.shape)}"
            raise failure(where, f"{what}: {name} has another shape.", shapes)
        gap = torch.where(got == want, 0.0, (got - want).abs())
        scale = max(size(want), least)
        if gap.numel() and not float(gap.max()) <= rtol * scale:
            at = tuple(
                int(i) for i in torch.unravel_index(gap.nan_to_num(torch.inf).argmax(), gap.shape)
            )
            place = f"at index {at}: " if at else ""
            raise failure(
                where,
                f"{what}: {name} is wrong.",
                f"{place}{got[at].item()!r}, and it should be {want[at].item()!r}.",
                f"largest difference {float(gap.max()):.3g}; "
                f"allowed {rtol * scale:.3g}, {rtol:.3g} of the scale.",
            )


def _value(leaf: Any, dtype: torch.dtype | None, generator: torch.Generator) -> Any:
    if isinstance(leaf, ShapeDtype):
        leaf = (
            random_like(leaf, generator)
            if is_float(leaf)
            else torch.zeros(leaf.shape, dtype=leaf.dtype)
        )
    leaf = _plain(leaf)
    if dtype is None or not is_float(leaf):
        return leaf
    return leaf.detach().to(dtype.to_complex() if leaf.is_complex() else dtype)


def _plain(leaf: Any) -> Any:
    return device_get(leaf) if isinstance(leaf, Array) else leaf
