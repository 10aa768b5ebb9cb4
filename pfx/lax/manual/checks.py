"""What the arguments of a collective must be, and what is said when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pfx.errors import ShardingError, message, user_line
from pfx.lax.manual.local import variance_of
from pfx.lax.region import Region, shown
from pfx.spec import Axes

GroupsArg = Sequence[Sequence[int]] | None


def dim_of(name: str, dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    if not -ndim <= dim < ndim:
        raise ShardingError(message(f"{name}:", f"dim {dim} is not one of {ndim} dims."))
    return dim % ndim


def check_split(
    name: str, x: torch.Tensor, dim: int, size: int, axes: Axes, *, tiled: bool
) -> None:
    """Refuse to split a dim that its devices do not divide."""
    have = x.shape[dim]
    if have % size if tiled else have != size:
        wanted = f"a multiple of {size}" if tiled else f"{size}"
        raise ShardingError(
            message(f"{name} at {user_line()}: dim {dim} (size {have})",
                    "cannot be split.",
                    f"{', '.join(map(repr, axes))} has {size} devices; the size must be {wanted}.",
                    "" if tiled else "tiled=True splits a larger dim into blocks.",
                    fix=f"a shape whose dim {dim} is {wanted}; here it is {tuple(x.shape)}")
        )  # fmt: skip


def check_perm(perm: tuple[tuple[int, int], ...], size: int, axes: Axes) -> None:
    """Refuse a permutation that names a rank twice on one side, or one that is none."""
    for side, ranks in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        wrong = [r for r in ranks if not 0 <= r < size or ranks.count(r) > 1]
        if wrong:
            why = "occurs twice" if 0 <= wrong[0] < size else f"is not one of {size} ranks"
            raise ShardingError(
                message(f"ppermute at {user_line()}:", f"{side} {wrong[0]} {why}.",
                        f"perm over {', '.join(map(repr, axes))}: {list(perm)}",
                        fix="list each source once and each destination once")
            )  # fmt: skip


def groups_of(name: str, groups: GroupsArg, region: Region, axes: Axes) -> tuple[Any, ...]:
    """Groups of ranks as tuples, after checking that they hold each rank once; none for None."""
    if groups is None:
        return ()
    ranks = tuple(tuple(int(rank) for rank in group) for group in groups)
    size = region.mesh.count(axes)
    once = sorted(r for group in ranks for r in group) == list(range(size))
    if not once or len({len(group) for group in ranks}) != 1:
        raise ShardingError(
            message(f"{name} at {user_line()}: groups={[list(g) for g in ranks]}",
                    f"must hold each of the {size} ranks once, in groups of one size.",
                    fix=f"groups={[list(range(size))]}")
        )  # fmt: skip
    return ranks


def refuse_addends(x: torch.Tensor, name: str, axes: Axes) -> None:
    """Refuse a value whose devices hold addends along one of the axes."""
    owed = [axis for axis in axes if variance_of(x).state(axis) == "unreduced"]
    if owed:
        raise ShardingError(
            message(f"{name} at {user_line()}:", f"the value is unreduced over {owed[0]!r}.",
                    "what its devices hold are addends of it.",
                    fix=f"x = pfx.lax.psum(x, {shown(owed)!r}) first, or psum_scatter")
        )  # fmt: skip
