"""Hypothesis strategies for meshes, shapes, tensors, and specs that fit a tree of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pfx import tree
from pfx.errors import TraceError, message
from pfx.mesh import Mesh
from pfx.spec import P
from pfx.testing.compare import is_float

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

AXES = ("x", "y", "z")


def hypothesis_strategies(where: str) -> Any:
    """Import hypothesis, or say how to get it."""
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            message(
                f"{where}:",
                "draws with hypothesis, which is not installed.",
                fix="pip install 'pfx[test]'",
            )
        ) from error
    return strategies


def meshes(
    *,
    max_devices: int = 8,
    max_axes: int = 3,
    min_devices: int = 1,
    axis_names: Sequence[str] = AXES,
) -> SearchStrategy[Mesh]:
    """Draw simulated meshes; they shrink to few axes of few devices.

    Args:
        max_devices: of all axes together.
        max_axes: at least one axis is drawn, of any size from 1 on.
        min_devices: of all axes together.
        axis_names: the names, of which a mesh with n axes has the first n.

    >>> from hypothesis import find, settings
    >>> print(find(meshes(), lambda mesh: mesh.size > 3 and len(mesh.axes) > 1))
    x=1 y=4
    """
    st = hypothesis_strategies("pfx.testing.meshes")
    most = min(max_axes, len(axis_names))
    shapes = [
        sizes
        for count in range(1, most + 1)
        for sizes in _sizes(count, max_devices)
        if math.prod(sizes) >= min_devices
    ]
    shapes.sort(key=lambda sizes: (len(sizes), math.prod(sizes), sizes))
    return st.sampled_from([Mesh(tuple(zip(axis_names, sizes, strict=False))) for sizes in shapes])


def _sizes(count: int, most: int) -> list[tuple[int, ...]]:
    """Every tuple of `count` axis sizes whose product is at most `most`."""
    if count == 0:
        return [()]
    return [(n, *rest) for n in range(1, most + 1) for rest in _sizes(count - 1, most // n)]


def shapes(
    mesh: Mesh, *, min_dims: int = 0, max_dims: int = 3, max_local: int = 3
) -> SearchStrategy[tuple[int, ...]]:
    """Draw shapes with dims that some axes of a mesh divide; they shrink to few and small dims.

    Args:
        mesh: each dim is the product of some of its axes, none or all, times a local size.
        min_dims: the least rank.
        max_dims: the largest rank.
        max_local: the largest local size.

    >>> from hypothesis import find
    >>> from pfx import make_mesh
    >>> find(shapes(make_mesh(x=2, y=3)), lambda shape: 6 in shape)
    (6,)
    """
    st = hypothesis_strategies("pfx.testing.shapes")
    counts = {1}
    for _, n in mesh.axes:
        counts |= {n * count for count in counts}
    dims = sorted({count * local for count in counts for local in range(1, max_local + 1)})
    return st.lists(st.sampled_from(dims), min_size=min_dims, max_size=max_dims).map(tuple)


def specs(value: Any, mesh: Mesh, *, divisible: bool = True) -> SearchStrategy[Any]:
    """Draw a pytree of `P` for a pytree of tensors, Arrays or `ShapeDtype`; they shrink to ``P()``.

    Each axis splits at most one dim of a leaf; a dim may have several, in any order.

    Args:
        value: the pytree; each leaf has a shape.
        mesh: whose axes the specs name.
        divisible: only specs whose axes divide the dims; False draws misfits too.

    Raises:
        TraceError: for a leaf without a shape.

    >>> from hypothesis import find
    >>> from pfx import make_mesh
    >>> tensors_of = {"w": torch.ones(8, 4), "b": torch.ones(4)}
    >>> find(specs(tensors_of, make_mesh(x=2, y=4)), lambda found: len(found["b"]) == 1)
    {'b': P('x'), 'w': P()}
    """
    st = hypothesis_strategies("pfx.testing.specs")
    pairs, treedef = tree.flatten_with_path(value)
    for path, leaf in pairs:
        if not hasattr(leaf, "shape"):
            where = f"pfx.testing.specs: value{tree.path_string(path)}"
            fix = "pass tensors or pfx.ShapeDtype((8, 4))"
            raise TraceError(message(where, f"is {leaf!r}, which has no shape.", fix=fix))
    leaves = [_spec(tuple(leaf.shape), mesh, divisible=divisible) for _, leaf in pairs]
    return st.tuples(*leaves).map(lambda drawn: tree.unflatten(treedef, drawn))


def _spec(shape: tuple[int, ...], mesh: Mesh, *, divisible: bool) -> SearchStrategy[P]:
    st = hypothesis_strategies("pfx.testing.specs")

    def build(draw: DrawFn) -> P:
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis in draw(st.permutations(mesh.axis_names)):
            fits = [
                dim
                for dim, axes in enumerate(dims)
                if not divisible or shape[dim] % mesh.count((*axes, axis)) == 0
            ]
            at = draw(st.sampled_from([None, *fits]))
            if at is not None:
                dims[at] = (*dims[at], axis)
        entries = [axes[0] if len(axes) == 1 else axes or None for axes in dims]
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)

    return st.composite(build)()


def tensors(
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]],
    dtype: torch.dtype = torch.float64,
    *,
    low: int = 0,
    high: int = 10,
) -> SearchStrategy[torch.Tensor]:
    """Draw tensors: normal numbers, integers in [low, high), or bools; they shrink to seed 0.

    Args:
        shape: of the tensors, or a strategy for it, such as `shapes`.
        dtype: float, complex, integer or bool.
        low: the least integer.
        high: one more than the largest integer.

    >>> from hypothesis import find
    >>> find(tensors((2,), torch.int64), lambda x: bool((x > 5).all())).shape
    torch.Size([2])
    """
    st = hypothesis_strategies("pfx.testing.tensors")
    given = st.just(tuple(shape)) if isinstance(shape, Sequence) else shape
    seeds = st.integers(0, 2**16)
    return st.builds(lambda dims, seed: values(dims, dtype, seed, low, high), given, seeds)


def values(
    shape: Sequence[int], dtype: torch.dtype, seed: int, low: int = 0, high: int = 10
) -> torch.Tensor:
    """The tensor that a seed stands for."""
    generator = torch.Generator().manual_seed(seed)
    if is_float(torch.empty((), dtype=dtype)):
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)
    most = 2 if dtype == torch.bool else high
    least = 0 if dtype == torch.bool else low
    return torch.randint(least, most, tuple(shape), generator=generator).to(dtype)
