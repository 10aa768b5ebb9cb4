"""Transforms as a table, and what they mean inside a manual region, said densely.

The dense form of a value in a region is the stack of what the devices hold: its first dims are the
mesh's, of size 1 along the axes over which the value does not vary. Broadcasting then casts it as a
region does, and its transpose sums as a region does. A transform that all devices call together takes
all their tangents, or all their cotangents, at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import pfx

Fn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Whole:
    """pfx's transforms, of a function of one tensor."""

    lead = 0

    grad = staticmethod(pfx.grad)
    value_and_grad = staticmethod(pfx.value_and_grad)
    vjp = staticmethod(pfx.vjp)
    jvp = staticmethod(pfx.jvp)
    vmap = staticmethod(pfx.vmap)
    jacrev = staticmethod(pfx.jacrev)
    jacfwd = staticmethod(pfx.jacfwd)
    hessian = staticmethod(pfx.hessian)

    def at(self, dim: int) -> int:
        """Where a dim of one device's value is."""
        return dim if dim < 0 else dim + self.lead

    def total(self, y: torch.Tensor) -> torch.Tensor:
        """One device's sum."""
        return y.reshape(*y.shape[: self.lead], -1).sum(-1)

    def times(self, scalar: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One device's number times its value."""
        return scalar.reshape(*scalar.shape, *(1,) * (y.ndim - self.lead)) * y

    def batch(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Two values like x along a new dim."""
        return torch.stack([x, 0.5 - x], self.at(dim))


@dataclass(frozen=True)
class Stacked(Whole):
    """The same, of a function that all devices of a mesh with two axes call together."""

    lead = 2

    def grad(self, f: Fn) -> Fn:
        return lambda x: self.value_and_grad(f)(x)[1]

    def value_and_grad(self, f: Fn) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, pull = torch.func.vjp(f, x)
            return y, pull(torch.ones_like(y))[0]

        return both

    def vmap(self, f: Fn, in_dims: int, out_dims: int) -> Fn:
        return torch.func.vmap(f, self.at(in_dims), self.at(out_dims))

    def basis(self, x: torch.Tensor) -> torch.Tensor:
        """For each element of a device's value: one there, zero elsewhere, on all devices."""
        own = x.shape[self.lead :]
        eye = torch.eye(own.numel(), dtype=x.dtype).reshape(-1, *(1,) * self.lead, *own)
        return eye.expand(-1, *x.shape)

    def jacrev(self, f: Fn) -> Fn:
        def jacobian(x: torch.Tensor) -> torch.Tensor:
            y, pull = torch.func.vjp(f, x)
            rows = torch.func.vmap(lambda c: pull(c)[0])(self.basis(y)).movedim(0, self.lead)
            mesh, own = x.shape[: self.lead], x.shape[self.lead :]
            return rows.reshape(*mesh, *y.shape[self.lead :], *own)

        return jacobian

    def jacfwd(self, f: Fn) -> Fn:
        def jacobian(x: torch.Tensor) -> torch.Tensor:
            push = lambda t: torch.func.jvp(f, (x,), (t,))[1]
            columns = torch.func.vmap(push)(self.basis(x)).movedim(0, -1)
            return columns.unflatten(-1, x.shape[self.lead :])

        return jacobian

    def hessian(self, f: Fn) -> Fn:
        return self.jacfwd(self.jacrev(f))


Ways = Whole
Transform = Callable[[Ways, Fn], Fn]


def _scalar(t: Ways, f: Fn) -> Fn:
    return lambda x: t.total(f(x))


def _value_times_grad(t: Ways, f: Fn) -> Fn:
    return lambda x: t.times(*t.value_and_grad(_scalar(t, f))(x))


def _vjp(t: Ways, f: Fn) -> Fn:
    def pulled(x: torch.Tensor) -> torch.Tensor:
        y, pull = t.vjp(f, x)
        return pull(torch.cos(y))[0]

    return pulled


def _vmap(in_dim: int, out_dim: int) -> Transform:
    return lambda t, f: lambda x: t.vmap(f, in_dim, out_dim)(t.batch(x, in_dim))


# Each takes a function of a tensor to one; cotangents and tangents depend on the value, too.
SINGLE: Mapping[str, Transform] = {
    "grad": lambda t, f: t.grad(_scalar(t, f)),
    "value_and_grad": _value_times_grad,
    "vjp": _vjp,
    "jvp": lambda t, f: lambda x: t.jvp(f, (x,), (torch.cos(x),))[1],
    "vmap": _vmap(0, 0),
    "vmap 1 to -1": _vmap(1, -1),
    "vmap -1 to 1": _vmap(-1, 1),
    "jacrev": lambda t, f: t.jacrev(f),
    "jacfwd": lambda t, f: t.jacfwd(f),
    "hessian": lambda t, f: t.hessian(_scalar(t, f)),
}


def _after(outer: str, inner: str) -> Transform:
    return lambda t, f: SINGLE[outer](t, SINGLE[inner](t, f))


_PAIRED = ("grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd")
PAIRS: Mapping[str, Transform] = {
    f"{outer} of {inner}": _after(outer, inner)
    for outer, inner in itertools.product(_PAIRED, _PAIRED)
} | {
    "vmap of hessian": _after("vmap", "hessian"),
    "grad of value_and_grad": _after("grad", "value_and_grad"),
}
