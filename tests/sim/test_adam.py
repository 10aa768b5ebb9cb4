"""Adam as one kernel equals the chain of calls that it replaces, and replaces nothing else."""

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


@pytest.mark.parametrize(
    "transform",
    [
        optim.sgd(0.1, momentum=0.9),
        optim.chain(optim.scale_by_adam(), optim.trace(0.5), optim.scale_by_learning_rate(0.1)),
    ],
    ids=["sgd", "momentum after adam"],
)
def test_other_chains_stay_as_they_are(transform: optim.GradientTransformation) -> None:
    update, now = update_of(transform), params(torch.float64)
    state, grads = transform.init(now), pfx.tree.map(torch.randn_like, now)
    jitted = pfx.jit(update, mesh=MESH)
    assert calls(jitted.lower(now, state, grads), "adamw") == 0
    torch.testing.assert_close(
        pfx.device_get(jitted(now, state, grads)[0]), update(now, state, grads)[0]
    )


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
