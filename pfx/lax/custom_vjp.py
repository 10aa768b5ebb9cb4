"""`custom_vjp`: a function with a backward rule of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfx import _torch, tree
from pfx.errors import TraceError, message
from pfx.lax.custom_vjp_call import Arguments, Call, Rules
from pfx.lax.custom_vjp_rule import apply_rule, closed_over


class CustomVjp:
    """A function whose reverse derivative is a rule given by `defvjp`; see `custom_vjp`."""

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.nondiff_argnums = tuple(nondiff_argnums)
        self.rules: Rules | None = None
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.where = f"custom_vjp({self.name})"

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the two halves of the derivative.

        Args:
            fwd: takes the arguments of the function and returns ``(out, residuals)``; residuals are
                a pytree of what `bwd` needs, tensors or not.
            bwd: takes the arguments at `nondiff_argnums`, the residuals and the cotangents (a
                pytree like `out`, None for an integer) and returns a tuple with a cotangent for
                each of the other arguments: a pytree like the argument, None for a zero.
        """
        self.rules = Rules(self.name, self.fn, fwd, bwd)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.rules is None:
            fix = f"{self.name}.defvjp(fwd, bwd)"
            raise TraceError(message(f"{self.where}:", "has no backward rule yet.", fix=fix))
        arguments = self._arguments(*self._bound(args, named))
        if not _torch.is_transforming() and _torch.derivative_level(arguments.leaves) is None:
            return self._undifferentiated(arguments.values)
        call = Call(self.rules, arguments)
        rule, operands = call.primitive()
        return tree.unflatten(call.out_def, apply_rule(rule, operands))

    def _undifferentiated(self, args: tuple[Any, ...]) -> Any:
        """The function itself, as nobody will ask for a derivative by its arguments."""
        out = self.fn(*args)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree.leaves(out)):
            raise closed_over(f"{self.where}:")
        return out

    def _bound(self, args: tuple[Any, ...], named: Any) -> tuple[tuple[Any, ...], list[str]]:
        """All arguments by position, defaults included, and what errors call them."""
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            signature = None
        if signature is None:
            bound, names = args, []
        else:
            binding = signature.bind(*args, **named)
            binding.apply_defaults()
            bound, named = binding.args, binding.kwargs
            by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            names = [p.name for p in signature.parameters.values() if p.kind in by_place]
        if named:
            what = f"takes its arguments by position, got {sorted(named)} by name only."
            raise TraceError(message(f"{self.where}:", what))
        names += [f"argument {i}" for i in range(len(names), len(bound))]
        return bound, names

    def _arguments(self, args: tuple[Any, ...], names: list[str]) -> Arguments:
        static = self._static(len(args))
        given = {i: arg for i, arg in enumerate(args) if i not in static}
        pairs, treedef = tree.flatten_with_path(given)
        roots = {f"[{i}]": names[i] for i in given}
        labels = [tree.path_string(path[1:], roots[path[0]]) for path, _ in pairs]
        leaves = [self._leaf(x, name) for (_, x), name in zip(pairs, labels, strict=True)]
        return Arguments(args, names, static, leaves, labels, treedef)

    def _static(self, num_args: int) -> list[int]:
        static = [i + num_args if i < 0 else i for i in self.nondiff_argnums]
        if any(not 0 <= i < num_args for i in static):
            what = f"nondiff_argnums={self.nondiff_argnums} names an argument that is not there."
            raise TraceError(message(f"{self.where}:", what, f"arguments: {num_args}"))
        return sorted(set(static))

    def _leaf(self, x: Any, name: str) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        if isinstance(x, (bool, int, float, complex)):
            return torch.as_tensor(x)
        raise TraceError(
            message(
                f"{self.where}: {name}",
                f"is a {type(x).__name__}, not a tensor.",
                fix="name its position in nondiff_argnums",
            )
        )


def custom_vjp(fn: Callable[..., Any] | None = None, *, nondiff_argnums: Sequence[int] = ()) -> Any:
    """Give a function a backward rule of its own; jax.custom_vjp's meaning.

    Law: values are those of `fn`; the innermost reverse derivative pulls cotangents by the rule, and
    every transform further out sees the operations of `fwd` and `bwd` as they are written. So with
    the true derivative as its rule, the function is equal to `fn` under every transform that has a
    reverse derivative in it.

    What `fn`, `fwd` and `bwd` close over is constant to the derivative that takes the rule: if it
    differentiates such a tensor, that is an error. A loop differentiates all that its body closes
    over, so inside `scan` and `remat` only tensors that exist before the program are constants.

    Args:
        fn: a pure function of pytrees of tensors.
        nondiff_argnums: positions of arguments that are no tensors (functions, sizes, strings);
            `bwd` takes them first.

    Returns:
        The function; its ``defvjp(fwd, bwd)`` sets the rule, with ``fwd(*args) -> (out, residuals)``
        and ``bwd(*nondiff, residuals, cotangents) -> (cotangent, …)``, one for each argument that
        can be differentiated, None for a zero and for integers.

    Raises:
        TraceError: when called before `defvjp`; when the rules do not fit the function, naming the
            key path; when a rule closes over a tensor that is being differentiated.
        TypeError: under `jvp` or `jacfwd` of the function itself, as in JAX.

    >>> @custom_vjp
    ... def clipped(x, limit):
    ...     return x
    >>> clipped.defvjp(
    ...     lambda x, limit: (x, limit),
    ...     lambda limit, cotangent: (cotangent.clamp(-limit, limit), None),
    ... )
    >>> torch.func.grad(lambda x: 5 * clipped(x, 1.0))(torch.tensor(2.0))
    tensor(1.)
    """
    if fn is None:
        return functools.partial(custom_vjp, nondiff_argnums=nondiff_argnums)
    return CustomVjp(fn, nondiff_argnums)
