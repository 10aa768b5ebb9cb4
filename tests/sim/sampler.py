"""Random manual regions: a mesh, shapes, a program, in_specs, legal out_specs, and what is illegal.

A case is drawn by running it: each line is tried on `tests.sim.lockstep`, which says what the shapes are
and what every value is along each axis. Whatever it refuses is kept too: pfx has to refuse it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

import pfx
import pfx.testing
from pfx import P
from tests.sim.lockstep import (
    INVARYING,
    REDUCED,
    UNREDUCED,
    VARYING,
    Illegal,
    Lax,
    Machine,
    Value,
    enter,
    names,
)

NAMES = "abcdefghijklmnopqrs"
BIGGEST = 256  # elements that one device may hold of a value
LARGEST = 1e3  # and how large they may be, so that rounding stays small


@dataclass(frozen=True)
class Case:
    """A function of global values with a region inside; its text is what runs.

    An argument whose spec is None does not enter the region: the function closes over it.
    """

    mesh: pfx.Mesh
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P | None, ...]
    lines: tuple[str, ...]
    outs: tuple[str, ...]
    out_specs: tuple[P, ...]
    wrong: tuple[Case, ...] = ()  # the same with something that has to be an error
    jit: bool = False

    @property
    def text(self) -> str:
        inputs = [n for n, spec in zip(NAMES, self.specs, strict=False) if spec is not None]
        specs = tuple(spec for spec in self.specs if spec is not None)
        mapped = f"pfx.shard_map(local, mesh=mesh, in_specs={specs}, out_specs={self.out_specs})"
        body = [*self.lines, f"return ({''.join(f'{name}, ' for name in self.outs)})"]
        return "\n".join([
            f"def fn({', '.join(NAMES[: len(self.shapes)])}):",
            f"    def local({', '.join(inputs)}):",
            *(f"        {line}" for line in body),
            f"    return {mapped}({', '.join(inputs)})",
        ])  # fmt: skip

    @property
    def fn(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What pfx makes of it."""
        scope = {"torch": torch, "lax": pfx.lax, "pfx": pfx, "P": P, "mesh": self.mesh}
        exec(self.text, scope)
        return scope["fn"]  # type: ignore[return-value]

    def reference(self, xp: ModuleType) -> Callable[..., tuple[Any, ...]]:
        """What it means, for arrays of one library."""
        machine = Machine(dict(self.mesh.shape), xp)
        return lambda *args: machine.run(self.text, args)

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.drawn(0)

    def drawn(self, seed: int) -> tuple[torch.Tensor, ...]:
        """Arguments in float64."""
        values = pfx.testing.values
        return tuple(values(s, torch.float64, seed + i) for i, s in enumerate(self.shapes))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={n}" for axis, n in self.mesh.axes)
        args = f"pfx.testing.values(s, torch.float64, i) for i, s in enumerate({self.shapes})"
        return f"\nmesh = pfx.make_mesh({sizes})\n{self.text}\nargs = [{args}]\njit = {self.jit}\n"


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
    return f"{a}.{d.pick(('sum({})', 'mean({})', 'sum({}, keepdim=True)', 'amax({})', 'sum()'))}".format(
        dim
    )


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
    s = d.value(lambda v: 1 <= v.ndim and v.shape[0] <= 4)
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


@st.composite
def cases(draw: Any, axes: int) -> Case:
    """Draw a region on a mesh with so many axes."""
    meshes = pfx.testing.meshes(max_axes=axes, min_devices=2)
    mesh = draw(meshes.filter(lambda mesh: len(mesh.axes) == axes))
    machine = Machine(dict(mesh.shape))
    d = Drawer(draw, machine, {})
    forms = pfx.testing.shapes(mesh, min_dims=1, max_dims=3, max_local=2)
    small = forms.filter(lambda shape: numpy.prod(shape) <= BIGGEST)
    shapes = tuple(draw(st.lists(small, min_size=1, max_size=3)))
    specs = tuple(
        None if i and d.chance(3) else _in_spec(d, mesh, shape) for i, shape in enumerate(shapes)
    )
    case = Case(mesh, shapes, specs, (), (), (), jit=d.chance(4))
    for name, x, spec in zip(NAMES, case.args, specs, strict=False):
        whole = machine.whole(x.numpy())
        d.known[name] = whole if spec is None else enter(whole, spec)
    lines, wrong = _lines(d, case, draw(st.integers(2, 8)))
    outs = _unread(lines, list(d.known))
    for name in outs:
        if d.known[name].ndim == 0:
            lines.append(f"{name} = {name}.reshape(1)")
            d.known[name] = d.known[name].reshape(1)
    out_specs = tuple(_out_spec(d, d.known[name]) for name in outs)
    case = replace(case, lines=tuple(lines), outs=outs, out_specs=out_specs)
    for i, name in enumerate(outs):
        bad = _broken(d, d.known[name], out_specs[i])
        if bad is not None:
            wrong.append(replace(case, out_specs=(*out_specs[:i], bad, *out_specs[i + 1 :])))
    return replace(case, wrong=tuple(wrong))


def _lines(d: Drawer, case: Case, count: int) -> tuple[list[str], list[Case]]:
    """Lines that run, and programs that end with one that must not."""
    lines: list[str] = []
    wrong: list[Case] = []
    for _ in range(count):
        kind = d.pick(KINDS)
        try:
            text = kind(d)
        except LookupError:
            continue
        new = NAMES[len(d.known) : len(d.known) + (2 if kind is loop else 1)]
        line = f"{', '.join(new)} = {text}"
        scope = {**d.machine.scope(), **d.known}
        try:
            exec(line, scope)
        except Illegal:
            wrong.append(replace(case, lines=(*lines, line)))
            continue
        made = {name: scope[name] for name in new}
        if all(map(_modest, made.values())):
            lines.append(line)
            d.known.update(made)
    return lines, wrong


def _modest(v: Value) -> bool:
    arrays = v.parts.values()
    return all(a.size <= BIGGEST and float(numpy.abs(a).max()) <= LARGEST for a in arrays)


def _unread(lines: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The last value, and what nothing reads."""
    words = set()
    for line in lines:
        code = compile(line.split(" = ", 1)[1], "", "eval")
        words |= _names_in(code)
    return tuple(name for name in known if name not in words)[-3:] or (known[-1],)


def _names_in(code: Any) -> set[str]:
    inner = [c for c in code.co_consts if hasattr(c, "co_names")]
    return set(code.co_names).union(*map(_names_in, inner))


def _in_spec(d: Drawer, mesh: pfx.Mesh, shape: tuple[int, ...]) -> P:
    """Any split that divides; of the axes left over some hold addends, or are reduced."""
    spec = d.draw(pfx.testing.specs(torch.empty(shape), mesh))
    split = [a for entry in spec for a in names(entry)]
    owed: dict[str, list[str]] = {UNREDUCED: [], REDUCED: []}
    for axis in mesh.axis_names:
        if axis not in split and d.chance(5):
            owed[d.pick((UNREDUCED, REDUCED))].append(axis)
    return P(*spec, unreduced=owed[UNREDUCED], reduced=owed[REDUCED])


def _out_spec(d: Drawer, v: Value) -> P:
    """Any spec that a value with dims may have."""
    dims: list[tuple[str, ...]] = [()] * v.ndim
    unreduced, reduced = [], []
    for axis in d.draw(st.permutations(list(d.machine.sizes))):
        state = v.state(axis)
        tiles = state == VARYING or (state != UNREDUCED and d.chance(3))
        if state == UNREDUCED or (state == VARYING and d.chance(6)):
            unreduced.append(axis)
        elif tiles:
            dim = d.pick(range(v.ndim))
            dims[dim] = (*dims[dim], axis)
        elif state == REDUCED:
            reduced.append(axis)
    return _spec(dims, unreduced, reduced)


def _spec(dims: Sequence[tuple[str, ...]], unreduced: Any = (), reduced: Any = ()) -> P:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in dims]
    return P(*entries, unreduced=unreduced, reduced=reduced)


def _broken(d: Drawer, v: Value, spec: P) -> P | None:
    """The same spec but for one axis, for which it is not legal."""
    wrongs = []
    dims = [names(entry) for entry in spec]
    for axis in d.machine.sizes:
        rest = [tuple(a for a in entry if a != axis) for entry in dims]
        unreduced = [a for a in spec.unreduced if a != axis]
        reduced = [a for a in spec.reduced if a != axis]
        split = [(axis, *rest[0]), *rest[1:]]
        state = v.state(axis)
        if state in (VARYING, UNREDUCED):
            wrongs.append(_spec(rest, unreduced, reduced))
        if state == UNREDUCED:
            wrongs.append(_spec(split, unreduced, reduced))
        if state in (INVARYING, REDUCED):
            wrongs.append(_spec(rest, [*unreduced, axis], reduced))
    return d.pick(wrongs) if wrongs else None
