"""The meaning of a manual region without any of pfx: all devices in lockstep, on lists of arrays.

The text of a program is run with other things behind the names ``torch``, ``lax`` and ``pfx``. A `Value` is
one array per device and what it is along each axis; a collective looks at what its groups hold and
makes new lists. The arrays are numpy's, or torch's where the reference is to be differentiated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

from pfx import P

Place = tuple[int, ...]
States = tuple[str, ...]
VARYING, INVARYING, UNREDUCED, REDUCED = "varying", "invarying", "unreduced", "reduced"


class Illegal(Exception):
    """The program breaks a rule of the types."""


def names(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes of an argument or of a spec's entry."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


@dataclass(frozen=True)
class Machine:
    """Devices on a mesh, and the library whose arrays they hold."""

    sizes: Mapping[str, int]
    xp: ModuleType = numpy

    @property
    def places(self) -> list[Place]:
        return list(itertools.product(*map(range, self.sizes.values())))

    def count(self, axes: Sequence[str]) -> int:
        return int(numpy.prod([self.sizes[a] for a in axes]))

    def at(self, place: Place, axis: str) -> int:
        return place[list(self.sizes).index(axis)]

    def rank(self, place: Place, axes: Sequence[str]) -> int:
        rank = 0
        for axis in axes:
            rank = rank * self.sizes[axis] + self.at(place, axis)
        return rank

    def groups(self, axes: Sequence[str]) -> Iterator[list[Place]]:
        """The devices that differ along the axes only, by rank; one list per group."""
        rest = [a for a in self.sizes if a not in axes]
        key = lambda place: [self.at(place, a) for a in rest]
        for _, group in itertools.groupby(sorted(self.places, key=key), key):
            yield sorted(group, key=lambda place: self.rank(place, axes))

    def whole(self, x: Any) -> Value:
        """A value that all devices have."""
        return Value(self, dict.fromkeys(self.places, x), (INVARYING,) * len(self.sizes))

    def run(self, text: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Define and call the `fn` of a program on global arrays."""
        scope = self.scope()
        exec(text, scope)
        outs = scope["fn"](*map(self.whole, args))
        return tuple(out.parts[self.places[0]] for out in outs)

    def scope(self) -> dict[str, Any]:
        """What the names in a program's text stand for."""
        return {"torch": _torch(self), "lax": Lax(self), "pfx": _pfx(self), "P": P, "mesh": self}


@dataclass(frozen=True)
class Value:
    """One array per device; `states` says what they are along each axis, in the mesh's order."""

    on: Machine
    parts: Mapping[Place, Any]
    states: States

    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[self.on.places[0]].shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def state(self, axis: str) -> str:
        return self.states[list(self.on.sizes).index(axis)]

    def axes_that_are(self, *states: str) -> list[str]:
        return [a for a in self.on.sizes if self.state(a) in states]

    def having(self, axes: Sequence[str], state: str) -> Value:
        pairs = zip(self.on.sizes, self.states, strict=True)
        return replace(self, states=tuple(state if a in axes else s for a, s in pairs))

    def map(self, fn: Callable[[Any], Any], rule: str = "linear") -> Value:
        return _each(fn, self, rule=rule)

    def __add__(self, other: Any) -> Value:
        return _each(lambda a, b: a + b, self, other, rule="sum")

    def __sub__(self, other: Any) -> Value:
        return _each(lambda a, b: a - b, self, other, rule="sum")

    def __mul__(self, other: Any) -> Value:
        return _each(lambda a, b: a * b, self, other, rule="product")

    def __matmul__(self, other: Any) -> Value:
        return _each(lambda a, b: a @ b, self, other, rule="product")

    def __neg__(self) -> Value:
        return self.map(lambda a: -a)

    def __pow__(self, n: int) -> Value:
        return self.map(lambda a: a**n, "any")

    def __mod__(self, n: int) -> Value:
        return self.map(lambda a: a % n, "any")

    def __getitem__(self, key: Any) -> Value:
        if isinstance(key, Value):
            return _each(lambda a, i: a[i], self, key, rule="product")
        return self.map(lambda a: a[key])

    def sum(self, dim: int | None = None, keepdim: bool = False) -> Value:
        options = {} if dim is None else {"axis": dim, "keepdims": keepdim}
        return self.map(lambda a: self.on.xp.sum(a, **options))

    def mean(self, dim: int | None = None) -> Value:
        return self.map(lambda a: self.on.xp.mean(a, **({} if dim is None else {"axis": dim})))

    def amax(self, dim: int) -> Value:
        return self.map(lambda a: self.on.xp.amax(a, axis=dim), "any")

    def cumsum(self, dim: int) -> Value:
        return self.map(lambda a: self.on.xp.cumsum(a, axis=dim))

    def reshape(self, *shape: int) -> Value:
        return self.map(lambda a: a.reshape(shape))

    def permute(self, *dims: int) -> Value:
        return self.map(lambda a: self.on.xp.moveaxis(a, dims, tuple(range(len(dims)))))

    @property
    def mT(self) -> Value:
        return self.map(lambda a: self.on.xp.swapaxes(a, -1, -2))


def _each(fn: Callable[..., Any], *operands: Any, rule: str) -> Value:
    """Call `fn` on every device's parts of the operands; the others are numbers."""
    values = [x for x in operands if isinstance(x, Value)]
    on = values[0].on
    number = rule == "sum" and len(values) < len(operands)
    columns = zip(*(v.states for v in values), strict=True)
    states = tuple(_state(column, rule, number=number) for column in columns)
    parts = {
        place: fn(*(x.parts[place] if isinstance(x, Value) else x for x in operands))
        for place in on.places
    }
    return Value(on, parts, states)


def _state(found: Sequence[str], rule: str, *, number: bool) -> str:
    """What an op's result is along one axis, if its operands may be combined."""
    if UNREDUCED not in found:
        return next((s for s in (VARYING, REDUCED) if s in found), INVARYING)
    others = [s for s in found if s != UNREDUCED]
    sums = rule in ("sum", "linear") and not others and not number
    scales = rule == "product" and len(others) == len(found) - 1 and VARYING not in others
    if not sums and not scales:
        raise Illegal(f"{rule} of {found}")
    return UNREDUCED


@dataclass(frozen=True)
class Lax:
    """The collectives, by what they do to the lists of their groups."""

    on: Machine

    def exchange(self, x: Value, axis: Any, meaning: Any, after: str, also: str = "") -> Value:
        axes = names(axis)
        if any(x.state(a) == UNREDUCED for a in axes) and also != UNREDUCED:
            raise Illegal(f"a collective of what is {x.states}")
        parts = {}
        for group in self.on.groups(axes):
            parts.update(zip(group, meaning([x.parts[p] for p in group]), strict=True))
        return Value(self.on, parts, x.states).having(axes, after)

    def psum(self, x: Value, axis: Any) -> Value:
        return self.exchange(x, axis, lambda held: [sum(held)] * len(held), INVARYING, UNREDUCED)

    def pmean(self, x: Value, axis: Any) -> Value:
        count = self.on.count(names(axis))
        return self.psum(x, axis).map(lambda a: a / count)

    def pmax(self, x: Value, axis: Any) -> Value:
        if UNREDUCED in x.states:
            raise Illegal("the largest of addends")
        one = lambda held: [self.on.xp.amax(self.on.xp.stack(held), axis=0)] * len(held)
        return self.exchange(x, axis, one, INVARYING)

    def pmin(self, x: Value, axis: Any) -> Value:
        return -self.pmax(-x, axis)

    def all_gather(
        self, x: Value, axis: Any, *, dim: int = 0, tiled: bool = False, to: str = VARYING
    ) -> Value:
        join = self.on.xp.concatenate if tiled else self.on.xp.stack
        return self.exchange(x, axis, lambda held: [join(held, axis=dim)] * len(held), to)

    def psum_scatter(self, x: Value, axis: Any, *, dim: int = 0, tiled: bool = False) -> Value:
        axes = names(axis)
        if 0 < sum(x.state(a) == UNREDUCED for a in axes) < len(axes):
            raise Illegal("addends along some of the axes only")
        one = lambda held: self._pieces(sum(held), dim, len(held), tiled)
        return self.exchange(x, axis, one, VARYING, UNREDUCED)

    def _pieces(self, a: Any, dim: int, count: int, tiled: bool) -> list[Any]:
        front = self.on.xp.moveaxis(a, dim, 0)
        if not tiled:
            return [front[i] for i in range(count)]
        size = front.shape[0] // count
        blocks = [front[i * size : (i + 1) * size] for i in range(count)]
        return [self.on.xp.moveaxis(block, 0, dim) for block in blocks]

    def all_to_all(
        self, x: Value, axis: Any, split_dim: int, concat_dim: int, *, tiled: bool = False
    ) -> Value:
        join = self.on.xp.concatenate if tiled else self.on.xp.stack

        def meaning(held: list[Any]) -> list[Any]:
            pieces = [self._pieces(a, split_dim, len(held), tiled) for a in held]
            return [join([row[to] for row in pieces], axis=concat_dim) for to in range(len(held))]

        return self.exchange(x, axis, meaning, VARYING)

    def ppermute(self, x: Value, axis: Any, perm: Sequence[tuple[int, int]]) -> Value:
        source = {to: start for start, to in perm}

        def meaning(held: list[Any]) -> list[Any]:
            zero = self.on.xp.zeros_like(held[0])
            return [held[source[k]] if k in source else zero for k in range(len(held))]

        return self.exchange(x, axis, meaning, VARYING)

    def pshuffle(self, x: Value, axis: Any, perm: Sequence[int]) -> Value:
        return self.exchange(x, axis, lambda held: [held[k] for k in perm], VARYING)

    def axis_index(self, axis: Any) -> Value:
        axes = names(axis)
        ranks = {place: self.on.rank(place, axes) for place in self.on.places}
        return Value(self.on, ranks, (INVARYING,) * len(self.on.sizes)).having(axes, VARYING)

    def pcast(self, x: Value, axis: Any, to: str) -> Value:
        axes = names(axis)
        takes = {VARYING: (INVARYING, REDUCED), REDUCED: (INVARYING,), UNREDUCED: (VARYING,)}[to]
        if any(x.state(a) not in (*takes, to) for a in axes):
            raise Illegal(f"{x.states} to {to}")
        return x.having(axes, to)

    def stop_gradient(self, x: Value) -> Value:
        return x.map(lambda a: a.detach() if isinstance(a, torch.Tensor) else a)


def _torch(on: Machine) -> SimpleNamespace:
    """The functions of torch that programs call."""
    joined = lambda join: lambda xs, dim=0: _each(lambda *a: join(a, axis=dim), *xs, rule="sum")
    return SimpleNamespace(
        tanh=lambda x: x.map(on.xp.tanh, "any"),
        sin=lambda x: x.map(on.xp.sin, "any"),
        cat=joined(on.xp.concatenate),
        stack=joined(on.xp.stack),
        flip=lambda x, dims: x.map(lambda a: on.xp.flip(a, dims)),
        roll=lambda x, by, dim: x.map(lambda a: on.xp.roll(a, by, dim)),
    )


def _pfx(on: Machine) -> SimpleNamespace:
    def scan(body: Any, carry: Value, xs: Value) -> tuple[Value, Value]:
        ys = []
        for i in range(xs.shape[0]):
            after, y = body(carry, xs[i])
            assert after.shape == carry.shape
            if after.states != carry.states:
                raise Illegal(f"a carry that is {carry.states} becomes {after.states}")
            carry = after
            ys.append(y)
        return carry, _torch(on).stack(ys)

    def shard_map(fn: Any, *, mesh: Machine, in_specs: Any, out_specs: Any) -> Any:
        def mapped(*args: Value) -> tuple[Value, ...]:
            outs = fn(*(enter(x, spec) for x, spec in zip(args, in_specs, strict=True)))
            return tuple(leave(x, spec) for x, spec in zip(outs, out_specs, strict=True))

        return mapped

    return SimpleNamespace(scan=scan, shard_map=shard_map, remat=lambda fn: fn)


def enter(x: Value, spec: P) -> Value:
    """Cut a global value into the devices' blocks."""
    on = x.on
    parts = {}
    for place, part in x.parts.items():
        for dim, entry in enumerate(spec):
            axes = names(entry)
            size = part.shape[dim] // on.count(axes)
            start = on.rank(place, axes) * size
            part = part[(slice(None),) * dim + (slice(start, start + size),)]
        first = all(on.at(place, a) == 0 for a in spec.unreduced)
        parts[place] = part if first else on.xp.zeros_like(part)
    split = [a for entry in spec for a in names(entry)]
    out = Value(on, parts, x.states).having(split, VARYING)
    return out.having(spec.unreduced, UNREDUCED).having(spec.reduced, REDUCED)


def leave(x: Value, spec: P) -> Value:
    """Put the devices' blocks together, if the value is to every axis what the spec says."""
    on, split = x.on, [a for entry in spec for a in names(entry)]
    for axis in on.sizes:
        allowed: tuple[str, ...] = (INVARYING, REDUCED)
        if axis in split:
            allowed = (VARYING, INVARYING, REDUCED)
        elif axis in spec.unreduced:
            allowed = (VARYING, UNREDUCED)
        if x.state(axis) not in allowed:
            raise Illegal(f"{spec} of what is {x.states}")
    parts = dict(x.parts)
    for dim, entry in enumerate(spec):
        for axis in reversed(names(entry)):
            parts = _along(on, parts, axis, lambda held, dim=dim: on.xp.concatenate(held, axis=dim))
    for axis in spec.unreduced:
        parts = _along(on, parts, axis, sum)
    return on.whole(parts[on.places[0]])


def _along(on: Machine, parts: Mapping[Place, Any], axis: str, join: Any) -> dict[Place, Any]:
    """What the devices along an axis hold together, at all of them."""
    out = {}
    for group in on.groups((axis,)):
        out.update(dict.fromkeys(group, join([parts[place] for place in group])))
    return out
