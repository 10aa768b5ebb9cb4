"""What a jit-ted function is given: its arguments and specs, checked, and named in errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pfx import tree
from pfx.array import Array, ShapeDtype
from pfx.errors import MeshError, ShardingError, TraceError, message
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.spec import P


def name_of(fn: Callable[..., Any]) -> str:
    """What errors call a function.

    >>> name_of(abs)
    'abs'
    """
    return getattr(fn, "__name__", type(fn).__name__)


def arg_name(fn: Callable[..., Any], path: tree.Path) -> str:
    """Name a leaf of the arguments as the function does, e.g. ``state.params['w']``.

    >>> arg_name(lambda state, batch: None, ("[0]", ".params", "['w']"))
    "state.params['w']"
    """
    index = int(path[0][1:-1])
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_place]
    root = names[index] if index < len(names) else f"argument {index}"
    return tree.path_string(path[1:], root)


def check_jit(fn: Any, mesh: Any, donate: Any) -> None:
    """Raise unless a function, a mesh and positions were given."""
    if not callable(fn):
        raise TraceError(message("jit:", f"{fn!r} is not a function.", fix="jit(fn, mesh=mesh)"))
    where = f"jit({name_of(fn)}):"
    if not isinstance(mesh, Mesh):
        what = f"mesh={mesh!r} is not a mesh."
        raise MeshError(message(where, what, fix="mesh=pfx.make_mesh(dp=2, tp=4)"))
    if not isinstance(donate, (tuple, list, set, frozenset, range)):
        what = f"donate={donate!r} is not a tuple of positions."
        raise TraceError(message(where, what, fix="donate=(0,)"))


def check_named(named: Mapping[str, Any], where: str) -> None:
    """Raise for arguments given by name."""
    if named:
        raise TraceError(
            message(
                f"{where}:",
                "takes its arguments by position.",
                f"given by name: {', '.join(named)}",
                fix="pass them in order, or bind them first: jit(functools.partial(fn, …), …)",
            )
        )


def check_call(args: Sequence[Any], specs: Any, donate: frozenset[int], where: str) -> None:
    """Raise unless there is one spec, or tree of specs, for each argument."""
    for position in sorted(donate):
        if position not in range(len(args)):
            what = f"names position {position}; the call has {len(args)} arguments, from 0 on."
            raise ShardingError(message(f"{where}: donate", what, fix="drop it from donate"))
    if isinstance(specs, P) or specs is None:
        return
    if not isinstance(specs, (tuple, list)):
        raise ShardingError(
            message(
                f"{where}: in_specs",
                f"is a {type(specs).__name__}, not a tuple with one entry per argument.",
                fix=f"in_specs=({specs!r},)"
                if isinstance(specs, dict)
                else 'in_specs=(P("dp"), …)',
            )
        )
    if len(specs) != len(args):
        raise ShardingError(
            message(
                f"{where}: in_specs",
                f"has {len(specs)} entries; the call has {len(args)} arguments.",
                f"in_specs: {tuple(specs)!r}",
                fix="one entry per argument; None for one that is not split",
            )
        )


def as_tensor(leaf: Any, where: str) -> torch.Tensor:
    """Make a leaf a tensor: a tensor, a number, or what torch can read as one.

    Raises:
        TraceError: for anything else.
    """
    try:
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        raise TraceError(
            message(
                where,
                f"has type {type(leaf).__name__}; it is not a tensor or a number.",
                "the leaves of a pytree are tensors and numbers, or None for nothing.",
                fix="keep it outside: close over it, or use functools.partial",
            )
        ) from None


def meta_of(leaf: Any, mesh: Mesh, where: Callable[[], str]) -> TensorMeta:
    """The form of an argument on a mesh; `where` names it, should it be unfit."""
    if isinstance(leaf, Array):
        _check_mesh(leaf, mesh, where)
    elif not isinstance(leaf, (torch.Tensor, ShapeDtype)):
        leaf = as_tensor(leaf, where())
    return TensorMeta(tuple(leaf.shape), leaf.dtype, mesh.device)


def _check_mesh(array: Array, mesh: Mesh, where: Callable[[], str]) -> None:
    # An abstract mesh reads nothing of an Array but its form and its layout.
    same = (array.mesh.axes, array.mesh.deals) == (mesh.axes, mesh.deals)
    if array.mesh == mesh or (mesh.kind == "abstract" and same):
        return
    raise ShardingError(
        message(
            where(),
            "lives on another mesh.",
            f"it is on {_form(array.mesh)}.",
            f"mesh: {_form(mesh)}",
            fix="pfx.device_put(pfx.device_get(x), mesh, specs)",
        )
    )


def _form(mesh: Mesh) -> str:
    deals = [
        f"; {axis} deals to {deal.place} {deal.sizes or ''}".rstrip() for axis, deal in mesh.deals
    ]
    return f"{mesh} ({mesh.kind}, {mesh.device}{''.join(deals)})"


def check_data(leaf: Any, where: str) -> None:
    """Raise for an argument of a call that holds no data, or no longer."""
    if isinstance(leaf, ShapeDtype):
        what = "is a ShapeDtype: a form without data."
        raise TraceError(message(where, what, fix="call lower(…) with it, or pass a tensor"))
    if isinstance(leaf, Array) and not leaf.parts:
        what = "was donated to an earlier call."
        fix = "use the value that call returned, or drop it from donate"
        raise ShardingError(message(where, what, fix=fix))


def check_inlined(leaf: Any, where: str) -> None:
    """Raise for an Array given to a jit-ted function that is part of an outer one."""
    if isinstance(leaf, Array):
        raise TraceError(
            message(
                where,
                "is an Array, inside a transform or another jit.",
                "there a jit-ted function is a part of the outer one, and takes tensors.",
                fix="pass the Array to the outermost jit-ted function as an argument",
            )
        )
