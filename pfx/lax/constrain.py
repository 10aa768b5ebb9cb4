"""`constrain`: say where a value lives; its cotangent lives there too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import tree
from pfx.errors import ShardingError, message, user_line
from pfx.lax.linear import apply
from pfx.lax.region import current_region
from pfx.lax.vmap import spmd_axis
from pfx.meta import TensorMeta
from pfx.spec import P, spec_leaves

Spec = P | str


@dataclass(frozen=True)
class Constraint:
    """The identity, as a node that carries a spec: a `P`, or logical dim names in one string."""

    spec: Spec
    grad_spec: Spec

    __name__ = "constrain"
    recompute = True  # never saved for the backward part: a gathered weight is gathered again

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (apply(self, x),)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The identity."""
        return (x.view_as(x),)

    def result_variances(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """That of the operand."""
        return tuple(operands)

    def transposed(self) -> Constraint:
        """The constraint of the cotangent."""
        return Constraint(self.grad_spec, self.spec)

    def out_meta(self, x: torch.Tensor) -> TensorMeta:
        """The form of the operand."""
        return TensorMeta.of(x)

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """The operand as it is."""
        return x

    def pushed(self) -> Constraint:
        """The constraint of the tangent."""
        return self

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        """The constraint of a value with one more leading dim: whole, or split as a vmap says."""
        axis = spmd_axis()
        return apply(Constraint(_lead(self.spec, axis), _lead(self.grad_spec, axis)), x)

    def sliced(self) -> Constraint | None:
        """The constraint of one slice along dim 0, or None if dim 0 is split."""
        specs = _unlead(self.spec), _unlead(self.grad_spec)
        if specs[0] is None or specs[1] is None:
            return None
        return Constraint(specs[0], specs[1])


def _lead(spec: Spec, axis: str | None) -> Spec:
    if isinstance(spec, str):
        return f"_ {spec}"
    return spec.with_dims(axis, *spec)


def _unlead(spec: Spec) -> Spec | None:
    if isinstance(spec, str):
        return spec.split(" ", 1)[1] if " " in spec else ""
    return None if spec and spec[0] else spec.with_dims(*spec[1:])


def constrain(x: Any, spec: Any, *, grad_spec: Any = None) -> Any:
    """Fix the layout of a value inside a `jit`-ted function; the identity on one device.

    Args:
        x: a tensor, or a pytree of tensors with a matching tree (or one prefix) of specs.
        spec: a `P`, or the logical names of the dims in one string, ``"batch seq embed"``, which
            the plan maps to mesh axes. Dims the spec does not split are whole.
        grad_spec: where the cotangent lives; the same place by default. A different one is how
            ZeRO says "gather this parameter here, and scatter its gradient".

    Raises:
        ShardingError: when a string names more or fewer dims than `x` has.

    >>> constrain(torch.ones(2, 3), P("dp")).shape
    torch.Size([2, 3])
    """
    leaves, treedef = tree.flatten(x)
    where = f"constrain at {user_line()}:"
    specs = spec_leaves(spec, x, f"{where} the specs", "x")
    grads = spec_leaves(grad_spec, x, f"{where} the grad specs", "x")
    out = []
    for leaf, one, grad in zip(leaves, specs, grads, strict=True):
        _check_rank(leaf, one)
        _check_free(one, where)
        if grad is None:
            grad = one.dual if isinstance(one, P) else one
        constraint = Constraint(one, grad)
        out.append(apply(constraint, leaf))
    return tree.unflatten(treedef, out)


def _check_free(spec: Spec, where: str) -> None:
    """Refuse to place a value along an axis whose devices each have their own."""
    region = current_region()
    named = () if region is None or isinstance(spec, str) else spec.axes
    for axis in named:
        if region is not None and axis in region.axes:
            raise ShardingError(
                message(
                    f"{where} {spec}",
                    f"names the axis {axis!r}, which the enclosing shard_map has taken.",
                    "inside, shapes are those of one device, and collectives are written by hand.",
                    fix=f"leave {axis!r} out, or out of axis_names of the shard_map",
                )
            )


def _check_rank(x: torch.Tensor, spec: Spec) -> None:
    names = spec.split() if isinstance(spec, str) else spec
    exact = isinstance(spec, str)
    if len(names) > x.ndim or (exact and len(names) != x.ndim):
        shown = repr(spec)
        raise ShardingError(
            message(
                "constrain:",
                f"{shown} names {len(names)} dims, the value has {x.ndim}.",
                f"shape: {tuple(x.shape)}",
                fix="give one entry per dim",
            )
        )
