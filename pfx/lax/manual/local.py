"""`Local`: one tensor per device, as one torch tensor, so that a manual region can run eagerly.

Inside `shard_map`, called outside any trace, a value that differs between devices is a `Local`: its
parts are the devices' own tensors, and every op runs on each of them. What is the same everywhere is an
ordinary tensor, and so an ordinary ``if`` can read it. Transforms of torch.func wrap a `Local` as they
wrap any tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pfx import _torch, tree
from pfx._torch import Wrapper
from pfx.errors import ShardingError, TraceError, message, user_line
from pfx.lax.manual.variance import INVARYING, Variance, node_variance, result_variance
from pfx.lax.ops.pure_form import written
from pfx.mesh import Mesh

aten = torch.ops.aten


class Local(Wrapper):
    """The tensors that the devices of a mesh hold, one per coordinate along the axes they differ on."""

    parts: tuple[torch.Tensor, ...]
    mesh: Mesh
    variance: Variance

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes the parts are listed along, row-major."""
        return self.mesh.ordered(tuple(self.variance.axes))

    def at(self, place: Mapping[str, int]) -> torch.Tensor:
        """The tensor of the device at a coordinate."""
        return self.parts[self.mesh.index(place, self.axes)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        names = [" ".join(f"{a}={i}" for a, i in p.items()) for p in places_of(self)]
        places = [name or "everywhere" for name in names]
        rows = [f"  {place}: {part}" for place, part in zip(places, self.parts, strict=True)]
        return "\n".join([f"Local({self.variance} of {self.mesh}", *rows]) + ")"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, treedef = tree.flatten((tuple(args), kwargs or {}))
        mesh = next(x.mesh for x in flat if isinstance(x, Local))
        variance = result_variance(func, args, kwargs or {}, _counted, is_zero=_is_zero)
        axes = mesh.ordered(tuple(variance.axes))
        if variance.varying and func in _READ_A_VALUE:
            raise _reads(variance)
        changed = written(func, args, kwargs or {})
        _check_written(changed, func, axes)
        rows, first = [], dict.fromkeys(mesh.axis_names, 0)
        for place in mesh.coordinates(axes):
            here = [x.at({**first, **place}) if isinstance(x, Local) else x for x in flat]
            a, k = tree.unflatten(treedef, here)
            rows.append(func(*a, **k))
        if changed and not isinstance(changed[0], (list, tuple)) and changed[0] is args[0]:
            _torch.follow(func, args)
            return args[0]
        if changed and "out" in (kwargs or {}):
            return kwargs["out"]
        return _gathered(rows, mesh, variance)


_READ_A_VALUE = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
)


def local(mesh: Mesh, variance: Variance, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a value of its parts; a plain tensor if nothing is to be remembered of it."""
    if variance == INVARYING:
        return parts[0]
    # Forward mode's zeros have no memory, and nothing would tell a kernel so through a wrapper.
    parts = [torch.zeros_like(p) if _torch.is_efficient_zero(p) else p for p in parts]
    # A wrapper has no bit that says that its elements are still to be conjugated or negated.
    parts = [part.resolve_conj().resolve_neg() for part in parts]
    out: Local = Local(parts[0])  # type: ignore[assignment]
    out.parts, out.mesh, out.variance = tuple(parts), mesh, variance
    return out


def places_of(x: torch.Tensor) -> list[dict[str, int]]:
    """The coordinates along which a value has parts of its own."""
    return list(x.mesh.coordinates(x.axes)) if isinstance(x, Local) else [{}]


def part_at(x: torch.Tensor, place: Mapping[str, int]) -> torch.Tensor:
    """What the device at a coordinate holds of a value."""
    return x.at(place) if isinstance(x, Local) else x


def _counted(x: Any) -> Variance | None:
    """What an operand of an op is; None for one that has no value.

    Forward mode asks for the form of a sum on the meta device, where there are none.
    """
    if isinstance(x, Local):
        return x.variance
    return INVARYING if isinstance(x, torch.Tensor) and not x.is_meta else None


def _is_zero(x: torch.Tensor) -> bool:
    """Tell zeros that all devices have, which are addends of zero just as well."""
    parts = x.parts if isinstance(x, Local) else (x,)
    return all(_torch.is_efficient_zero(p) or not bool(aten.any.default(p)) for p in parts)


def _gathered(rows: list[Any], mesh: Mesh, variance: Variance) -> Any:
    """From one result (or sequence of results) per device to one value each."""
    first = rows[0]
    if isinstance(first, torch.Tensor):
        _check_agree(rows, lambda row: row.shape, variance)
        return local(mesh, variance, rows)
    if isinstance(first, (tuple, list)):
        columns = zip(*rows, strict=True)
        return type(first)(_gathered(list(column), mesh, variance) for column in columns)
    _check_agree(rows, lambda row: row, variance)
    return first


def _check_agree(rows: Sequence[Any], what: Any, variance: Variance) -> None:
    """Refuse an op whose result has another form on another device, as one with a mask as index."""
    if any(what(row) != what(rows[0]) for row in rows):
        raise _reads(variance)


def _check_written(changed: Sequence[Any], func: Any, axes: Sequence[str]) -> None:
    """Refuse to write what differs between devices into what they share."""
    for item in changed:
        for x in item if isinstance(item, (list, tuple)) else (item,):
            if not set(axes) <= set(x.axes if isinstance(x, Local) else ()):
                raise writes_varying(str(func.overloadpacket).removeprefix("aten."), axes)


def writes_varying(name: str, axes: Sequence[str]) -> ShardingError:
    """The error for a change in place of a value that would come to differ between devices."""
    shown = ", ".join(map(repr, axes))
    return ShardingError(  # no TypeError: Python would take that for an operator that is not there
        message(
            f"{name} at {user_line()}:",
            f"writes what varies over {shown} into a value that does not.",
            "all devices share that value; what is written would differ.",
            fix=f"x = pfx.lax.pcast(x, {axes[0] if len(axes) == 1 else tuple(axes)!r}, "
            'to="varying") before writing',
        )
    )


def _reads(variance: Variance) -> TraceError:
    axes = sorted(variance.varying)
    shown = ", ".join(map(repr, axes))
    return TraceError(
        message(
            f"Python at {user_line()}",
            f"needs the value of a tensor that varies over {shown} (if, while, int(), .item()).",
            "the devices hold different values, and all must take the same way.",
            fix=f"make it the same first: pfx.lax.psum(x, {axes[0]!r}), pmax or pmin; "
            "or torch.where(condition, a, b)",
        )
    )


def variance_of(x: Any) -> Variance:
    """What a value is along each axis: of a `Local`, of a tensor being traced, of any other."""
    base = _torch.base_tensor(x) if isinstance(x, torch.Tensor) else x
    if isinstance(base, Local):
        return base.variance
    node = _torch.node_of(base) if isinstance(base, torch.Tensor) else None
    return INVARYING if node is None else node_variance(node)
