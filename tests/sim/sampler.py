"""Random manual regions: a mesh, shapes, a program, in_specs, legal out_specs, and what is illegal.

A case is drawn by running it: each line is tried on `tests.sim.lockstep`, which says what the shapes are
and what every value is along each axis. Whatever it refuses is kept too: pfx has to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Machine,
    Value,
    enter,
    names,
)
from tests.sim.sampler_lines import KINDS, Drawer, loop

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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis prints of a failing case

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={n}" for axis, n in self.mesh.axes)
        args = f"pfx.testing.values(s, torch.float64, i) for i, s in enumerate({self.shapes})"
        lines = (
            "import torch, pfx, pfx.testing",
            "from pfx import P, lax",
            f"mesh = pfx.make_mesh({sizes})",
            self.text,
            f"args = [{args}]",
            f"jit = {self.jit}",
        )
        return "\n".join(["", *lines, ""])


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
