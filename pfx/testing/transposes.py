"""`assert_transposes`: every transform of a linear function, checked against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pfx.compiler.signature import name_of
from pfx.errors import message
from pfx.testing.compare import failure, tolerance
from pfx.testing.flat import (
    Flat,
    Tensors,
    assert_agree,
    draw_like,
    flat_function,
    inner,
    magnitude,
    push_forward,
)

# (what is compared, found, expected, names, the least scale)
Claim = tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[str], float]


def assert_transposes(
    fn: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype | None = torch.float64,
    batch: int = 3,
    skip: Sequence[str] = (),
    rtol: float | None = None,
    seed: int = 0,
) -> None:
    """Assert that a linear function transforms as its definition says.

    With A the function and x, y random, the laws are, by name:

    - ``"linear"``: A(2x - 3z) = 2 A(x) - 3 A(z).
    - ``"transpose"``: ⟨A(x), y⟩ = ⟨x, Aᵀ(y)⟩ for each argument alone, Aᵀ from `torch.func.vjp`.
    - ``"jvp"``: the derivative of A along x is A(x).
    - ``"transpose of the transpose"``: Aᵀᵀ = A.
    - ``"vmap"``: A over a batch, of all arguments and of each alone, is a loop of A.
    - ``"vmap of the transpose"``: the same of Aᵀ.

    Args:
        fn: linear in all its float arguments together: a collective in a `pfx.shard_map`, a reshape,
            a product with a constant. Pytrees in and out; other arguments are held fixed.
        args: tensors, Arrays, or `pfx.ShapeDtype`, which is drawn.
        dtype: float arguments are cast to it (complex ones to its complex kind); None keeps theirs.
        batch: the size of the mapped dim.
        skip: names of laws to leave out.
        rtol: relative tolerance; by default 1e-10 in float64, 1e-5 in float32.
        seed: of the draws.

    Raises:
        AssertionError: naming the law, and the argument or result for which it fails.

    >>> assert_transposes(lambda x: x.cumsum(0).flip(1), torch.ones(3, 2))
    >>> try:
    ...     assert_transposes(lambda x: x + 1, torch.ones(3))
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[0])
    assert_transposes(<lambda>): linear: output is wrong.
    """
    where = f"assert_transposes({name_of(fn)}):"
    unknown = [law for law in skip if law not in LAWS]
    if unknown:
        fix = f"some of {', '.join(map(repr, LAWS))}"
        raise ValueError(message(where, f"skip={list(skip)!r} names no law.", fix=fix))
    generator = torch.Generator().manual_seed(seed)
    flat = flat_function(where, fn, args, dtype, generator)
    limit = max(tolerance(rtol, x.dtype) for x in (*flat.at, *flat.outs))
    for law, claims in LAWS.items():
        if law in skip:
            continue
        for what, found, expected, names, least in _run(where, law, claims, flat, generator, batch):
            assert_agree(where, f"{law}{what}", found, expected, names, limit, least)


Law = Callable[[Flat, torch.Generator, int], Iterator[Claim]]


def _run(
    where: str, law: str, claims: Law, flat: Flat, generator: torch.Generator, batch: int
) -> Iterator[Claim]:
    """The claims of a law; what a transform raises is a failure of that law."""
    try:
        yield from claims(flat, generator, batch)
    except Exception as error:
        said = str(error).split("\n", 1)[0]
        what = f"{law}: raised {type(error).__name__}."
        raise failure(where, what, said, f'fix: or leave it out, skip=("{law}",)') from error


def _linear(flat: Flat, generator: torch.Generator, _: int) -> Iterator[Claim]:
    x, z = draw_like(flat.at, generator), draw_like(flat.at, generator)
    mixed = flat.call(*(2 * a - 3 * b for a, b in zip(x, z, strict=True)))
    apart = [2 * a - 3 * b for a, b in zip(flat.call(*x), flat.call(*z), strict=True)]
    yield "", mixed, apart, flat.out_names, 0.0


def _transpose(flat: Flat, generator: torch.Generator, _: int) -> Iterator[Claim]:
    y = draw_like(flat.outs, generator)
    pulled = _pull(flat)(*y)
    for i, (x, back, name) in enumerate(
        zip(draw_like(flat.at, generator), pulled, flat.names, strict=True)
    ):
        alone = [x if j == i else torch.zeros_like(other) for j, other in enumerate(flat.at)]
        out = flat.call(*alone)
        scale = max(magnitude(out, y), magnitude([x], [back]))
        found, expected = [inner([x], [back])], [inner(out, y)]
        yield "", found, expected, [f"⟨x, Aᵀ(y)⟩ for x = {name}"], scale


def _jvp(flat: Flat, generator: torch.Generator, _: int) -> Iterator[Claim]:
    along = draw_like(flat.at, generator)
    tangents = push_forward(flat.call, flat.at, along)
    yield "", tangents, flat.call(*along), flat.out_names, 0.0


def _twice(flat: Flat, generator: torch.Generator, _: int) -> Iterator[Claim]:
    x, y = draw_like(flat.at, generator), draw_like(flat.outs, generator)
    again = torch.func.vjp(_pull(flat), *y)[1](x)
    yield "", again, flat.call(*x), flat.out_names, 0.0


def _vmap(flat: Flat, generator: torch.Generator, batch: int) -> Iterator[Claim]:
    yield from _mapped(flat.call, flat.at, flat.names, flat.out_names, generator, batch)


def _vmap_transpose(flat: Flat, generator: torch.Generator, batch: int) -> Iterator[Claim]:
    yield from _mapped(_pull(flat), flat.outs, flat.out_names, flat.names, generator, batch)


def _mapped(
    call: Callable[..., Tensors],
    at: Tensors,
    names: Sequence[str],
    out_names: Sequence[str],
    generator: torch.Generator,
    batch: int,
) -> Iterator[Claim]:
    """A function over a batch of all operands, then of each alone, against a loop."""
    every = tuple(range(len(at)))
    chosen: list[tuple[int, ...]] = [every, *((i,) for i in every if len(at) > 1)]
    for which in chosen:
        xs = draw_like(
            [x.expand(batch, *x.shape) if i in which else x for i, x in enumerate(at)], generator
        )
        dims = tuple(0 if i in which else None for i in every)
        found = torch.func.vmap(call, in_dims=dims)(*xs)
        rows = [call(*(x[n] if i in which else x for i, x in enumerate(xs))) for n in range(batch)]
        expected = [torch.stack(column) for column in zip(*rows, strict=True)]
        over = ", ".join(names[i] for i in which)
        yield f" over {over}", found, expected, out_names, 0.0


def _pull(flat: Flat) -> Callable[..., Tensors]:
    """The transpose, as a function of the results' cotangents."""
    return lambda *y: torch.func.vjp(flat.call, *flat.at)[1](y)


LAWS: Mapping[str, Law] = MappingProxyType(
    {
        "linear": _linear,
        "transpose": _transpose,
        "jvp": _jvp,
        "transpose of the transpose": _twice,
        "vmap": _vmap,
        "vmap of the transpose": _vmap_transpose,
    }
)
