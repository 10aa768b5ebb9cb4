"""`assert_gradients`: forward and reverse derivatives against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx.compiler.signature import name_of
from pfx.errors import message
from pfx.testing.compare import FLOOR, failure, size
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

MODES = ("reverse", "forward")


def assert_gradients(
    fn: Callable[..., Any],
    *args: Any,
    order: int = 2,
    modes: Sequence[str] = MODES,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-6,
    step: float = 1e-4,
    seed: int = 0,
) -> None:
    """Assert that the derivatives of a function are those that finite differences find.

    In a random direction t of each float argument x, with y random, the central difference
    d = (8 (f(x + ht) - f(x - ht)) - (f(x + 2ht) - f(x - 2ht))) / 12h, right to h⁴, is compared to
    ``jvp(f, x, t)``, and ⟨y, d⟩ to ⟨vjp(f, x)(y), t⟩. At order 2 the same is asked of the first
    derivatives as functions of x: reverse over reverse, forward over reverse, and so on.

    Args:
        fn: a smooth function of pytrees near `args` (a kink within 2h of them is a failure); it may be
            a jit-ted function or a `pfx.shard_map`. Arguments that are not float are held fixed.
        args: tensors, Arrays, or `pfx.ShapeDtype`, which is drawn.
        order: how many times it is differentiated.
        modes: of ``"reverse"`` and ``"forward"``.
        dtype: float arguments are cast to it; below float64 the differences are too coarse for the
            default `rtol` and `step`.
        rtol: relative to the largest element of the derivative (or 1e-3 of the function, if that is
            more).
        step: h, relative to the largest element of the argument.
        seed: of the draws.

    Raises:
        AssertionError: naming the mode, the argument or result, and both numbers.

    >>> assert_gradients(lambda x, w: torch.tanh(x @ w), torch.ones(2, 3), torch.ones(3, 2))
    >>> assert_gradients(lambda x: x.detach() * x, torch.ones(2), modes=["reverse"], order=1)
    Traceback (most recent call last):
    AssertionError: assert_gradients(<lambda>): the reverse derivative: ⟨d(x), t⟩ is wrong.
    ...
    """
    where = f"assert_gradients({name_of(fn)}):"
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes or order < 1:
        what = f"modes={tuple(modes)!r}, order={order!r} ask for nothing known."
        raise ValueError(message(where, what, fix=f"modes of {MODES}, order of at least 1"))
    generator = torch.Generator().manual_seed(seed)
    flat = flat_function(where, fn, args, dtype, generator)
    _Check(where, tuple(modes), rtol, step, generator).run(flat, order, "")


@dataclass(frozen=True)
class _Check:
    where: str
    modes: tuple[str, ...]
    rtol: float
    step: float
    generator: torch.Generator

    def run(self, flat: Flat, order: int, over: str) -> None:
        """Check the first derivatives of `flat`, then those derivatives as functions themselves."""
        slopes = []
        for i in range(len(flat.at)):
            along = draw_like([flat.at[i]], self.generator)[0]
            slopes.append((along, central_difference(flat, i, along, self.step)))
        for mode in self.modes:
            name = f"{mode} over {over}" if over else mode
            derivative = (self.reverse if mode == "reverse" else self.forward)(flat, slopes, name)
            if order > 1:
                self.run(derivative, order - 1, name)

    def reverse(self, flat: Flat, slopes: Sequence[Any], name: str) -> Flat:
        """Compare ⟨vjp(y), t⟩ with ⟨y, d⟩ for each argument; return x -> vjp(f, x)(y)."""
        y = draw_like(flat.outs, self.generator)
        names = tuple(f"d({own})" for own in flat.names)
        pull = self.derived(flat, name, lambda *x: torch.func.vjp(flat.call, *x)[1](y), names)
        for (along, slope), grad, own in zip(slopes, pull.outs, names, strict=True):
            scale = max(magnitude(slope, y), magnitude([grad], [along]))
            scale = max(scale, FLOOR * magnitude(flat.outs, y))
            found, expected = [inner([grad], [along])], [inner(slope, y)]
            what = f"the {name} derivative"
            assert_agree(self.where, what, found, expected, [f"⟨{own}, t⟩"], self.rtol, scale)
        return pull

    def forward(self, flat: Flat, slopes: Sequence[Any], name: str) -> Flat:
        """Compare jvp(t) with d for each argument; return x -> jvp(f, x, t), t for all at once."""
        names = tuple(f"d({own})" for own in flat.out_names)
        least = FLOOR * max(size(out) for out in flat.outs)
        zeros = [torch.zeros_like(x) for x in flat.at]
        for i, (along, slope) in enumerate(slopes):
            tangents = (*zeros[:i], along, *zeros[i + 1 :])
            push = self.derived(flat, name, _push(flat, tangents), names)
            what = f"the {name} derivative along {flat.names[i]}"
            assert_agree(self.where, what, push.outs, slope, names, self.rtol, least)
        return self.derived(flat, name, _push(flat, tuple(along for along, _ in slopes)), names)

    def derived(
        self, flat: Flat, name: str, call: Callable[..., Tensors], names: tuple[str, ...]
    ) -> Flat:
        """A derivative as a function of the same arguments; what it raises is a failure."""
        try:
            outs = call(*flat.at)
        except Exception as error:
            said = str(error).split("\n", 1)[0]
            what = f"the {name} derivative raised {type(error).__name__}."
            fix = f'fix: or ask for less, modes=("{self.modes[0]}",) or order=1'
            raise failure(self.where, what, said, fix) from error
        return replace(flat, call=call, outs=outs, out_names=names)


def _push(flat: Flat, tangents: Tensors) -> Callable[..., Tensors]:
    return lambda *x: push_forward(flat.call, x, tangents)


def central_difference(flat: Flat, i: int, along: torch.Tensor, step: float) -> Tensors:
    """The derivative along argument `i`, to fourth order (Fornberg 1988, Math. Comp. 51, table 1)."""
    h = step * (size(flat.at[i]) or 1.0)

    def at(n: int) -> Tensors:
        moved = [x + n * h * along if j == i else x for j, x in enumerate(flat.at)]
        return tuple(out.detach() for out in flat.call(*moved))

    points = zip(at(1), at(-1), at(2), at(-2), strict=True)
    return tuple((8 * (a - b) - (c - d)) / (12 * h) for a, b, c, d in points)
