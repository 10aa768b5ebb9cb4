"""Every primitive as a function of one tensor, with its dense meaning: the rows of a table.

A `Row` on the devices of `MESH` is a function of what one device holds. Its meaning takes and returns the
stack of what all hold: the first two dims are the mesh's, of size 1 where the value does not vary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pfx
from pfx import lax
from tests.sim.manual import EXTREMA, LINEAR, Case, Tensors

MESH = pfx.make_mesh(i=2, j=2)
AXES = ("i", "j")
Fn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A primitive; `typical` rows meet every pair of transforms."""

    name: str
    apply: Fn
    meaning: Fn
    shape: tuple[int, ...]
    typical: bool = True
    takes: tuple[str, ...] = ("varying", "invarying")  # what its operand may be over both axes


def everywhere(x: torch.Tensor) -> torch.Tensor:
    """A stack with the mesh's sizes."""
    return x.expand(2, 2, *x.shape[2:])


def varying(x: torch.Tensor) -> torch.Tensor:
    """Cast to varying over both axes, whatever it is along each."""
    return lax.pcast(x, AXES, to="varying")


def _of_case(case: Case, axis: str | tuple[str, ...], *, typical: bool = False) -> Row:
    same = case.name in ("psum", "pmean", "pmax", "pmin") or case.name.endswith("invarying")
    axes = (axis,) if isinstance(axis, str) else axis

    def meaning(x: torch.Tensor) -> torch.Tensor:
        y = case.dense(everywhere(x), MESH, axis)
        for at, name in enumerate(AXES):
            # Along an axis it does not use, a result varies only if its operand does.
            kept = (not same) if name in axes else x.shape[at] > 1
            y = y if kept else y.narrow(at, 0, 1)
        return y

    count = MESH.count(axes)
    name = f"{case.name} over {'-'.join(axes)}"
    return Row(name, lambda x: case.apply(x, axis), meaning, case.shape(count), typical)


GROUPS = ((3, 0), (1, 2))  # of ranks along ("j", "i")


def _grouped(name: str, apply: Any, meaning: Callable[[Tensors], Tensors], *shape: int) -> Row:
    def of_groups(parts: Tensors) -> Tensors:
        out = list(parts)
        for group in GROUPS:
            for rank, part in zip(group, meaning([parts[r] for r in group]), strict=True):
                out[rank] = part
        return out

    case = Case(f"{name} in groups", lambda x, axis: apply(x, axis, groups=GROUPS), of_groups,
                lambda n: shape)  # fmt: skip
    return _of_case(case, ("j", "i"), typical=name == "psum")


_total: Fn = lambda parts: torch.stack(list(parts)).sum(0)

_TYPICAL = {
    "psum", "all_gather-1-tiled-varying", "all_gather-0-stacked-varying",
    "all_gather-0-tiled-invarying", "psum_scatter-0-tiled", "psum_scatter-1-whole",
    "all_to_all-0-1-tiled", "all_to_all-1-2-whole", "ppermute-chain", "pshuffle",
}  # fmt: skip
COLLECTIVES = (
    *(_of_case(case, "i", typical=case.name in _TYPICAL) for case in (*LINEAR, *EXTREMA)),
    *(_of_case(case, ("j", "i")) for case in LINEAR if case.name in _TYPICAL | {"ppermute-ring"}),
    _of_case(Case("pmax", lax.pmax, EXTREMA[0].meaning, lambda n: (2, 3)), ("j", "i"), typical=True),
    _grouped("psum", lax.psum, lambda ps: [_total(ps)] * 2, 2, 3),
    _grouped("pmean", lax.pmean, lambda ps: [_total(ps) / 2] * 2, 2, 3),
    _grouped("pmax", lax.pmax, lambda ps: [torch.maximum(*ps)] * 2, 2, 3),
    _grouped("pmin", lax.pmin, lambda ps: [torch.minimum(*ps)] * 2, 2, 3),
    _grouped("all_gather", lax.all_gather, lambda ps: [torch.stack(ps)] * 2, 2, 3),
    _grouped("psum_scatter", lax.psum_scatter, lambda ps: list(_total(ps).unbind()), 2, 3),
    _grouped(
        "all_to_all",
        lambda x, axis, groups: lax.all_to_all(x, axis, 0, 1, groups=groups),
        lambda ps: [torch.stack([p[to] for p in ps], 1) for to in range(2)], 2, 3,
    ),
)  # fmt: skip


def _along(name: str) -> Fn:
    """Stack to stack: the sum over an axis."""
    return lambda x: everywhere(x).sum(AXES.index(name), keepdim=True)


# Gathered to a value that is reduced along the axis: its cotangent comes unreduced.
def _gathered(x: torch.Tensor) -> torch.Tensor:
    both = everywhere(x) if x.shape[0] == 1 else x
    return torch.cat([both[:1], both[1:]], 2)


def _rank(*axes: str) -> torch.Tensor:
    count = torch.arange(4.0, dtype=torch.float64).reshape(2, 2)
    return (count if axes == AXES else count.T)[..., None, None]


def _either(x: torch.Tensor) -> torch.Tensor:
    """Varying over "i", by a cast if need be; as it is along "j"."""
    return lax.pcast(x, "i", to="varying")


TYPES = (
    Row("pcast to varying", lambda x: lax.pcast(x, "i", to="varying"), lambda x: x, (2, 3)),
    Row("pcast to reduced", lambda x: lax.pcast(x, "i", to="reduced"), lambda x: x, (2, 3),
        takes=("invarying",)),
    Row("pcast to unreduced, and psum",
        lambda x: lax.psum(lax.pcast(_either(x), "i", to="unreduced"), "i"), _along("i"), (2, 3)),
    Row("pcast to unreduced, and psum_scatter",
        lambda x: lax.psum_scatter(lax.pcast(_either(x), "i", to="unreduced"), "i", tiled=True),
        lambda x: torch.cat(_along("i")(x).chunk(2, 2)), (2, 3)),
    Row("all_gather to reduced",
        lambda x: lax.all_gather(_either(x), "i", tiled=True, to="reduced"), _gathered, (2, 3)),
    Row("axis_index", lambda x: x * lax.axis_index(("i", "j")), lambda x: x * _rank("i", "j"), (2, 3)),
    Row("axis_index backwards", lambda x: x * lax.axis_index(("j", "i")),
        lambda x: x * _rank("j", "i"), (2, 3), typical=False),
    Row("axis_size", lambda x: x * lax.axis_size(AXES), lambda x: x * 4, (2, 3), typical=False),
    Row("stop_gradient", lambda x: x * lax.psum(lax.stop_gradient(x), "i"),
        lambda x: x * _along("i")(x.detach()), (2, 3)),
)  # fmt: skip
