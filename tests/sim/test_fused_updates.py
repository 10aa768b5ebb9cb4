"""Updates as one kernel equal the chain of calls that they replace, and replace nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfx
from pfx import P, make_mesh, optim

MESH = make_mesh(dp=2)


def params(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    drawn = {"w": torch.randn(6, 8), "b": torch.randn(4), "s": torch.randn(())}
    return {name: value.to(dtype) for name, value in drawn.items()}


def update_of(transform: optim.GradientTransformation) -> Any:
    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = transform.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return update


def calls(program: Any, name: str) -> int:
    return program.text().count(f" = {name}(")


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_equals_the_chain(dtype: torch.dtype, decay: float, donate: Any) -> None:
    transform = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=decay))
    update = update_of(transform)
    now = params(dtype)
    state = transform.init(now)
    jitted = pfx.jit(update, mesh=MESH, donate=donate, in_specs=None)
    got = pfx.jit(lambda *a: a, mesh=MESH)(now, state)
    for step in range(5):
        grads = pfx.tree.map(lambda p, s=step: torch.randn_like(p) * (s + 1), now)
        now, state = update(now, state, grads)
        got = jitted(*got, grads)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-14)
    for a, b in zip(
        pfx.tree.leaves(pfx.device_get(got)), pfx.tree.leaves((now, state)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    program = jitted.lower(now, state, now)
    # Of a number in float32, the double-precision corrections make doubles on the way.
    alone = int(dtype == torch.float32)
    assert (calls(program, "adamw"), calls(program, "aten.addcmul")) == (3 - alone, alone)


def test_shards_are_updated_by_the_kernel() -> None:
    update = update_of(optim.adamw(1e-2))
    now = {"w": params(torch.float32)["w"]}
    state = optim.adamw(1e-2).init(now)
    grads = pfx.tree.map(torch.randn_like, now)
    spec = {"w": P("dp")}
    jitted = pfx.jit(update, mesh=MESH, in_specs=(spec, None, spec), out_specs=(spec, None))
    assert calls(jitted.lower(now, state, grads), "adamw") == 1
    torch.testing.assert_close(
        pfx.device_get(jitted(now, state, grads)[0]), update(now, state, grads)[0]
    )


SGD = {
    "plain": (lambda: optim.sgd(0.1), "add_scaled"),
    "momentum": (lambda: optim.sgd(0.1, momentum=0.9), "sgd"),
    "nesterov": (lambda: optim.sgd(0.1, momentum=0.9, nesterov=True), "sgd"),
    "penalty": (
        lambda: optim.chain(optim.add_decayed_weights(0.3), optim.sgd(0.1, momentum=0.9)),
        "sgd",
    ),
    "penalty, nesterov": (
        lambda: optim.chain(
            optim.add_decayed_weights(0.3), optim.sgd(0.1, momentum=0.5, nesterov=True)
        ),
        "sgd",
    ),
    "decoupled": (
        lambda: optim.chain(
            optim.trace(0.9), optim.add_decayed_weights(0.3), optim.scale_by_learning_rate(0.1)
        ),
        "add_scaled",
    ),
    "momentum after adam": (
        lambda: optim.chain(
            optim.scale_by_adam(), optim.trace(0.5), optim.scale_by_learning_rate(0.1)
        ),
        "sgd",
    ),
    "lion": (lambda: optim.lion(0.1, weight_decay=0.1), "add_scaled"),
    "ema": (lambda: optim.chain(optim.sgd(0.1), optim.ema(0.9)), "add_scaled"),
    "momentum, ema": (lambda: optim.chain(optim.sgd(0.1, momentum=0.9), optim.ema(0.9)), "sgd"),
    "accumulated": (lambda: optim.accumulate(optim.adam(0.1), 2), "add_scaled"),
}


@pytest.mark.parametrize("donate", [(), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", SGD)
def test_other_updates_by_their_kernels(name: str, donate: Any) -> None:
    make, kernel = SGD[name]
    transform = make()
    update, now = update_of(transform), params(torch.float64)
    state = transform.init(now)
    jitted = pfx.jit(update, mesh=MESH, donate=donate)
    program = jitted.lower(now, state, now)
    found = {k: calls(program, k) for k in ("adamw", "sgd", "add_scaled")}
    assert found == {**dict.fromkeys(found, 0), kernel: 3}
    got = pfx.jit(lambda *a: a, mesh=MESH)(now, state)
    for _ in range(4):
        grads = pfx.tree.map(torch.randn_like, now)
        kept = pfx.tree.map(torch.clone, (now, state, grads))
        now, state = update(now, state, grads)
        got = jitted(*got, grads)
        same(kept[2], grads, 0.0)
    same(pfx.device_get(got), (now, state), 1e-13)
    same(pfx.device_get(pfx.jit(update, mesh=MESH, check=True)(*kept)), (now, state), 1e-13)


def same(found: Any, expected: Any, atol: float) -> None:
    for a, b in zip(pfx.tree.leaves(found), pfx.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["plain", "momentum", "nesterov", "lion", "momentum, ema"])
def test_a_donated_state_is_updated_where_it_lies(name: str) -> None:
    """No new memory: each result has the memory of the leaf it replaces, or of a gradient."""
    transform = SGD[name][0]()
    update, now = update_of(transform), {"w": params(torch.float32)["w"]}
    jitted = pfx.jit(update, mesh=MESH, donate=(0, 1, 2))
    args = pfx.jit(lambda *a: a, mesh=MESH)(now, transform.init(now), now)
    before = {part.data_ptr() for x in pfx.tree.leaves(args) for part in x.parts if x.ndim}
    after = {part.data_ptr() for x in pfx.tree.leaves(jitted(*args)) for part in x.parts if x.ndim}
    assert after <= before
    program = jitted.lower(*args)
    leaves = len([x for x in program.inputs if x.shape])
    alone = 0 if name != "lion" else 1  # its average and its sign are of one gradient
    size = 6 * 8 * 4
    assert program.memory().peak < (leaves + alone) * size + 200


def test_a_direction_that_is_read_elsewhere_stays() -> None:
    def update(p: Any, v: Any, g: Any) -> Any:
        v = torch.add(g, v, alpha=0.9)
        step = v * torch.tensor(-0.1, dtype=torch.float64)
        return p + step, v, step

    args = [torch.randn(4, 3) for _ in range(3)]
    jitted = pfx.jit(update, mesh=MESH)
    program = jitted.lower(*args)
    assert calls(program, "sgd") == calls(program, "add_scaled") == 0
    same(pfx.device_get(jitted(*args)), update(*args), 1e-6)


@pytest.mark.parametrize("other", ["form", "rate"])
def test_sums_that_only_look_like_updates_stay(other: str) -> None:
    """A direction that is broadcast, or a rate for each row, is none of the kernels'."""

    def update(p: Any, u: Any, rate: Any) -> Any:
        return p + u * rate

    p, u = torch.randn(4, 3), torch.randn(*((1, 3) if other == "form" else (4, 3)))
    rate = torch.tensor(0.5) if other == "form" else torch.randn(4, 1)
    jitted = pfx.jit(update, mesh=MESH)
    assert calls(jitted.lower(p, u, rate), "add_scaled") == 0
    torch.testing.assert_close(pfx.device_get(jitted(p, u, rate)), update(p, u, rate))


def test_partial_directions_are_summed_first() -> None:
    """A gradient that each device has a part of is reduced, then added."""

    def update(p: Any, x: Any, y: Any, rate: Any) -> Any:
        return p + (x.T @ y) * rate

    p, x, y = torch.randn(3, 5), torch.randn(4, 3), torch.randn(4, 5)
    rate = torch.tensor(-0.5)
    jitted = pfx.jit(update, mesh=MESH, in_specs=(P(), P("dp"), P("dp"), P()))
    torch.testing.assert_close(pfx.device_get(jitted(p, x, y, rate)), update(p, x, y, rate))


def test_an_update_that_is_needed_twice_is_made_once() -> None:
    def twice(p: Any, g: Any, rate: Any) -> Any:
        update = g * rate
        return p + update, torch.sin(p + update)

    p, g, rate = torch.randn(4, 3), torch.randn(4, 3), torch.tensor(-0.5)
    jitted = pfx.jit(twice, mesh=MESH)
    assert calls(jitted.lower(p, g, rate), "add_scaled") == 1
    same(pfx.device_get(jitted(p, g, rate)), twice(p, g, rate), 1e-6)


def test_a_moment_that_is_read_elsewhere_keeps_the_chain() -> None:
    transform = optim.adamw(1e-2)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        moved = optim.apply_updates(params, updates)
        return moved, [m.sum() for m in pfx.tree.leaves(state)]

    now = params(torch.float64)
    state, grads = transform.init(now), pfx.tree.map(torch.randn_like, now)
    jitted = pfx.jit(update, mesh=MESH)
    assert calls(jitted.lower(now, state, grads), "adamw") == 0
    for a, b in zip(
        pfx.tree.leaves(pfx.device_get(jitted(now, state, grads))),
        pfx.tree.leaves(update(now, state, grads)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1, 65536, 100_003])
def test_sums_of_squares_in_one_pass(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(size)
    jitted = pfx.jit(lambda x: torch.sum(x * x), mesh=MESH)
    assert calls(jitted.lower(x), "sum_of_squares") == 1
    torch.testing.assert_close(
        float(jitted(x)), float(x.double().square().sum()), rtol=1e-6, atol=0
    )
    parts = pfx.jit(lambda x: torch.sum(x * x), mesh=MESH, in_specs=P("dp"))
    if size % 2 == 0:
        torch.testing.assert_close(float(parts(x)), float(jitted(x)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(2, 20_000), (3, 5, 7), (2, 2, 20_000), (0, 3), (3, 0), (1, 9)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_of_squares_of_the_rows_of_a_stack(shape: Any, keepdim: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    for first in range(len(shape)):
        dims = tuple(range(first, len(shape)))
        jitted = pfx.jit(lambda x, d=dims: torch.sum(x * x, d, keepdim=keepdim), mesh=MESH)
        assert calls(jitted.lower(x), "sum_of_squares") == 1
        same(pfx.device_get(jitted(x)), torch.sum(x * x, dims, keepdim=keepdim), 1e-9)
    inner = pfx.jit(lambda x: torch.sum(x * x, 0), mesh=MESH)
    assert calls(inner.lower(x), "sum_of_squares") == 0
