"""Time of an optimizer's update, compiled, against torch.optim's fused and foreach implementations.

    python bench/optimizers.py [--threads 1] [--steps 15] [--only adamw sgd]

A state of 10 million parameters in 30 leaves: stacks of matrices, vectors, a table. Every figure is a
median; all sides run in turns, in one process; with one thread, of its processor time, so that what else
the machine does counts less. Gradients are made anew before each step, not timed, and freed in it.
What torch has no optimizer for is compared with the same equations by `torch._foreach_*`, in place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pfx
from pfx import optim

LR = 1e-3
SHAPES = {
    **{f"w{i}": ("embed mlp", (512, 1152)) for i in range(16)},
    **{f"b{i}": ("mlp", (1152,)) for i in range(13)},
    "table": ("vocab embed", (1024, 512)),
}
AXES = {name: dims for name, (dims, _) in SHAPES.items()}
Step = Callable[[], None]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) * 0.1 for n, (_, s) in SHAPES.items()}


def compiled(transform: optim.GradientTransformation, mesh: pfx.Mesh) -> tuple[Step, Step]:
    """What makes new gradients, and what updates: both compiled, all memory donated."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    fresh = pfx.jit(lambda grads: pfx.tree.map(lambda g: g * 1.0, grads), mesh=mesh)
    step = pfx.jit(update, mesh=mesh, donate=(0, 1, 2))
    source = pfx.device_put(drawn(1), mesh)
    held: dict[str, Any] = {"params": pfx.device_put(drawn(0), mesh)}
    held["state"] = pfx.jit(transform.init, mesh=mesh)(held["params"])

    def prepare() -> None:
        held["grads"] = fresh(source)

    def run() -> None:
        held["params"], held["state"] = step(held["params"], held["state"], held.pop("grads"))

    return prepare, run


def by_torch(make: Callable[[list[torch.Tensor]], Any], *, clip: bool = False) -> tuple[Step, Step]:
    """The same of an optimizer of torch, or of a function of the parameters and gradients."""
    params = [p.requires_grad_() for p in drawn(0).values()]
    source = list(drawn(1).values())
    optimizer = make(params)

    def prepare() -> None:
        for p, g in zip(params, source, strict=True):
            p.grad = g.clone()

    def run() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        for p in params:
            p.grad = None

    return prepare, run


class Foreach:
    """An optimizer written with `torch._foreach_*`, in place, as torch.optim's are."""

    def __init__(self, params: list[torch.Tensor], states: int, rule: Callable[..., None]) -> None:
        self.params, self.rule, self.t = params, rule, 0
        self.states = [[torch.zeros_like(p) for p in params] for _ in range(states)]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        self.rule(self.t, self.params, [p.grad for p in self.params], *self.states)


def lion(t: int, ps: list[Any], gs: list[Any], ms: list[Any]) -> None:
    signs = torch._foreach_lerp(ms, gs, 0.1)
    torch._foreach_sign_(signs)
    torch._foreach_mul_(ps, 1 - LR * 0.1)
    torch._foreach_add_(ps, signs, alpha=-LR)
    torch._foreach_lerp_(ms, gs, 0.01)


def lamb(t: int, ps: list[Any], gs: list[Any], ms: list[Any], vs: list[Any]) -> None:
    torch._foreach_lerp_(ms, gs, 0.1)
    torch._foreach_mul_(vs, 0.999)
    torch._foreach_addcmul_(vs, gs, gs, 0.001)
    roots = torch._foreach_sqrt(vs)
    torch._foreach_div_(roots, (1 - 0.999**t) ** 0.5)
    torch._foreach_add_(roots, 1e-6)
    torch._foreach_mul_(roots, 1 - 0.9**t)
    us = torch._foreach_div(ms, roots)
    torch._foreach_add_(us, ps, alpha=0.01)
    ratios = torch._foreach_div(torch._foreach_norm(ps), torch._foreach_norm(us))
    torch._foreach_mul_(ratios, -LR)
    torch._foreach_mul_(us, ratios)
    torch._foreach_add_(ps, us)


def averaged(t: int, ps: list[Any], gs: list[Any], averages: list[Any]) -> None:
    torch._foreach_add_(ps, gs, alpha=-LR)
    torch._foreach_lerp_(averages, ps, 0.001)


def sides(mesh: pfx.Mesh) -> dict[str, dict[str, tuple[Step, Step]]]:
    """Optimizer to implementation to what prepares and what runs."""
    t = torch.optim
    pfx_of = lambda transform: compiled(transform, mesh)
    sgd: dict[str, Any] = {"lr": LR, "momentum": 0.9}
    return {
        "adamw": {
            "fused": by_torch(lambda p: t.AdamW(p, lr=LR, fused=True)),
            "foreach": by_torch(lambda p: t.AdamW(p, lr=LR, foreach=True)),
            "pfx": pfx_of(optim.adamw(LR)),
        },
        "clipped adamw": {
            "fused": by_torch(lambda p: t.AdamW(p, lr=LR, fused=True), clip=True),
            "pfx": pfx_of(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(LR))),
        },
        "sgd": {
            "fused": by_torch(lambda p: t.SGD(p, lr=LR, fused=True)),
            "foreach": by_torch(lambda p: t.SGD(p, lr=LR, foreach=True)),
            "pfx": pfx_of(optim.sgd(LR)),
        },
        "momentum": {
            "fused": by_torch(lambda p: t.SGD(p, **sgd, fused=True)),
            "foreach": by_torch(lambda p: t.SGD(p, **sgd, foreach=True)),
            "pfx": pfx_of(optim.sgd(LR, momentum=0.9)),
        },
        "nesterov": {
            "fused": by_torch(lambda p: t.SGD(p, **sgd, nesterov=True, fused=True)),
            "pfx": pfx_of(optim.sgd(LR, momentum=0.9, nesterov=True)),
        },
        "lion": {
            "foreach": by_torch(lambda p: Foreach(p, 1, lion)),
            "pfx": pfx_of(optim.lion(LR, weight_decay=0.1)),
        },
        "lamb": {
            "foreach": by_torch(lambda p: Foreach(p, 2, lamb)),
            "pfx": pfx_of(optim.lamb(LR, axes=AXES)),
        },
        "adafactor": {
            "foreach": by_torch(lambda p: t.Adafactor(p, lr=LR, foreach=True)),
            "for loop": by_torch(lambda p: t.Adafactor(p, lr=LR, foreach=False)),
            "pfx": pfx_of(optim.adafactor(LR, axes=AXES)),
        },
        "sgd, ema": {
            "foreach": by_torch(lambda p: Foreach(p, 1, averaged)),
            "pfx": pfx_of(optim.chain(optim.sgd(LR), optim.ema(0.999))),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    count = sum(p.numel() for p in drawn(0).values())
    print(f"{count:,} parameters in {len(SHAPES)} leaves, {args.threads} thread(s)")
    for name, found in sides(pfx.make_mesh(x=1)).items():
        if args.only and name not in args.only:
            continue
        times: dict[str, list[float]] = {side: [] for side in found}
        for k in range(args.steps + 3):
            for side, (prepare, run) in found.items():
                prepare()
                start = clock()
                run()
                if k >= 3:
                    times[side].append(clock() - start)
        medians = {side: statistics.median(values) for side, values in times.items()}
        first = medians[next(iter(found))]
        shown = ", ".join(f"{s} {1e3 * m:.1f} ms ({m / first:.2f})" for s, m in medians.items())
        print(f"{name:<14} {shown}")


if __name__ == "__main__":
    main()
