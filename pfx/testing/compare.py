"""How far two trees of tensors may differ, and what is said when they do.

A leaf may differ by ``atol + rtol * scale``, where the scale is its own largest element. Among
derivatives, one that is small next to its siblings is measured by `FLOOR` times the largest of them:
a gradient that is zero but for rounding has no size of its own. Among outputs none is: a mask of
-1e9 must not excuse a wrong loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch

from pfx import tree
from pfx.api import device_get
from pfx.array import Array
from pfx.errors import message
from pfx.mesh import Mesh
from pfx.spec import distinct_coordinates, local_slices

Tolerance = float | Mapping[torch.dtype, float] | None

FLOOR = 1e-3
RTOL: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 1e-10,
        torch.complex128: 1e-10,
        torch.float32: 1e-5,
        torch.complex64: 1e-5,
        torch.float16: 4e-3,
        torch.bfloat16: 3e-2,
    }
)


def is_float(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex tensor (or Array, or `ShapeDtype`)."""
    dtype = getattr(leaf, "dtype", None)
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def tolerance(given: Tolerance, dtype: torch.dtype) -> float:
    """The relative tolerance of a dtype: the one given, or the one of `RTOL`; integers are exact.

    >>> tolerance(None, torch.float32), tolerance({torch.float32: 1e-3}, torch.float32)
    (1e-05, 0.001)
    """
    if isinstance(given, (int, float)):
        return float(given) if dtype.is_floating_point or dtype.is_complex else 0.0
    default = RTOL.get(dtype, 0.0)
    return default if given is None else given.get(dtype, default)


def size(x: torch.Tensor) -> float:
    """The largest absolute value among the finite elements."""
    finite = torch.isfinite(x)
    return float(_wide(x)[finite].abs().max()) if bool(finite.any()) else 0.0


@dataclass(frozen=True)
class Difference:
    """Where a leaf differs most from what it should be."""

    largest: float
    scale: float
    allowed: float
    index: tuple[int, ...]
    found: Any
    expected: Any
    wrong: int
    numel: int
    factor: float | None

    def lines(self, found: str, expected: str) -> list[str]:
        """The numbers, as an error shows them; `found` and `expected` name the two sides."""
        relative = self.largest / self.scale if self.scale else math.inf
        at = f"at index {self.index}: " if self.index else ""
        return [
            f"largest difference {self.largest:.3g}, {relative:.3g} of the scale {self.scale:.3g}; "
            f"allowed {self.allowed:.3g}.",
            f"{at}{self.found!r} {found}, {self.expected!r} {expected}; "
            f"{self.wrong} of {self.numel} elements differ.",
        ]


def difference(
    found: torch.Tensor, expected: torch.Tensor, allowed: float, scale: float
) -> Difference | None:
    """Compare two tensors of one shape; None when no element differs by more than `allowed`."""
    got, want = _wide(found), _wide(expected).to(found.device)
    gap = (got - want).abs().double().abs()  # the least int64 has no absolute value of its own
    same = (got == want) | (got.isnan() & want.isnan())
    gap = torch.where(same, 0.0, torch.where(gap.isnan(), math.inf, gap))
    wrong = gap > allowed
    if not bool(wrong.any()):
        return None
    at = int(gap.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), gap.shape))
    return Difference(
        float(gap.max()),
        scale,
        allowed,
        index,
        found[index].item(),
        expected[index].item(),
        int(wrong.sum()),
        gap.numel(),
        _factor(got, want, scale),
    )


def scales(leaves: Sequence[torch.Tensor], floor: float) -> list[float]:
    """The scale of each leaf: its own size, or `floor` of its largest sibling's if that is more.

    >>> scales([torch.tensor([-2.0, 1.0]), torch.zeros(3)], 0.001)
    [2.0, 0.002]
    """
    sizes = [size(leaf) for leaf in leaves]
    least = floor * max(sizes, default=0.0)
    return [max(own, least) for own in sizes]


def tree_errors(
    found: Any,
    expected: Any,
    *,
    rtol: Tolerance = None,
    atol: Tolerance = None,
    floor: float = 0.0,
) -> Iterator[tuple[tree.Path, list[str], bool]]:
    """Yield (path, lines, True) for each leaf of `found` that is not that of `expected`.

    `found` may have Array leaves. Where the trees differ already, it is ((), lines, False) alone.
    """
    found_pairs, found_def = tree.flatten_with_path(found)
    want_pairs, want_def = tree.flatten_with_path(expected)
    if found_def != want_def:
        paths = [", ".join(map(tree.path_string, _paths(p))) for p in (found_pairs, want_pairs)]
        yield (), [f"the mesh gives the leaves: {paths[0]}", f"one device gives: {paths[1]}"], False
        return
    whole = [torch.as_tensor(device_get(leaf)) for _, leaf in found_pairs]
    wants = [torch.as_tensor(leaf) for _, leaf in want_pairs]
    for (path, leaf), got, want, scale in zip(
        found_pairs, whole, wants, scales(wants, floor), strict=True
    ):
        if got.shape != want.shape or got.dtype != want.dtype:
            forms = [f"{str(x.dtype)[6:]}{list(x.shape)}" for x in (got, want)]
            yield path, [f"it is {forms[0]} on the mesh, {forms[1]} on one device."], True
            continue
        absolute = 0.0 if atol is None else tolerance(atol, want.dtype)
        worst = difference(got, want, absolute + tolerance(rtol, want.dtype) * scale, scale)
        if worst is not None:
            lines = worst.lines("on the mesh", "on one device")
            if isinstance(leaf, Array):
                lines += _placement(leaf, worst)
            yield path, lines, True


def mesh_call(mesh: Mesh) -> str:
    """The line that makes a mesh.

    >>> mesh_call(Mesh((("x", 2),)))
    'pfx.make_mesh(x=2)'
    """
    words = [f"{name}={n}" for name, n in mesh.axes]
    deals = ", ".join(f"{axis!r}: pfx.{deal!r}" for axis, deal in mesh.deals)
    words += [f"deals={{{deals}}}"] if deals else []
    words += [f"kind={mesh.kind!r}"] if mesh.kind != "simulated" else []
    return f"pfx.make_mesh({', '.join(words)})"


def failure(where: str, what: str, *details: str) -> AssertionError:
    """The error that every assertion here raises."""
    return AssertionError(message(where, what, *details))


def _paths(pairs: Sequence[tuple[tree.Path, Any]]) -> list[tree.Path]:
    return [path or ("the result itself",) for path, _ in pairs]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the widest dtype of the kind."""
    x = x.detach()
    if x.dtype.is_complex:
        return x.to(torch.complex128)
    return x.double() if x.dtype.is_floating_point else x.long()


def _placement(leaf: Array, worst: Difference) -> list[str]:
    """The layout of an Array, the devices that hold the worst element, and a factor's meaning."""
    mesh = leaf.mesh
    held = [
        " ".join(f"{axis}={at}" for axis, at in place.items())
        for place in distinct_coordinates(leaf.layout, mesh)
        if all(
            i in (range(part.start, part.stop) if isinstance(part, slice) else part)
            for i, part in zip(
                worst.index, local_slices(leaf.shape, leaf.layout, mesh, place), strict=True
            )
        )
    ]
    lines = [f"layout: {leaf.layout.text(leaf.shape, leaf.dtype)} on {mesh}, spec {leaf.spec}"]
    if held and held[0]:
        lines.append(f"held by the devices at {held[0]}.")
    if worst.factor is not None:
        owed = _owed(worst.factor, mesh)
        if owed or worst.numel > 1:
            lines.append(f"every element is {worst.factor:.6g} times one device's{owed or '.'}")
    return lines


def _owed(factor: float, mesh: Mesh) -> str:
    """Which axes have the size of a constant factor: a sum over them too many or too few."""
    names = [name for name, n in mesh.axes if n > 1]
    groups = [group for k in range(1, len(names) + 1) for group in combinations(names, k)]
    fits = [
        " and ".join(map(repr, group))
        for group in groups
        if any(
            math.isclose(factor, f, rel_tol=1e-4)
            for f in (mesh.count(group), 1 / mesh.count(group))
        )
    ]
    return f": is a sum over {', or '.join(fits)}, missing or made twice?" if fits else ""


def _factor(got: torch.Tensor, want: torch.Tensor, scale: float) -> float | None:
    """The number that `got` is a multiple of `want` by, if there is one."""
    if not got.dtype.is_floating_point or not scale:
        return None
    at = want.abs().argmax()
    factor = float(got.flatten()[at] / want.flatten()[at])
    close = math.isfinite(factor) and factor and size(got - factor * want) <= 1e-5 * size(got)
    return factor if close else None
