"""An existing `torch.nn.Module` as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pfx.array import Array
from pfx.errors import TraceError, TreeError, message
from pfx.interop.call import Call, buffers_of, parameters_of

Params = dict[str, torch.Tensor]


def from_module(module: torch.nn.Module) -> tuple[Callable[..., Any], Params]:
    """Split a torch module into a pure function and its parameters: ``(apply, params)``.

    ``apply(params, *args, **kwargs)`` equals ``module(*args, **kwargs)`` with these values in the
    place of the module's parameters, and leaves the module as it was. So it can be differentiated,
    mapped over a stack of `params`, traced, scanned and sharded like any other function.

    `params` is a dict with each distinct parameter once, sorted by name; a tied parameter has its
    first name in ``named_parameters``, and its gradient is the sum over its uses. The tensors are
    detached and share memory with the module, so do not donate them to `pfx.jit`; nothing else in
    pfx writes to them. ``module.load_state_dict(params, strict=False)`` puts trained values back.

    Buffers and the mode (`train` or `eval`) stay with the module and are read at each call; a
    buffer is a constant. What a call assigns to the module's attributes is undone after it.
    Dropout in training mode draws from torch's global generator: it is random under plain calls
    and refused by `pfx.jit`. While a call runs, the module belongs to it: no second thread, and
    no `torch.utils.checkpoint` inside, which would run it again too late (`pfx.remat` does not).

    Args:
        module: any module with initialized parameters; their `requires_grad` plays no part.

    Raises:
        TraceError: if `module` is not a module, is a TorchScript one or has uninitialized
            parameters; from `apply`, if the forward changes a buffer or a parameter (BatchNorm in
            training mode) or keeps a new tensor in an attribute.
        TreeError: from `apply`, if the names or shapes of `params` are not the module's.

    >>> module = torch.nn.Linear(2, 1, bias=False)
    >>> apply, params = from_module(module)
    >>> apply({"weight": torch.tensor([[3.0, 4.0]])}, torch.ones(2))
    tensor([7.])
    >>> loss = lambda params, x: apply(params, x).sum()
    >>> torch.func.grad(loss)(params, torch.ones(2))
    {'weight': tensor([[1., 1.]])}
    """
    where = f"from_module({type(module).__name__})"
    _check_module(where, module)

    def apply(params: Params, /, *args: Any, **kwargs: Any) -> Any:
        _check_params(where, module, params)
        with Call(where, module, params).running():
            return module(*args, **kwargs)

    # Sorted as pfx.tree does it: torch.func takes dicts in two orders for different structures.
    named = dict(parameters_of(module).values())
    return apply, {name: named[name].detach() for name in sorted(named)}


def _check_module(where: str, module: Any) -> None:
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TraceError(
            message(
                f"{where}:",
                f"a {type(module).__name__} is not a torch.nn.Module written in Python.",
                fix="pass an instance of the module's own class",
            )
        )
    for name, value in [*parameters_of(module).values(), *buffers_of(module).values()]:
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
            raise TraceError(
                message(
                    f"{where}: {name}",
                    "is not initialized.",
                    "a lazy module learns its shapes from its first input.",
                    fix="run the module once before: module(x)",
                )
            )


def _check_params(where: str, module: torch.nn.Module, params: Any) -> None:
    """Raise unless `params` has the names and the shapes of the module's parameters."""
    if not isinstance(params, Mapping):
        raise TreeError(
            message(
                f"{where}: params",
                f"is a {type(params).__name__}, not a dict of tensors by name.",
                fix="apply(params, *args) with the params that from_module returned",
            )
        )
    known = dict(parameters_of(module).values())
    for name in params:
        if name not in known:
            raise _unexpected(where, module, name, list(known))
    for name, parameter in known.items():
        if name not in params:
            raise TreeError(
                message(
                    f"{where}: params[{name!r}]",
                    "is missing.",
                    f"the module has a parameter {name} of shape {tuple(parameter.shape)}.",
                    fix="pass every entry of the params that from_module returned",
                )
            )
        _check_value(f"{where}: params[{name!r}]", params[name], parameter)


def _unexpected(where: str, module: torch.nn.Module, name: Any, known: list[str]) -> TreeError:
    tied = dict(module.named_parameters(remove_duplicate=False)).get(name)
    detail = f"the module has {', '.join(known[:4]) or 'no parameters'}"
    if tied is not None:
        first, _ = parameters_of(module)[id(tied)]
        detail = f"it is tied to {first}, whose entry holds the value of both"
    elif name in dict(module.named_buffers(remove_duplicate=False)):
        detail = "it is a buffer, and buffers stay with the module"
    elif len(known) > 4:
        detail += f", … ({len(known)} parameters)"
    name = f"{where}: params[{name!r}]"
    return TreeError(message(name, "is not a parameter.", f"{detail}.", fix="drop it"))


def _check_value(where: str, value: Any, parameter: torch.Tensor) -> None:
    if isinstance(value, Array):
        what, fix = "is an Array, not a tensor.", "call apply in a function under pfx.jit"
    elif not isinstance(value, torch.Tensor):
        what, fix = f"is a {type(value).__name__}, not a tensor.", "pass a tensor"
    elif value.shape != parameter.shape:
        what = f"has shape {tuple(value.shape)}; the module's has {tuple(parameter.shape)}."
        fix = "pass that shape; a stack of params goes through pfx.vmap or pfx.scan"
    else:
        return
    raise TreeError(message(where, what, fix=fix))
