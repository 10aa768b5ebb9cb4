"""Every transform, and every pair, through every primitive: right, or a documented error; never wrong.

Two tables (transforms in `each_device`, primitives in `primitives` and `structures`) and one law: a
transform of x ↦ sin(op(x²)) w is that of the same function written densely. It is applied to a manual
region from outside, and by the devices inside one, to a value that varies and to one that does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pfx import P
from pfx.errors import TraceError
from pfx.testing import assert_gradients
from tests.sim.each_device import PAIRS, SINGLE, Stacked, Transform, Whole
from tests.sim.manual import alone, assert_close, compiled, complains, draw, mapped
from tests.sim.primitives import AXES, COLLECTIVES, MESH, TYPES, Row, everywhere
from tests.sim.structures import GLOBAL, INSIDE

LOCAL = (*COLLECTIVES, *TYPES, *INSIDE)
TRANSFORMS = {**SINGLE, **PAIRS}
# Where a transform is: around a function of the global value; around a region; in one, of an operand
# that varies over both axes, and of one that varies over none.
SIDES = ("global", "around", "varying", "invarying")


@dataclass(frozen=True)
class Cell:
    """A function through a primitive on one side, and its dense meaning."""

    row: Row
    side: str

    def __str__(self) -> str:
        return f"{self.row.name}, {self.side}"

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A value, and weights like the result."""
        lead = {"global": (), "invarying": (1, 1)}.get(self.side, (2, 2))
        x = draw(*lead, *self.row.shape)
        y = self.row.meaning(x)
        return x, draw(*(y if self.side == "global" else everywhere(y)).shape, seed=1)

    def found(
        self, transform: Transform, shape: torch.Size, x: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor:
        """The transform of the function through the primitive, which has the dense result's shape."""
        if self.side == "global":
            return transform(Whole(), lambda x: torch.sin(self.row.apply(x**2)) * w)(x)
        if self.side == "around":
            region = mapped(_of_blocks(self.function), MESH, P(*AXES), P(*AXES))
            return transform(Whole(), lambda x: region(x, w))(x)

        def devices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return transform(Whole(), lambda x: self.function(x, w))(x)

        out = P(*(axis if n > 1 else None for axis, n in zip(AXES, shape, strict=False)))
        given = P(*AXES) if self.side == "varying" else P()
        return mapped(_of_blocks(devices), MESH, (given, P(*AXES)), out)(x, w)

    def function(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """What one device computes."""
        return torch.sin(self.row.apply(x**2)) * w

    def expected(self, transform: Transform, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The transform of the function written densely."""
        ways = Stacked() if self.side in ("varying", "invarying") else Whole()
        return transform(ways, lambda x: torch.sin(self.row.meaning(x**2)) * w)(x)


def _of_blocks(fn: Any) -> Any:
    """Take the mesh's dims, of size 1 on a device, from operands, and give them to the result."""

    def apply(*blocks: torch.Tensor) -> torch.Tensor:
        out = fn(*(block.reshape(block.shape[2:]) for block in blocks))
        return out.reshape(1, 1, *out.shape)

    return apply


CELLS = [
    *(Cell(row, "global") for row in GLOBAL),
    *(Cell(row, "around") for row in LOCAL if "varying" in row.takes),
    *(Cell(row, "varying") for row in LOCAL if "varying" in row.takes),
    *(Cell(row, "invarying") for row in LOCAL if "invarying" in row.takes and row.typical),
]


@dataclass(frozen=True)
class Refusal:
    """Cells that are errors, and why."""

    rows: str
    transforms: str
    error: type[Exception]
    words: tuple[str, ...]
    why: str


_DERIVATIVE = "grad|vjp|jvp|jac|hessian"
REFUSED = (
    Refusal(
        r"p(max|min) over", _DERIVATIVE, TraceError, ("stop_gradient",),
        "which device holds the extremum is not differentiated, as in JAX",
    ),
    Refusal(
        r"custom_vjp", r"(^|of )(jvp|jacfwd)( of vmap)?$", TypeError, ("jvp", "cube"),
        "a function with a backward rule alone has no forward derivative, as in JAX",
    ),
)  # fmt: skip


def refusal(cell: Cell, name: str) -> Refusal | None:
    """Why a cell is an error, if it is to be one."""
    for one in REFUSED:
        if re.search(one.rows, cell.row.name) and re.search(one.transforms, name):
            return one
    return None


Run = Callable[..., torch.Tensor]


def holds(cell: Cell, name: str, run: Run = alone) -> None:
    """Assert that a cell is right, or the error that the table says."""
    transform, (x, w) = TRANSFORMS[name], cell.example()
    expected, refused = cell.expected(transform, x, w), refusal(cell, name)
    find = lambda x, w: cell.found(transform, expected.shape, x, w)
    try:
        if refused is None:
            assert_close(run(find, MESH, x, w), expected)
            return
        with complains(refused.error, *refused.words):
            run(find, MESH, x, w)
    except BaseException as error:
        error.add_note(f"{name} through {cell}")
        raise


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_transform(cell: Cell) -> None:
    for name in SINGLE:
        holds(cell, name)


def spread(cells: list[Cell], names: Mapping[str, Any], each: int) -> list[Any]:
    """Some names for each cell, so that each name meets about as many, of every kind."""
    order = list(names)
    places = [
        (cell, order[(5 * i + 7 * j) % len(order)])
        for i, cell in enumerate(cells)
        for j in range(each)
    ]
    return [pytest.param(cell, name, id=f"{name} through {cell}") for cell, name in places]


TYPICAL = [cell for cell in CELLS if cell.row.typical]
# Cells that have been wrong, besides the ones that are spread.
ONCE_WRONG = {
    "remat": ("vmap of vjp", "vjp of vjp", "grad of vjp", "jacfwd of vjp"),
    "all_gather to reduced": ("vjp of jvp", "jvp of grad", "jvp of vmap"),
    "pcast to reduced": ("vjp of jvp", "grad of jvp", "jvp of grad"),
}


@pytest.mark.parametrize(("cell", "name"), spread(TYPICAL, PAIRS, 2))
def test_pairs(cell: Cell, name: str) -> None:
    holds(cell, name)


@pytest.mark.parametrize("cell", [c for c in TYPICAL if c.row.name in ONCE_WRONG], ids=str)
def test_pairs_that_were_wrong(cell: Cell) -> None:
    for name in ONCE_WRONG[cell.row.name]:
        holds(cell, name)


# Compiled, every typical row meets one transform on one side: the table's diagonal.
DIAGONAL = [cell for i, cell in enumerate(TYPICAL) if cell.side in ("global", SIDES[1 + i % 3])]


UNTRACEABLE = ("vmap of hessian", "vmap of jacfwd")


@pytest.mark.parametrize(("cell", "name"), spread(DIAGONAL, TRANSFORMS, 1))
def test_compiled(cell: Cell, name: str) -> None:
    try:
        holds(cell, name, compiled)
    except TraceError as error:
        # torch 2.13 asserts where it should trace some of these; alone they are right.
        assert name in UNTRACEABLE and "torch cannot trace" in str(error)


# Finite differences see through a stop_gradient.
SMOOTH = [
    cell
    for cell in TYPICAL
    if cell.side in ("global", "around")
    and cell.row.name != "stop_gradient"
    and not refusal(cell, "vjp")
]
SMOOTH = SMOOTH if "PFX_EXAMPLES" in os.environ else SMOOTH[::2]


@pytest.mark.parametrize("cell", SMOOTH, ids=str)
def test_derivatives_by_finite_differences(cell: Cell) -> None:
    """First and second ones, in every pair of modes."""
    x, w = cell.example()
    modes = ["reverse"] if refusal(cell, "jvp") else ["reverse", "forward"]
    through: Transform = lambda _, f: f
    # Near zero, where the fifth derivatives are small.
    assert_gradients(lambda x: cell.found(through, w.shape, x, w), 0.3 * x, modes=modes)
