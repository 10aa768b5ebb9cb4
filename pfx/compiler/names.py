"""Logical dim names to mesh axes: ``"batch seq embed"`` with ``{"batch": "dp"}`` is ``P("dp")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pfx.errors import ShardingError, message
from pfx.mesh import Mesh
from pfx.spec import P

WHOLE = "_"  # the name of a dim that is never split


def spec_of_names(
    text: str,
    shape: Sequence[int],
    names: Mapping[str, Any],
    mesh: Mesh,
    note: Callable[[str], None] = lambda _: None,
) -> P:
    """Translate a string of logical names into a spec for a value of this shape.

    An axis that an earlier dim already uses, or that does not divide its dim, leaves the dim whole
    and is noted. A name the mapping does not know is an error.

    >>> from pfx.mesh import make_mesh
    >>> spec_of_names("batch embed", (4, 6), {"batch": "dp", "embed": None}, make_mesh(dp=2))
    P('dp', None)
    """
    entries: list[Any] = []
    used: set[str] = set()
    for name, size in zip(text.split(), shape, strict=True):
        if name != WHOLE and name not in names:
            raise ShardingError(
                message(
                    f"constrain({text!r}):",
                    f"the logical name {name!r} is not mapped to anything.",
                    f"known names: {', '.join(sorted(names))}",
                    fix=f'add names={{"{name}": "{next(iter(mesh.axis_names), "axis")}"}} or '
                    f'"{name}": None to the plan',
                )
            )
        wanted = names.get(name)
        axes = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        if axes and not mesh.splits(axes, size):
            note(
                f'"{name}" (size {size}) does not divide by {"*".join(axes)}={mesh.count(axes)}: whole'
            )
            axes = ()
        if used & set(axes):
            note(f'"{text}": {name!r} stays whole, {", ".join(used & set(axes))} is already used')
            axes = ()
        used |= set(axes)
        entries.append(axes or None)
    return P(*(e[0] if e is not None and len(e) == 1 else e for e in entries))
