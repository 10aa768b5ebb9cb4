"""`programs`: small random pure functions with arguments, a mesh and specs, printed as Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pfx.api import ShapeDtype
from pfx.lax import constrain, remat, scan
from pfx.mesh import Mesh
from pfx.spec import P
from pfx.testing.compare import mesh_call
from pfx.testing.steps import STEPS, Shape, lines
from pfx.testing.strategies import hypothesis_strategies, meshes, shapes, specs, values

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

# None that a line's own lambda binds.
NAMES = tuple(f"{letter}{n}" for n in ("", *range(1, 10)) for letter in "abdeghijklmnoqrsvw")


class _Primitives:
    """What drawn programs call ``pfx``: a package does not import itself from within."""

    scan = staticmethod(scan)
    remat = staticmethod(remat)
    constrain = staticmethod(constrain)


@dataclass(frozen=True)
class SmallProgram:
    """A drawn function: its text is what runs, so what a failure prints can be pasted.

    >>> mesh = Mesh((("x", 2),))
    >>> p = SmallProgram(mesh, {"a": (4,)}, ("b = torch.tanh(a)",), ("b",), {"a": P("x")})
    >>> print(p)
    mesh = pfx.make_mesh(x=2)
    def fn(t):
        a = t['a']
        b = torch.tanh(a)
        return {'b': b}
    args = ({'a': pfx.testing.values((4,), torch.float64, 0)},)
    specs = ({'a': P('x')},)
    >>> p.fn(*p.args)["b"].shape
    torch.Size([4])
    """

    mesh: Mesh
    shapes: Mapping[str, Shape]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    arg_specs: Mapping[str, P]
    dtype: torch.dtype = torch.float64

    @property
    def fn(self) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """The function: of a dict of tensors, to a dict of tensors."""
        scope: dict[str, Any] = {"torch": torch, "F": F, "P": P, "pfx": _Primitives}
        exec(self._definition(), scope)
        return scope["fn"]

    @property
    def args(self) -> tuple[dict[str, torch.Tensor]]:
        """Its arguments: a tuple with one dict of tensors, drawn from fixed seeds."""
        return ({a: values(shape, self.dtype, i) for i, (a, shape) in enumerate(self._items())},)

    @property
    def specs(self) -> tuple[dict[str, P]]:
        """The specs of the arguments, as `in_specs`."""
        return (dict(self.arg_specs),)

    def __str__(self) -> str:
        drawn = ", ".join(
            f"{a!r}: pfx.testing.values({shape}, {self.dtype}, {i})"
            for i, (a, shape) in enumerate(self._items())
        )
        return (
            f"mesh = {mesh_call(self.mesh)}\n{self._definition()}"
            f"args = ({{{drawn}}},)\nspecs = {self.specs}"
        )

    def __repr__(self) -> str:
        return f"\n{self}\n"

    def _items(self) -> Sequence[tuple[str, Shape]]:
        return list(self.shapes.items())

    def _definition(self) -> str:
        opened = [f"{a} = t[{a!r}]" for a in self.shapes]
        closed = f"return {{{', '.join(f'{b!r}: {b}' for b in self.outputs)}}}"
        return "\n    ".join(["def fn(t):", *opened, *self.lines, closed]) + "\n"


def programs(
    mesh: Mesh | None = None,
    *,
    max_devices: int = 8,
    max_lines: int = 6,
    max_args: int = 3,
    dtype: torch.dtype = torch.float64,
) -> SearchStrategy[SmallProgram]:
    """Draw programs with `fn`, `args`, `mesh` and `specs`; they shrink to one line on one device.

    A program composes elementwise ops, matmuls, reductions, softmax, cumsum, norms, views, slices,
    concatenation, `scan`, `remat` and `constrain`, on a dict of tensors that specs split in any way
    that divides. Everything is smooth, so gradients of any order can be compared.

    Args:
        mesh: where it runs; None draws one.
        max_devices: of a drawn mesh.
        max_lines: how long a program may be, up to 100.
        max_args: how many tensors it may take, up to 50.
        dtype: of all its tensors.

    >>> from hypothesis import find
    >>> print(find(programs(), lambda p: "cumsum" in str(p)))
    mesh = pfx.make_mesh(x=1)
    def fn(t):
        a = t['a']
        b = a.cumsum(0)
        return {'b': b}
    args = ({'a': pfx.testing.values((1,), torch.float64, 0)},)
    specs = ({'a': P()},)
    """
    st = hypothesis_strategies("pfx.testing.programs")
    where = st.just(mesh) if mesh is not None else meshes(max_devices=max_devices)
    # Which kind of line and which of its forms. Numbers, not values, so that a program shrinks by
    # leaving any line out.
    choices = st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 2**10))

    def build(draw: DrawFn) -> SmallProgram:
        on = draw(where)
        given = draw(st.lists(shapes(on, min_dims=1), min_size=1, max_size=max_args))
        code = draw(st.lists(choices, min_size=1, max_size=max_lines))
        inputs = dict(zip(NAMES, given, strict=False))
        written, outputs = _written(inputs, code, on)
        read = set().union(*map(_read, written))
        inputs = {a: shape for a, shape in inputs.items() if a in read}
        forms = {a: ShapeDtype(shape, dtype) for a, shape in inputs.items()}
        return SmallProgram(on, inputs, tuple(written), outputs, draw(specs(forms, on)), dtype)

    return st.composite(build)()


def _written(
    inputs: Mapping[str, Shape], code: Sequence[tuple[str, int]], mesh: Mesh
) -> tuple[list[str], tuple[str, ...]]:
    """Turn choices into lines; the outputs are the last value and whatever nothing read."""
    known = dict(inputs)
    written: list[str] = []
    for kind, which in code:
        fitting = lines(kind, known, mesh)
        if not fitting:
            continue
        text, shape = fitting[-1 - which % len(fitting)]  # simplest: what reads the newest value
        name = NAMES[len(known)]
        written.append(f"{name} = {text}")
        known[name] = shape
    if not written:
        written = [f"{NAMES[len(known)]} = torch.tanh({NAMES[0]})"]
    made = [line.split(" = ", 1)[0] for line in written]
    read = set().union(*map(_read, written))
    return written, tuple(name for name in made if name not in read)


def _read(line: str) -> set[str]:
    """The values that a line reads."""
    words = re.findall(r"(?<![\w.'])([a-z]\d?)(?![\w'])", line.split(" = ", 1)[1])
    return {word for word in words if word in NAMES}
