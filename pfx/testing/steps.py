"""The lines that drawn programs are made of: each entry lists what it can do with the values at hand.

All are smooth (a kink or a tie hit exactly would have two right gradients) and grow slowly, so that
rounding stays rounding. Where a derivative would vanish but for rounding (the sum of a softmax), the
line is multiplied by its operand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pfx.mesh import Mesh

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Line = tuple[str, Shape]  # an expression and the shape of its value

MAX_DIMS = 4
MAX_NUMEL = 4096


def lines(kind: str, values: Shapes, mesh: Mesh) -> list[Line]:
    """Every line of a kind that fits the values; small results only.

    >>> lines("flip", {"a": (2, 3)}, Mesh((("x", 2),)))
    [('a.flip(0)', (2, 3)), ('a.flip(1)', (2, 3))]
    """
    found = STEPS[kind](values) if kind != "constrain" else _constrained(values, mesh)
    return [
        (text, shape)
        for text, shape in found
        if len(shape) <= MAX_DIMS and 0 < math.prod(shape) <= MAX_NUMEL
    ]


Step = Callable[[Shapes], list[Line]]


def _each(template: str) -> Step:
    """A line for every value, of its shape."""
    return lambda values: [(template.format(a=a), shape) for a, shape in values.items()]


def _along(template: str, shape_of: Callable[[Shape, int], Shape | None]) -> Step:
    """A line for every value and dim; `shape_of(shape, dim)` is None where it does not apply."""

    def step(values: Shapes) -> list[Line]:
        found = []
        for a, shape in values.items():
            for d, n in enumerate(shape):
                out = shape_of(shape, d)
                if out is not None:
                    at = "".join(f"{':, ' * d}")
                    text = template.format(a=a, d=d, n=n, half=n // 2, at=at, next=d + 1)
                    found.append((text, out))
        return found

    return step


def _pairs(template: str, shape_of: Callable[[Shape, Shape], Shape | None]) -> Step:
    """A line for every ordered pair of values that fit."""

    def step(values: Shapes) -> list[Line]:
        found = []
        for (a, left), (b, right) in itertools.product(values.items(), repeat=2):
            out = shape_of(left, right)
            if out is not None:
                found.append((template.format(a=a, b=b), out))
        return found

    return step


def _broadcast(left: Shape, right: Shape) -> Shape | None:
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(shape)) + shape for shape in (left, right)]
    if any(m != n and 1 not in (m, n) for m, n in zip(*padded, strict=True)):
        return None
    return tuple(max(m, n) for m, n in zip(*padded, strict=True))


def _matmul(left: Shape, right: Shape) -> Shape | None:
    if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
        return None
    lead = _broadcast(left[:-2], right[:-2])
    return None if lead is None else (*lead, left[-2], right[-1])


def _matmul_transposed(left: Shape, right: Shape) -> Shape | None:
    return _matmul(left, (*right[:-2], right[-1], right[-2])) if len(right) > 1 else None


def _with(shape: Shape, dim: int, *sizes: int) -> Shape:
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _same(shape: Shape, _: int) -> Shape:
    return shape


def _longer(shape: Shape, dim: int) -> Shape | None:
    """For lines that need more than one element along the dim."""
    return shape if shape[dim] > 1 else None


def _swapped(shape: Shape, dim: int) -> Shape | None:
    if dim + 1 == len(shape):
        return None
    return (*shape[:dim], shape[dim + 1], shape[dim], *shape[dim + 2 :])


def _merged(shape: Shape, dim: int) -> Shape | None:
    if dim + 1 == len(shape):
        return None
    return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _even(shape: Shape, dim: int, *sizes: int) -> Shape | None:
    return _with(shape, dim, *sizes) if shape[dim] % 2 == 0 else None


def _joined(values: Shapes) -> list[Line]:
    found = []
    for (a, left), (b, right) in itertools.product(values.items(), repeat=2):
        for d in range(min(len(left), len(right))):
            if len(left) == len(right) and _with(left, d) == _with(right, d):
                text = f"torch.cat([{a}, {b}], {d})"
                found.append((text, _with(left, d, left[d] + right[d])))
    return found


def _scans(values: Shapes) -> list[Line]:
    """Loops over the leading dim, alone or with a closed-over value of the slice's shape."""
    found = []
    for a, shape in values.items():
        if not shape:
            continue
        bodies = ["torch.tanh(c + x)", *(f"torch.tanh(c + x * {b})" for b, s in values.items()
                                         if s == shape[1:])]  # fmt: skip
        for body in bodies:
            loop = f"pfx.scan(lambda c, x: ({body}, c * x), 0.5 * {a}[0], {a})"
            found += [(f"{loop}[0]", shape[1:]), (f"{loop}[1]", shape)]
    return found


def _constrained(values: Shapes, mesh: Mesh) -> list[Line]:
    found = []
    for a, shape in values.items():
        for d, n in enumerate(shape):
            for axis in mesh.axis_names:
                if n % mesh.shape[axis] == 0:
                    entries = ", ".join([*(["None"] * d), repr(axis)])
                    found.append((f"pfx.constrain({a}, P({entries}))", shape))
    return found


STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "tanh": _each("torch.tanh({a})"),
        "sigmoid": _each("torch.sigmoid({a})"),
        "softplus": _each("F.softplus({a})"),
        "add": _pairs("{a} + {b}", _broadcast),
        "subtract": _pairs("{a} - 0.5 * {b}", _broadcast),
        "multiply": _pairs("{a} * torch.tanh({b})", _broadcast),
        "matmul": _pairs("{a} @ {b}", _matmul),
        "matmul transposed": _pairs("{a} @ {b}.mT", _matmul_transposed),
        "sum": _along("{a}.sum({d})", lambda shape, d: _with(shape, d)),
        "mean": _along("{a}.mean({d}, keepdim=True)", lambda shape, d: _with(shape, d, 1)),
        "logsumexp": _along("{a}.logsumexp({d})", lambda shape, d: _with(shape, d)),
        "softmax": _along("{a} * torch.softmax({a}, {d})", _same),
        "cumsum": _along("{a}.cumsum({d})", _same),
        "layer norm": lambda values: [
            (f"{a} * F.layer_norm({a}, {a}.shape[-1:], eps=1.0)", shape)
            for a, shape in values.items()
            if shape
        ],
        "total": lambda values: [(f"{a}.sum()", ()) for a in values],
        "transpose": _along("{a}.transpose({d}, {next})", _swapped),
        "flatten": _along("{a}.flatten({d}, {next})", _merged),
        "unflatten": _along(
            "{a}.unflatten({d}, (2, {half}))", lambda shape, d: _even(shape, d, 2, shape[d] // 2)
        ),
        "unsqueeze": _along("{a}.unsqueeze({d})", lambda shape, d: _with(shape, d, 1, shape[d])),
        "stack": _pairs("torch.stack([{a}, {b}])", lambda a, b: (2, *a) if a == b else None),
        "cat": _joined,
        "slice": _along(
            "{a}[{at}1:]",
            lambda shape, d: _with(shape, d, shape[d] - 1) if shape[d] > 1 else None,
        ),
        "half": _along("{a}[{at}:{half}]", lambda shape, d: _even(shape, d, shape[d] // 2)),
        "stride": _along("{a}[{at}::2]", lambda shape, d: _with(shape, d, (shape[d] + 1) // 2)),
        "select": _along("{a}[{at}0]", lambda shape, d: _with(shape, d)),
        "take": _along(
            "{a}.index_select({d}, torch.tensor([1, 0, 1]))",
            lambda shape, d: _with(shape, d, 3) if shape[d] > 1 else None,
        ),
        "flip": _along("{a}.flip({d})", _longer),
        "roll": _along("{a}.roll(1, {d})", _longer),
        "pad": lambda values: [
            (f"F.pad({a}, (1, 0))", (*shape[:-1], shape[-1] + 1))
            for a, shape in values.items()
            if shape
        ],
        "tril": lambda values: [
            (f"{a}.tril()", shape) for a, shape in values.items() if len(shape) > 1
        ],
        "remat": _each("pfx.remat(lambda u: torch.tanh(u) * u)({a})"),
        "scan": _scans,
        "constrain": lambda values: [],
    }
)
