"""The protocol of every optimizer, and what combines and applies them.

A transformation is a pair of pure functions. `init` makes its state from the parameters; `update`
maps gradients to updates, which `apply_updates` **adds** to the parameters. Both are made of
out-of-place torch operations without a Python branch on a tensor's value, so they trace.

Precision is one rule: every transformation computes and returns float32 (float64 for float64
leaves) whatever the dtype of the gradients, and `apply_updates` rounds once, to the parameter's
dtype. Scalars such as the learning rate are 0-d float64 tensors, which widen no leaf that has dims;
`scaled` keeps the dtype of those that have none.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message


class UpdateFn(Protocol):
    """``update(grads, state, params) -> (updates, new_state)``.

    A transformation that needs the loss or its weight names them as keywords, ``loss=None``; one that
    wraps others takes ``**extra`` and hands them on with `update_with`.
    """

    def __call__(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Turn gradients into updates, trees like the parameters."""
        ...


class GradientTransformation(NamedTuple):
    """A pair of pure functions, ``init(params) -> state`` and ``update(grads, state, params)``.

    >>> from pfx import optim
    >>> flip = GradientTransformation(
    ...     init=lambda params: optim.EmptyState(),
    ...     update=lambda grads, state, params=None: (tree.map(torch.neg, grads), state),
    ... )
    >>> flip.update({"w": torch.ones(2)}, flip.init({"w": torch.ones(2)}))[0]
    {'w': tensor([-1., -1.])}
    """

    init: Callable[[Any], Any]
    update: UpdateFn


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def stateless(fn: Callable[[Any, Any], Any]) -> GradientTransformation:
    """Make a transformation of ``fn(grads, params) -> updates``.

    >>> stateless(lambda grads, params: grads).init({})
    EmptyState()
    """

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return fn(grads, params), state

    return GradientTransformation(lambda params: EmptyState(), update)


def identity() -> GradientTransformation:
    """Return the updates as they came.

    >>> identity().update({"w": 1.0}, EmptyState())
    ({'w': 1.0}, EmptyState())
    """
    return stateless(lambda grads, params: grads)


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """Apply transformations from left to right; the state is the tuple of their states.

    The law is ``update = t_n ∘ … ∘ t_1``: chaining is associative and `identity` is its unit.

    Args:
        transforms: what to apply, the one that sees the raw gradient first.

    >>> from pfx import optim
    >>> double_then_negate = chain(optim.scale(2.0), optim.scale(-1.0))
    >>> params = {"w": torch.zeros(2)}
    >>> double_then_negate.update({"w": torch.ones(2)}, double_then_negate.init(params))[0]
    {'w': tensor([-2., -2.])}
    """

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        new_states = []
        for transform, inner in zip(transforms, state, strict=True):
            grads, inner = update_with(transform, grads, inner, params, **extra)
            new_states.append(inner)
        return grads, tuple(new_states)

    return GradientTransformation(init, update)


def update_with(
    transform: GradientTransformation, grads: Any, state: Any, params: Any = None, **extra: Any
) -> tuple[Any, Any]:
    """Call ``transform.update`` with those of the keywords in `extra` that it takes.

    Args:
        transform: what to call.
        grads, state, params: as for `update`.
        extra: what a training step knows besides: ``loss``, the mean loss, and ``weight``, what it
            was divided by.

    >>> flip = stateless(lambda grads, params: tree.map(torch.neg, grads))
    >>> update_with(flip, {"w": torch.ones(1)}, EmptyState(), loss=torch.tensor(3.0))[0]
    {'w': tensor([-1.])}
    """
    update: Any = transform.update
    taken = inspect.signature(update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        extra = {name: value for name, value in extra.items() if name in taken}
    return update(grads, state, params, **extra)


@dataclass(frozen=True)
class NewValue:
    """A leaf of updates that is no difference but what the parameter becomes, rounded to its dtype.

    A difference cannot say every new value: ``p + (new − p)`` may round, and no number leads back from
    an infinity. It is a leaf, not a tree: what would scale it fails instead of scaling the parameter.
    """

    value: Tensor


def apply_updates(params: Any, updates: Any) -> Any:
    """Return ``params + updates``, each leaf rounded once to the parameter's dtype.

    Args:
        params: a tree of tensors.
        updates: a tree like `params`, with tensors or `NewValue` as leaves.

    Raises:
        TreeError: the trees differ; names the key path.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
    {'w': tensor([1.5000, 0.5000])}
    """

    def apply(p: Tensor, u: Any) -> Tensor:
        return (u.value if isinstance(u, NewValue) else p + u).to(p.dtype)

    return tree.map(apply, params, updates)


def updates_if(condition: Tensor, updates: Any, params: Any = None) -> Any:
    """Return the updates where a 0-d bool holds, else those that change no bit of a parameter.

    Args:
        condition: whether the update is made.
        updates: a tree with tensors or `NewValue` as leaves.
        params: the parameters; needed for `NewValue` only.

    >>> updates_if(torch.tensor(False), {"w": torch.ones(1)})
    {'w': tensor([-0.])}
    """

    def chosen(u: Any, p: Any) -> Any:
        if isinstance(u, NewValue):
            return NewValue(torch.where(condition, u.value, p.to(u.value.dtype)))
        return torch.where(
            condition, u, -0.0
        )  # −0 + −0 is −0: adding 0 would flip the sign of a zero

    return tree.map(chosen, updates, updates if params is None else params)


def global_norm(values: Any) -> Tensor:
    """Return ``sqrt(sum over leaves of sum(x²))``, a 0-d tensor; an empty tree gives 0.

    Squares are summed in float32, or float64 where a leaf is float64. Each leaf contributes one
    sum, so a compiler may keep the sums of sharded leaves partial and reduce one number.

    Args:
        values: a tree of floating-point tensors.

    Raises:
        TypeError: a leaf is not real floating point; names the key path.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    # All squares first, then their sum: the reductions of sharded leaves can travel together.
    squares = [torch.sum(leaf * leaf) for leaf in tree.leaves(widen(values))]
    return torch.sqrt(functools.reduce(torch.add, squares)) if squares else torch.zeros(())


def wide_dtype(x: Tensor, path: tree.Path = ()) -> torch.dtype:
    """Return the dtype to compute with for a leaf: float64 for float64, else float32.

    >>> wide_dtype(torch.ones(1, dtype=torch.bfloat16))
    torch.float32
    """
    if not x.dtype.is_floating_point:
        raise TypeError(
            message(
                f"optim: leaf {tree.path_string(path)}".rstrip(),
                f"has dtype {x.dtype}.",
                "parameters, gradients and moments must be real floating-point tensors.",
                fix="keep this leaf out of the parameters",
            )
        )
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(values: Any) -> Any:
    """Return the leaves in the dtype to compute with; no operation where they have it already.

    Raises:
        TypeError: a leaf is not real floating point; names the key path.

    >>> widen({"w": torch.ones(1, dtype=torch.float16)})
    {'w': tensor([1.])}
    """
    return tree.map_with_path(lambda path, x: x.to(wide_dtype(x, path)), values)


def scaled(values: Any, factor: Tensor) -> Any:
    """Multiply widened leaves by a 0-d tensor.

    >>> scaled({"w": torch.ones(2)}, torch.tensor(0.5, dtype=torch.float64))
    {'w': tensor([0.5000, 0.5000])}
    """
    # Two 0-d tensors would promote; for all other leaves the cast is no operation.
    return tree.map(lambda x: (x * factor).to(x.dtype), widen(values))


def zero_scalar(params: Any, dtype: torch.dtype) -> Tensor:
    """Return a 0-d zero on the device of the first leaf.

    >>> zero_scalar({"w": torch.ones(2)}, torch.int64)
    tensor(0)
    """
    first = next(iter(tree.leaves(params)), None)
    return torch.zeros((), dtype=dtype, device=None if first is None else first.device)


def find_state(state: Any, *kinds: type) -> Any:
    """Return the first state of one of the given kinds, outermost first; ``None`` without one.

    >>> find_state((EmptyState(), {"a": [3.0]}), float, EmptyState)
    EmptyState()
    """
    if isinstance(state, kinds):
        return state
    if isinstance(state, dict):
        state = tuple(state.values())
    if not isinstance(state, (tuple, list)):
        return None
    found = (find_state(child, *kinds) for child in state)
    return next((child for child in found if child is not None), None)


def check_at_least_zero(where: str, name: str, value: float, *, below: float = math.inf) -> None:
    """Raise `ValueError` unless ``0 <= value < below``; NaN is refused too.

    >>> check_at_least_zero("adamw", "b1", 0.9, below=1.0)
    """
    if 0.0 <= value < below:
        return
    raise ValueError(
        message(
            f"{where}: {name}",
            "is out of range.",
            f"{name} = {value} must be finite and at least 0"
            + (f", and below {below:g}." if math.isfinite(below) else "."),
            fix=f"pass a {name} in [0, {below:g})",
        )
    )
