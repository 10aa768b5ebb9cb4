"""One call of a `torch.nn.Module` with other values in the place of its parameters.

For the time of the call every module of the tree works on copies of its own dicts, in which the
parameters are the values that were passed and the buffers are copies; then it gets back the dicts it
had. A module reached by two paths is one module here, so each place is filled and restored once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pfx import tree
from pfx.errors import TraceError, message
from pfx.lax.ops.arguments import map_tensors
from pfx.lax.ops.writes import WRITERS, is_in_place

# The first name of each distinct tensor, and the tensor, by its id.
Named = dict[int, tuple[str, torch.Tensor]]


def _first_names(named: Iterable[tuple[str, torch.Tensor]]) -> Named:
    found: Named = {}
    for name, value in named:
        found.setdefault(id(value), (name, value))
    return found


def parameters_of(module: torch.nn.Module) -> Named:
    """The distinct parameters of a module, under their first names."""
    return _first_names(module.named_parameters(remove_duplicate=False))


def buffers_of(module: torch.nn.Module) -> Named:
    """The distinct buffers of a module, under their first names."""
    return _first_names(module.named_buffers(remove_duplicate=False))


@dataclass(frozen=True)
class _Place:
    """A module of the tree, the path to it, and the attributes it had before the call."""

    module: torch.nn.Module
    path: str
    before: dict[str, Any]

    def name(self, attribute: str) -> str:
        """The dotted name of one of its attributes."""
        return f"{self.path}.{attribute}" if self.path else attribute


_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


class Call:
    """One call of a module: which value stands for which tensor of its own."""

    def __init__(
        self, where: str, module: torch.nn.Module, params: Mapping[str, torch.Tensor]
    ) -> None:
        self.where = where
        self.places = [_Place(m, path, dict(vars(m))) for path, m in module.named_modules()]
        parameters, buffers = parameters_of(module), buffers_of(module)
        self.values = {key: params[name] for key, (name, _) in parameters.items()}
        self.values |= {key: _copy(buffer) for key, (_, buffer) in buffers.items()}
        self.passed = {id(self.values[key]) for key in parameters}
        # One value may be passed for two parameters: then either name will do.
        self.names = {id(self.values[key]): f"parameter {n}" for key, (n, _) in parameters.items()}
        self.names |= {id(self.values[key]): f"buffer {n}" for key, (n, _) in buffers.items()}
        self.versions = {key: _version(value) for key, value in self.values.items()}

    def value(self, own: Any) -> Any:
        """What stands for an entry of a module's dicts during the call."""
        return self.values.get(id(own), own)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Put the values in, and the module's own tensors back at the end."""
        try:
            for place in self.places:
                for kind in _KINDS:
                    entries = place.before[kind].copy()
                    entries.update({key: self.value(own) for key, own in entries.items()})
                    vars(place.module)[kind] = entries
            with _Watch(self):
                yield
            self.check_versions()
            for place in self.places:
                self.check_attributes(place)
        finally:
            for place in self.places:
                vars(place.module).clear()
                vars(place.module).update(place.before)

    def check_versions(self) -> None:
        """Raise if a tensor that the module was given was changed in place."""
        for key, value in self.values.items():
            if _version(value) != self.versions[key]:
                raise self.changed(self.names[id(value)])

    def check_attributes(self, place: _Place) -> None:
        """Raise if the module would have kept a tensor of this call."""
        for kind, word in _KINDS.items():
            for key, entry in vars(place.module)[kind].items():
                if entry is not self.value(place.before[kind].get(key)):
                    raise self.changed(f"{word} {place.name(key)}")
        for key, entry in vars(place.module).items():
            if entry is place.before.get(key) or key in _KINDS or key in _derived(place.module):
                continue
            if any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(entry)):
                raise TraceError(
                    message(
                        f"{self.where}:",
                        f"the forward keeps a tensor in the attribute {place.name(key)}.",
                        "apply is a pure function of its arguments and keeps no state.",
                        fix="return it from forward; if it is a cache, fill it by one call of "
                        "the module itself before",
                    )
                )

    def changed(self, what: str, fix: str = "") -> TraceError:
        """The error for a forward that writes to what it was given."""
        return TraceError(
            message(
                f"{self.where}:",
                f"the forward changes the {what}.",
                "apply is a pure function of its arguments and keeps no state.",
                fix=fix
                or "module.eval() if only training needs it; "
                "else make it an argument and a result of forward",
            )
        )


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    # A tensor made in inference mode would not count its changes.
    if not torch.is_inference_mode_enabled():
        return buffer.clone()
    with torch.inference_mode(mode=False):
        return buffer.clone()


def _version(value: torch.Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _derived(module: torch.nn.Module) -> set[str]:
    """Attributes that torch itself computes anew from the parameters at each call."""
    # Pruning and the older weight and spectral norms are hooks that know the name they set.
    hooks = module._forward_pre_hooks.values()
    named = {getattr(hook, key, "") for hook in hooks for key in ("name", "_tensor_name")}
    return named | ({"_flat_weights"} if isinstance(module, torch.nn.RNNBase) else set())


class _Watch(TorchFunctionMode):
    """Stops what would write into the values of a call, where its name shows it, before it does."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WRITERS:
            operand, fix = WRITERS[func].written(args, kwargs), WRITERS[func].fix
            if id(operand) in self.call.names:
                raise self.call.changed(self.call.names[id(operand)], fix)
        # Buffers are copies, so that the check after the call is soon enough.
        elif args and id(args[0]) in self.call.passed and is_in_place(func):
            raise self.call.changed(self.call.names[id(args[0])])
        # A module may also hold a parameter where torch does not look, as in a plain list.
        value = self.call.value
        return func(*map_tensors(value, args), **map_tensors(value, kwargs))
