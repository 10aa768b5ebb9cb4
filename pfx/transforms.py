"""Transforms of functions in JAX's conventions, on torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx import tree
from pfx.errors import message
from pfx.lax.body import meta_of
from pfx.lax.manual.local import variance_of
from pfx.lax.manual.variance import misplaced
from pfx.meta import TensorMeta


def grad(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `fn`; torch.func.grad.

    Inside a `shard_map`, the gradient with respect to a value that is the same on all devices is the
    sum of the devices' gradients, and to a varying one each device's own (see `pfx.lax.pcast`).

    Args:
        fn: a pure function of pytrees of tensors that returns a scalar, or with `has_aux` a pair
            of a scalar and any pytree.
        argnums: the position of the argument to differentiate by, or a tuple of positions.
        has_aux: whether `fn` returns (value, aux).

    Raises:
        TypeError: inside a `shard_map`, for a value that is reduced or unreduced.

    >>> grad(torch.sin)(torch.tensor(0.0))
    tensor(1.)
    """

    @functools.wraps(fn)
    def checked(*args: Any, **named: Any) -> Any:
        result = fn(*args, **named)
        _check_state(result[0] if has_aux and isinstance(result, tuple) else result)
        return result

    return torch.func.grad(checked, argnums, has_aux)


def _check_state(value: Any) -> None:
    """Refuse a loss whose cotangent, which is all ones, would have to be addends or copies of them."""
    variance = variance_of(value)
    for state in ("reduced", "unreduced"):
        for axis in sorted(getattr(variance, state)):
            cast = f'pfx.lax.pcast(loss, {axis!r}, to="varying"), and its sum over the devices is meant'
            fix = cast if state == "reduced" else f"pfx.lax.psum(loss, {axis!r})"
            raise TypeError(
                message("grad:", f"differentiates a value that is {state} over {axis!r}.", fix=fix)
            )


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
            _check_state(value)
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


def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Push tangents through a function: forward-mode differentiation, torch.func.jvp on any tree.

    Args:
        fn: a pure function of pytrees of float tensors.
        primals: its arguments.
        tangents: a direction for each, of the same structure; the order of a dict's keys is no part of
            it.
        has_aux: whether `fn` returns (out, aux).

    Returns:
        ``(out, tangent of out)``, and aux.

    Raises:
        TreeError: when a tangent has another structure than its primal, with the key path.

    >>> jvp(torch.sin, (torch.tensor(0.0),), (torch.tensor(2.0),))
    (tensor(0.), tensor(2.))
    """
    call = _Flat(fn, tuple(primals), has_aux=has_aux)
    directions = tuple(tree.match(call.treedef, tuple(tangents), call.paths))
    out, pushed, *aux = torch.func.jvp(call, tuple(call.leaves), directions, has_aux=has_aux)
    return (tree.unflatten(call.out_def, out), tree.unflatten(call.out_def, pushed), *aux)


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Run a function and return what pulls a cotangent of its result back to its arguments.

    Args:
        fn: a pure function of pytrees of float tensors.
        primals: its arguments.
        has_aux: whether `fn` returns (out, aux).

    Returns:
        ``(out, pull)``, and aux. ``pull(cotangent of out)`` is a tuple, a cotangent per argument.

    Raises:
        TreeError, TypeError: by `pull`, for a cotangent of another structure or form than the output;
            in a `shard_map`, for one that is to an axis what the output's cotangents are not.

    >>> out, pull = vjp(torch.mul, torch.tensor(2.0), torch.tensor(3.0))
    >>> pull(torch.tensor(1.0))
    (tensor(3.), tensor(2.))
    """
    call = _Flat(fn, primals, has_aux=has_aux)
    outs, pull_flat, *aux = torch.func.vjp(call, *call.leaves, has_aux=has_aux)  # type: ignore[misc]
    metas = [meta_of(x) for x in outs]

    def pull(cotangent: Any) -> tuple[Any, ...]:
        given = tree.match(call.out_def, cotangent, call.out_paths)
        for path, x, meta in zip(call.out_paths, given, metas, strict=True):
            _check_cotangent(f"vjp({call.name}): cotangent{tree.path_string(path)}", x, meta)
        return tree.unflatten(call.treedef, pull_flat(tuple(given)))

    return (tree.unflatten(call.out_def, outs), pull, *aux)


class _Flat:
    """A function of the leaves of its arguments that returns the leaves of its result."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], *, has_aux: bool) -> None:
        self.fn, self.has_aux = fn, has_aux
        self.name = getattr(fn, "__name__", type(fn).__name__)
        pairs, self.treedef = tree.flatten_with_path(args)
        self.paths, self.leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
        self.out_def, self.out_paths = tree.LEAF, [()]

    def __call__(self, *leaves: torch.Tensor) -> Any:
        result = self.fn(*tree.unflatten(self.treedef, leaves))
        out, aux = _pair(result, f"{self.name}:") if self.has_aux else (result, None)
        pairs, self.out_def = tree.flatten_with_path(out)
        self.out_paths = [path for path, _ in pairs]
        outs = tuple(leaf for _, leaf in pairs)
        return (outs, aux) if self.has_aux else outs


def _check_cotangent(where: str, cotangent: Any, out: TensorMeta) -> None:
    if not _is_tensor(cotangent) or (cotangent.shape, cotangent.dtype) != (out.shape, out.dtype):
        form = f"{str(out.dtype).removeprefix('torch.')} {tuple(out.shape)}"
        raise TypeError(message(where, f"must be a tensor of the form of its output, {form}."))
    what, fix = misplaced(out.variance.dual, variance_of(cotangent))
    if what:
        raise TypeError(message(where, what.replace("gets a cotangent that ", ""), fix=fix))


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
