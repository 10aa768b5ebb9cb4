"""Loops, rematerialization, rules of one's own, modules and regions: more rows of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pfx
from pfx import P, lax
from tests.sim.manual import draw, mapped
from tests.sim.primitives import MESH, Fn, Row, everywhere, varying

# Loops. One body, for a device with `total` a psum, and for the stack with a sum over its dim.

WEIGHTS = draw(2, seed=5)


def _step(carry: torch.Tensor, x: torch.Tensor, total: Fn, closed: torch.Tensor) -> torch.Tensor:
    return torch.sin(carry + closed) * total(x) + WEIGHTS


def _loop(**options: Any) -> Fn:
    def apply(x: torch.Tensor) -> torch.Tensor:
        over = lambda v: lax.psum(v, "i")
        closed = x.sum(0)

        def body(carry: Any, row: torch.Tensor) -> Any:
            y, count = carry
            new = _step(y, row, over, closed)
            return (new, count + 1), new * count

        start = varying(x[0]), torch.tensor(1)
        (last, count), ys = pfx.scan(body, start, x, **options)
        return ys + last * count

    return apply


def _unrolled(*, reverse: bool = False) -> Fn:
    def meaning(x: torch.Tensor) -> torch.Tensor:
        x = everywhere(x)
        over = lambda v: v.sum(0, keepdim=True)
        carry, closed, n, ys = x[:, :, 0], x.sum(2), x.shape[2], {}
        order = range(n)[::-1] if reverse else range(n)
        for count, k in enumerate(order):
            carry = _step(carry, x[:, :, k], over, closed)
            ys[k] = carry * (count + 1)
        return torch.stack([ys[k] for k in range(n)], 2) + carry[:, :, None] * (n + 1)

    return meaning


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Send a carry around the ring, and add it up."""

    def body(carry: Any, _: None) -> Any:
        held, total = carry
        held = lax.ppermute(held, "i", [(0, 1), (1, 0)]) * 2
        return (held, torch.sin(total) + held), None

    start = varying(x), varying(x)
    return pfx.scan(body, start, length=3)[0][1]


def _rotated_densely(x: torch.Tensor) -> torch.Tensor:
    held = total = everywhere(x)
    for _ in range(3):
        held = held.flip(0) * 2
        total = torch.sin(total) + held
    return total


# A rule of one's own, which is the true derivative.


@pfx.custom_vjp
def cube(x: torch.Tensor) -> torch.Tensor:
    """x³."""
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))

MODULE = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).double()
MODULE.append(MODULE[0])  # tied
_APPLY, _PARAMS = pfx.from_module(MODULE)
_WEIGHT = _PARAMS["0.weight"].clone()


def _module(x: torch.Tensor) -> torch.Tensor:
    """The value is a parameter of the module, used twice."""
    return _APPLY({**_PARAMS, "0.weight": _WEIGHT + x @ x.mT}, x.mT @ x)


def _module_densely(x: torch.Tensor) -> torch.Tensor:
    w, b = _WEIGHT + x @ x.mT, _PARAMS["0.bias"]
    return torch.tanh(x.mT @ x @ w.mT + b) @ w.mT + b


def _bent(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * lax.psum(torch.cos(x), "i")


def _bent_densely(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.cos(everywhere(x)).sum(0, keepdim=True)


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > lax.pmean(lax.stop_gradient(x), "j"), lax.psum(x, "i"), x * 2)


def _branches_densely(x: torch.Tensor) -> torch.Tensor:
    full = everywhere(x)
    return torch.where(x > x.detach().mean(1, keepdim=True), full.sum(0, keepdim=True), x * 2)


INSIDE = (
    Row("scan", _loop(), _unrolled(), (3, 2)),
    Row("scan in reverse", _loop(reverse=True), _unrolled(reverse=True), (3, 2)),
    Row("scan, rematerialized", _loop(remat="full"), _unrolled(), (3, 2)),
    Row("scan of a ppermute", _rotated, _rotated_densely, (1, 2)),
    Row("remat", pfx.remat(_bent), _bent_densely, (2, 2)),
    Row("custom_vjp", lambda x: lax.psum(cube(x), "j"),
        lambda x: everywhere(x**3).sum(1, keepdim=True), (2, 2)),
    Row("from_module", _module, _module_densely, (3, 3)),
    Row("vmap of a psum_scatter",
        lambda x: pfx.vmap(lambda row: lax.psum_scatter(row, "i", tiled=True), 1, 1)(x),
        lambda x: torch.cat(everywhere(x).sum(0, keepdim=True).chunk(2, 2)), (2, 3)),
    Row("where", _branches, _branches_densely, (2, 2)),
)  # fmt: skip


# Functions of the global value, of shape (4, 2).


def _shared(x: torch.Tensor) -> torch.Tensor:
    return x * lax.psum(torch.sin(x), "i")


def _crossed(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.sin(x[:2]) + torch.sin(x[2:])).repeat(2, 1)


_REGION = mapped(_shared, MESH, P("i"), P("i"))


def _nested(x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * lax.psum(torch.sin(x), "j")

    def outer(x: torch.Tensor) -> torch.Tensor:
        specs = P(None, "j")
        return _shared(pfx.shard_map(inner, in_specs=specs, out_specs=specs, axis_names="j")(x))

    return mapped(outer, MESH, P("i"), P("i"), axis_names="i")(x)


def _nested_densely(x: torch.Tensor) -> torch.Tensor:
    return _crossed(x * torch.sin(x).sum(1, keepdim=True))


def _addends(x: torch.Tensor) -> torch.Tensor:
    """Out of a region as addends over "i", and back into another one."""
    owed = mapped(torch.sin, MESH, P("i"), P(unreduced="i"), axis_names="i")
    total = lambda u: lax.psum_scatter(u, "i", tiled=True)
    return mapped(total, MESH, P(unreduced="i"), P("i"), axis_names="i")(owed(x))


def _passed(x: torch.Tensor) -> torch.Tensor:
    fn = lambda x, y: x * torch.sin(y)
    return mapped(fn, MESH, (P("i"), None), P("i"))(x, x.sum())


def _looped(body: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Fn:
    def apply(x: torch.Tensor) -> torch.Tensor:
        step = lambda carry, row: (body(torch.sin(carry) + row), carry.sum(0))
        last, ys = pfx.scan(step, x, x[:, 0], **options)
        return last + ys

    return apply


def _looped_densely(x: torch.Tensor) -> torch.Tensor:
    carry, ys = x, []
    for row in x[:, 0]:
        ys.append(carry.sum(0))
        carry = _crossed(torch.sin(carry) + row)
    return carry + torch.stack(ys)


_KEEP: Fn = lambda x: x
_OF_REGION = pfx.jit(_REGION, mesh=MESH)
_JITTED = pfx.jit(lambda x: x.cumsum(0) * x, mesh=MESH, in_specs=P("i", "j"))

GLOBAL = (
    Row("shard_map", _REGION, _crossed, (4, 2)),
    Row("shard_map, partly manual",
        mapped(_shared, MESH, P("i"), P("i"), axis_names="i"), _crossed, (4, 2)),
    Row("shard_map, nested", _nested, _nested_densely, (4, 2)),
    Row("shard_map, unchecked", mapped(lambda x: lax.all_gather(torch.sin(x), "i", tiled=True),
        MESH, P("i"), P(), check=False), torch.sin, (4, 2)),
    Row("shard_map, None in its specs", _passed, lambda x: x * torch.sin(x.sum()), (4, 2)),
    Row("shard_map that closes over",
        lambda x: mapped(lambda y: y * torch.sin(x[:2]), MESH, P("i"), P("i"))(x),
        lambda x: x * torch.sin(x[:2]).repeat(2, 1), (4, 2)),
    Row("shard_map that repeats", mapped(torch.sin, MESH, P("j"), P(("i", "j"))),
        lambda x: torch.sin(x).repeat(2, 1), (4, 2)),
    Row("shard_map with unreduced specs", _addends, lambda x: torch.sin(x[:2]) + torch.sin(x[2:]),
        (4, 2)),
    Row("constrain", lambda x: pfx.constrain(x, P("i", "j"), grad_spec=P("j")), _KEEP, (4, 2)),
    Row("constrain by names", lambda x: pfx.constrain(x, "rows _"), _KEEP, (4, 2)),
    Row("constrain to unreduced", lambda x: pfx.constrain(x, P(None, "j", unreduced="i")), _KEEP,
        (4, 2)),
    Row("jit", lambda x: pfx.device_get(_JITTED(x)), lambda x: x.cumsum(0) * x, (4, 2)),
    Row("jit of a shard_map", lambda x: pfx.device_get(_OF_REGION(x)), _crossed, (4, 2)),
    Row("remat of a shard_map", pfx.remat(_REGION), _crossed, (4, 2)),
    Row("scan of a shard_map", _looped(_REGION), _looped_densely, (4, 2)),
    Row("scan of a shard_map, rematerialized", _looped(_REGION, remat="full"), _looped_densely,
        (4, 2)),
    Row("vmap over a mesh axis",
        lambda x: pfx.vmap(_REGION, 1, 1, spmd_axis_name="j")(x), _crossed, (4, 2)),
    Row("custom_vjp alone", cube, lambda x: x**3, (4, 2)),
    Row("from_module alone", _module, _module_densely, (3, 3)),
)  # fmt: skip
