"""Transforms of functions in JAX's conventions, on torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfx import tree
from pfx.errors import message


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes ``fn(*args)`` and its gradient, in JAX's order.

    Law: the value is that of `fn`, the gradient that of ``grad(fn, argnums, has_aux=has_aux)``.

    Args:
        fn: a pure function of pytrees of tensors that returns a scalar, or with `has_aux` a pair
            of a scalar and any pytree.
        argnums: the position of the argument to differentiate by, or a tuple of positions; the
            gradient is a pytree like that argument, or a tuple of them.
        has_aux: whether `fn` returns (value, aux).

    Returns:
        A function that returns ``(value, gradient)``, or ``((value, aux), gradient)``.

    Raises:
        TypeError: when the value is no scalar of a floating point dtype, or no pair with `has_aux`.

    >>> value_and_grad(lambda x: x**2)(torch.tensor(3.0))
    (tensor(9.), tensor(6.))
    >>> value_and_grad(lambda x: (x**2, x + 1), has_aux=True)(torch.tensor(3.0))
    ((tensor(9.), tensor(4.)), tensor(6.))
    """
    where = f"value_and_grad({getattr(fn, '__name__', type(fn).__name__)}):"

    def wrapped(*args: Any, **named: Any) -> Any:
        places = _places(argnums, len(args), where)
        pairs, treedef = tree.flatten_with_path([args[i] for i in places])
        leaves = [_real(x, f"{where} argument {_name(path, places)}") for path, x in pairs]
        rest: list[Any] = []  # of aux: what is no tensor goes around torch.func

        def of_leaves(values: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            given = dict(zip(places, tree.unflatten(treedef, values), strict=True))
            result = fn(*(given.get(i, arg) for i, arg in enumerate(args)), **named)
            value, aux = _pair(result, where) if has_aux else (result, None)
            aux_leaves, aux_def = tree.flatten(aux)
            rest[:] = [aux_def, [None if _is_tensor(x) else x for x in aux_leaves]]
            return _scalar(value, where), [x for x in aux_leaves if _is_tensor(x)]

        gradients, (value, found) = torch.func.grad_and_value(of_leaves, has_aux=True)(leaves)
        gradient = tuple(tree.unflatten(treedef, gradients))
        if isinstance(argnums, int):
            (gradient,) = gradient
        if not has_aux:
            return value, gradient
        tensors, (aux_def, others) = iter(found), rest
        aux = tree.unflatten(aux_def, [next(tensors) if x is None else x for x in others])
        return (value, aux), gradient

    return wrapped


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _places(argnums: int | tuple[int, ...], num_args: int, where: str) -> list[int]:
    """The positions to differentiate by, counted from the front."""
    asked = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    places = [i + num_args if i < 0 else i for i in asked]
    if not places or len(set(places)) < len(places) or any(not 0 <= i < num_args for i in places):
        what = f"argnums={argnums} does not name arguments, each once; there are {num_args}."
        fix = "pass what is differentiated by position"
        raise TypeError(message(where, what, fix=fix))
    return places


def _name(path: tree.Path, places: list[int]) -> str:
    """The key path of a leaf, its argument called by its position."""
    return tree.path_string(path[1:], str(places[int(path[0][1:-1])]))


def _real(x: Any, where: str) -> torch.Tensor:
    """A leaf to differentiate by, as a tensor."""
    value = torch.as_tensor(x) if isinstance(x, float) else x
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value
    dtype = f" of {str(value.dtype).removeprefix('torch.')}" if _is_tensor(value) else ""
    what = f"is a {type(x).__name__}{dtype}: it has no gradient."
    fix = "leave it out of argnums, or make it a float tensor"
    raise TypeError(message(where, what, fix=fix))


def _pair(result: Any, where: str) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        what = f"has_aux=True needs a pair (value, aux), got a {type(result).__name__}."
        raise TypeError(message(where, what, fix="return value, aux"))
    return result


def _scalar(value: Any, where: str) -> torch.Tensor:
    """Raise unless a value has a gradient: one number of a floating point dtype."""
    if not isinstance(value, torch.Tensor):
        fix = "return value, aux with has_aux=True" if isinstance(value, tuple) else ""
        what = f"differentiates a scalar tensor, the function returns a {type(value).__name__}."
        raise TypeError(message(where, what, fix=fix))
    if value.ndim or not value.is_floating_point():
        form = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        fix = ".sum() or .mean() of it; jacrev for the whole Jacobian" if value.ndim else ""
        what = "differentiates a real scalar, the function returns another form."
        raise TypeError(message(where, what, f"value: {form}", fix=fix or "return a float tensor"))
    return value
