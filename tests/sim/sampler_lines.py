"""The lines that a random manual region is made of, each a text that fits the values drawn so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from hypothesis import strategies as st

from tests.sim.lockstep import INVARYING, REDUCED, UNREDUCED, VARYING, Machine, Value, names


class Drawer:
    """Picks values, axes and dims for the next line."""

    def __init__(self, draw: Any, machine: Machine, known: dict[str, Value]) -> None:
        self.draw, self.machine, self.known = draw, machine, known

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def value(self, fits: Callable[[Value], bool] = lambda v: True) -> str:
        """The name of a value; the newest ones are likely."""
        fitting = [name for name, v in self.known.items() if fits(v)]
        if not fitting:
            raise LookupError("no value fits")
        return self.pick([fitting[-1], *reversed(fitting[-3:]), *reversed(fitting)])

    def partner(self, name: str, fits: Callable[[Any, Any], Any]) -> str:
        """The name of a value of which `fits` makes no error beside another one."""

        def good(v: Value) -> bool:
            try:
                fits(numpy.zeros(self.known[name].shape), numpy.zeros(v.shape))
            except ValueError:
                return False
            return True

        return self.value(good)

    def ranked(self, least: int = 1) -> tuple[str, int]:
        """A value with that many dims, and one of them."""
        name = self.value(lambda v: v.ndim >= least)
        return name, self.dim(self.known[name].ndim)

    def dim(self, ndim: int) -> int:
        return self.pick(range(ndim)) - (ndim if self.chance(4) else 0)

    def axis(self, among: Sequence[str] = ()) -> str | tuple[str, ...]:
        """One axis, or some in any order."""
        axes = tuple(among or self.machine.sizes)
        orders = [o for n in range(1, len(axes) + 1) for o in itertools.permutations(axes, n)]
        chosen = self.pick(orders)
        return chosen[0] if len(chosen) == 1 else chosen

    def count(self, axis: str | tuple[str, ...]) -> int:
        return self.machine.count(names(axis))


def unary(d: Drawer) -> str:
    forms = ("torch.tanh({})", "torch.sin({})", "{} * 0.5", "-{}", "{} ** 2", "{} + 0.5")
    return d.pick(forms).format(d.value())


def binary(d: Drawer) -> str:
    a = d.value()
    b = d.partner(a, lambda x, y: x + y)
    return f"{a} {d.pick('*+-')} {b}"


def matmul(d: Drawer) -> str:
    a = d.value(lambda v: v.ndim >= 1)
    if d.known[a].ndim >= 2 and d.chance(2):
        return f"torch.tanh({a}) @ {d.partner(a, lambda x, y: x @ y.swapaxes(-1, -2))}.mT"
    return f"{a} @ {d.partner(a, lambda x, y: x @ y)}"


def reduction(d: Drawer) -> str:
    a, dim = d.ranked()
    form = d.pick(("sum({})", "mean({})", "sum({}, keepdim=True)", "amax({})", "sum()"))
    return f"{a}.{form.format(dim)}"


def view(d: Drawer) -> str:
    a, dim = d.ranked()
    shape = d.known[a].shape
    dims = d.pick(list(itertools.permutations(range(len(shape)))))
    flat = int(numpy.prod(shape))
    split = d.pick([n for n in range(1, flat + 1) if flat % n == 0])
    at = (f":{d.pick(range(1, shape[0] + 1))}", "..., 0", "None", "-1")
    return d.pick((
        f"{a}.permute({', '.join(map(str, dims))})",
        f"{a}.reshape({split}, {flat // split})",
        f"{a}.reshape({flat})",
        f"{a}[{d.pick(at)}]",
        f"torch.flip({a}, ({dim},))",
        f"torch.roll({a}, 1, {dim})",
        f"{a}.cumsum({dim})",
    ))  # fmt: skip


def join(d: Drawer) -> str:
    a, dim = d.ranked()
    b = d.partner(a, lambda x, y: numpy.concatenate([x, y], dim))
    return f"torch.cat([{a}, {b}], {dim})"


def psum(d: Drawer) -> str:
    return f"lax.{d.pick(('psum', 'pmean'))}({d.value()}, {d.axis()!r})"


def extremum(d: Drawer) -> str:
    return f"lax.{d.pick(('pmax', 'pmin'))}(lax.stop_gradient({d.value()}), {d.axis()!r})"


def gather(d: Drawer) -> str:
    to = d.pick(("", "", ', to="invarying"', ', to="reduced"'))
    if d.chance(2):
        a, dim = d.ranked()
        return f"lax.all_gather({a}, {d.axis()!r}, dim={dim}, tiled=True{to})"
    a = d.value()
    return f"lax.all_gather({a}, {d.axis()!r}, dim={d.dim(d.known[a].ndim + 1)}{to})"


def _dividing(d: Drawer, count: int, *, tiled: bool) -> tuple[str, int]:
    """A value whose dim can be split, and that dim; made of one that cannot where none can."""
    fits = lambda n: n % count == 0 if tiled else n == count
    found = [
        (name, i)
        for name, v in d.known.items()
        for i in range(v.ndim)
        if fits(v.shape[i]) and v.ndim + tiled > 1
    ]
    if found and d.chance(2):
        name, dim = d.pick(list(reversed(found)))
    else:
        name = d.value(lambda v: v.ndim >= 1)
        dim = d.pick(range(d.known[name].ndim + (not tiled)))
        ndim = d.known[name].ndim + (not tiled)
        pieces = ", ".join(f"{name} * {k + 1}" for k in range(count))
        name = f"torch.{'cat' if tiled else 'stack'}([{pieces}], {dim})"
        return name, dim - (ndim if d.chance(4) else 0)
    return name, dim - (d.known[name].ndim if d.chance(4) else 0)


def scatter(d: Drawer) -> str:
    axis, tiled = d.axis(), d.chance(2)
    a, dim = _dividing(d, d.count(axis), tiled=tiled)
    return f"lax.psum_scatter({a}, {axis!r}, dim={dim}{', tiled=True' if tiled else ''})"


def exchange(d: Drawer) -> str:
    axis, tiled = d.axis(), d.chance(2)
    a, split = _dividing(d, d.count(axis), tiled=tiled)
    ndim = eval(a, d.machine.scope(), d.known).ndim
    return f"lax.all_to_all({a}, {axis!r}, {split}, {d.dim(ndim)}{', tiled=True' if tiled else ''})"


def permute(d: Drawer, name: str = "") -> str:
    axis, name = d.axis(), name or d.value()
    ranks = range(d.count(axis))
    to = d.draw(st.permutations(ranks))
    if d.chance(3):
        return f"lax.pshuffle({name}, {axis!r}, {list(to)})"
    pairs = [pair for pair in zip(ranks, to, strict=True) if not d.chance(4)]
    return f"lax.ppermute({name}, {axis!r}, {pairs})"


def index(d: Drawer) -> str:
    a, axis = d.value(), d.axis()
    if d.known[a].ndim and d.chance(2):
        return f"{a}[lax.axis_index({axis!r}) % {d.known[a].shape[0]}]"
    return f"{a} * (lax.axis_index({axis!r}) + 1)"


def cast(d: Drawer) -> str:
    """Mostly a legal one."""
    a = d.value()
    to = d.pick((VARYING, REDUCED, UNREDUCED))
    source = {VARYING: (INVARYING, REDUCED), REDUCED: (INVARYING,), UNREDUCED: (VARYING,)}[to]
    axis = d.axis(() if d.chance(8) else d.known[a].axes_that_are(*source))
    return f"lax.pcast({a}, {axis!r}, to={to!r})"


def again(d: Drawer) -> str:
    return f"pfx.remat(lambda z: {d.pick(('torch.tanh(z) * z', 'torch.sin(z ** 2)'))})({d.value()})"


def loop(d: Drawer) -> str:
    """A scan whose body may communicate; what varies in the end has to vary from the start."""
    c = d.value()
    s = d.value(lambda v: v.ndim >= 1 and v.shape[0] <= 4)
    keep = ("torch.tanh(z)", "z * {b}", f"lax.psum(z, {d.axis()!r})", permute(d, "z"), "z")
    shape = d.known[c].shape
    beside = [n for n, v in d.known.items() if v.ndim == 0 or v.shape == shape]
    body = d.pick(keep).format(b=d.pick(beside) if beside else 0.5)
    after = f"torch.sin({body} + t.mean())"
    axes = tuple(d.machine.sizes) if not d.chance(8) else ()
    fixed = lambda text: f"lax.pcast({text}, {axes}, to='varying')" if axes else text
    ys = d.pick(("z.sum()", "t", "z * t.sum()"))
    return f"pfx.scan(lambda z, t: ({fixed(after)}, {ys}), {fixed(c)}, {s})"


KINDS = (
    unary, binary, matmul, reduction, view, join, psum, psum, extremum, gather, gather, scatter,
    scatter, exchange, exchange, permute, permute, index, cast, cast, again, loop,
)  # fmt: skip
