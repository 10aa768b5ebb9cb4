"""Manual regions for tests: run alone and compiled, and what each collective means, said densely.

A reference collective takes the list of the values that the devices of a group hold, in the order of
their ranks, and returns the list of what they hold after it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax

Tensors = list[torch.Tensor]


def alone(fn: Callable[..., Any], mesh: pfx.Mesh, *args: Any) -> Any:
    """Call a function of global tensors that has a shard_map inside, with nothing around it."""
    return fn(*args)


def compiled(fn: Callable[..., Any], mesh: pfx.Mesh, *args: Any) -> Any:
    """Compile the same, run it with every copy computed and compared, and get global tensors."""
    return pfx.device_get(pfx.jit(fn, mesh=mesh, check=True)(*args))


EACH_WAY = pytest.mark.parametrize("run", [alone, compiled])


def mapped(
    fn: Callable[..., Any], mesh: pfx.Mesh, in_specs: Any, out_specs: Any, **options: Any
) -> Callable[..., Any]:
    """`pfx.shard_map` with its specs by position."""
    return pfx.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


@contextlib.contextmanager
def complains(error: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[None]:
    """Expect an error whose text has all the words."""
    with pytest.raises(error) as found:
        yield
    missing = [word for word in words if word not in str(found.value)]
    assert not missing, f"{missing} not in: {found.value}"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Any, expected: Any) -> None:
    """Assert that two trees of float64 tensors agree to 1e-10."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@dataclass(frozen=True)
class Case:
    """A collective, what it means, and a local shape that it takes from `n` devices."""

    name: str
    apply: Callable[[torch.Tensor, Any], torch.Tensor]
    meaning: Callable[[Tensors], Tensors]
    shape: Callable[[int], tuple[int, ...]]

    def dense(self, x: torch.Tensor, mesh: pfx.Mesh, axis: str | Sequence[str]) -> torch.Tensor:
        """What all devices hold after it; the first dims of `x` are the mesh's."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        out: dict[tuple[int, ...], torch.Tensor] = {}
        rest = [a for a in mesh.axis_names if a not in axes]
        sizes = mesh.shape
        for fixed in itertools.product(*(range(sizes[a]) for a in rest)):
            group = []
            for ranks in itertools.product(*(range(sizes[a]) for a in axes)):
                place = dict(zip(rest, fixed, strict=True)) | dict(zip(axes, ranks, strict=True))
                group.append(tuple(place[a] for a in mesh.axis_names))
            results = self.meaning([x[place] for place in group])
            out.update(zip(group, results, strict=True))
        shape = [sizes[a] for a in mesh.axis_names]
        ordered = [out[place] for place in itertools.product(*map(range, shape))]
        return torch.stack(ordered).reshape(*shape, *ordered[0].shape)

    def on(self, mesh: pfx.Mesh, axis: str | Sequence[str]) -> Callable[..., torch.Tensor]:
        """The same by `pfx.shard_map`, which gives each device its block and collects the results."""
        lead = len(mesh.axis_names)

        def one(x: torch.Tensor) -> torch.Tensor:
            out = self.apply(x.reshape(x.shape[lead:]), axis)
            return out.reshape((1,) * lead + tuple(out.shape))

        return mapped(one, mesh, P(*mesh.axis_names), P(*mesh.axis_names))

    def example(self, mesh: pfx.Mesh, axis: str | Sequence[str], seed: int = 0) -> torch.Tensor:
        """A value whose first dims are the mesh's."""
        count = mesh.count((axis,) if isinstance(axis, str) else tuple(axis))
        return draw(*(mesh.shape[a] for a in mesh.axis_names), *self.shape(count), seed=seed)


def _sum(parts: Tensors) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def _all(make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda parts: [make(parts)] * len(parts)


def _scattered(dim: int, *, tiled: bool) -> Callable[[Tensors], Tensors]:
    def meaning(parts: Tensors) -> Tensors:
        total = _sum(parts)
        return list(total.chunk(len(parts), dim) if tiled else total.unbind(dim))

    return meaning


def _exchanged(split: int, concat: int, *, tiled: bool) -> Callable[[Tensors], Tensors]:
    def meaning(parts: Tensors) -> Tensors:
        count = len(parts)
        pieces = [list(p.chunk(count, split) if tiled else p.unbind(split)) for p in parts]
        join = torch.cat if tiled else torch.stack
        return [
            join([pieces[source][to] for source in range(count)], concat) for to in range(count)
        ]

    return meaning


def _permuted(pairs: Callable[[int], list[tuple[int, int]]]) -> Callable[[Tensors], Tensors]:
    def meaning(parts: Tensors) -> Tensors:
        sources = {to: start for start, to in pairs(len(parts))}
        return [
            parts[sources[k]] if k in sources else torch.zeros_like(parts[k])
            for k in range(len(parts))
        ]

    return meaning


def ring(count: int) -> list[tuple[int, int]]:
    """Each device sends to the next, the last to the first."""
    return [(k, (k + 1) % count) for k in range(count)]


def chain(count: int) -> list[tuple[int, int]]:
    """Each device sends to the next, the last to none."""
    return [(k, k + 1) for k in range(count - 1)]


def _gather(dim: int, *, tiled: bool, to: str = "varying") -> Case:
    return Case(
        f"all_gather-{dim}-{'tiled' if tiled else 'stacked'}-{to}",
        lambda x, axis: lax.all_gather(x, axis, dim=dim, tiled=tiled, to=to),
        _all(lambda parts: (torch.cat if tiled else torch.stack)(parts, dim)),
        lambda n: (2, 3),
    )


def _scatter(dim: int, *, tiled: bool) -> Case:
    def shape(n: int) -> tuple[int, ...]:
        sizes = [3, 3]
        sizes[dim] = 2 * n if tiled else n
        return tuple(sizes)

    return Case(
        f"psum_scatter-{dim}-{'tiled' if tiled else 'whole'}",
        lambda x, axis: lax.psum_scatter(x, axis, dim=dim, tiled=tiled),
        _scattered(dim, tiled=tiled),
        shape,
    )


def _exchange(split: int, concat: int, *, tiled: bool) -> Case:
    def shape(n: int) -> tuple[int, ...]:
        sizes = [3, 2, 3]
        sizes[split] = 2 * n if tiled else n
        return tuple(sizes)

    return Case(
        f"all_to_all-{split}-{concat}-{'tiled' if tiled else 'whole'}",
        lambda x, axis: lax.all_to_all(x, axis, split, concat, tiled=tiled),
        _exchanged(split, concat, tiled=tiled),
        shape,
    )


def _shift(name: str, pairs: Callable[[int], list[tuple[int, int]]]) -> Case:
    return Case(
        f"ppermute-{name}",
        lambda x, axis: lax.ppermute(x, axis, pairs(lax.axis_size(axis))),
        _permuted(pairs),
        lambda n: (2, 3),
    )


LINEAR = (
    Case("psum", lax.psum, _all(_sum), lambda n: (2, 3)),
    Case("pmean", lax.pmean, _all(lambda parts: _sum(parts) / len(parts)), lambda n: (2, 3)),
    *(_gather(d, tiled=t) for d in (0, 1, -1) for t in (False, True)),
    _gather(2, tiled=False),
    _gather(0, tiled=True, to="invarying"),
    _gather(-1, tiled=False, to="invarying"),
    *(_scatter(d, tiled=t) for d in (0, 1, -1) for t in (False, True)),
    *(_exchange(s, c, tiled=True) for s, c in ((0, 0), (0, 1), (1, 0), (1, 2), (2, 0), (-1, -2))),
    *(_exchange(s, c, tiled=False) for s, c in ((0, 0), (0, 1), (1, 0), (1, 2), (2, 0), (2, 2))),
    _shift("ring", ring),
    _shift("chain", chain),
    _shift("reverse", lambda n: [(k, n - 1 - k) for k in range(n)]),
    _shift("empty", lambda n: []),
    Case(
        "pshuffle",
        lambda x, axis: lax.pshuffle(x, axis, list(range(1, lax.axis_size(axis))) + [0]),
        _permuted(lambda n: [((k + 1) % n, k) for k in range(n)]),
        lambda n: (2, 3),
    ),
)
EXTREMA = (
    Case("pmax", lax.pmax, _all(lambda parts: torch.stack(parts).amax(0)), lambda n: (2, 3)),
    Case("pmin", lax.pmin, _all(lambda parts: torch.stack(parts).amin(0)), lambda n: (2, 3)),
)
