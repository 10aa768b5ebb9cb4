"""A Megatron block written by hand in `shard_map`, beside the one that annotations make.

    python bench/manual.py [--tp 4] [--dp 2] [--batch 8] [--seq 128] [--embed 256]

Both give the gradient of the block; the line printed says whether their programs are the same text, and
the ratio of their times, measured in turns in one run.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro

import pfx
from pfx import P


@dataclass(frozen=True)
class Size:
    tp: int = 4
    dp: int = 2
    batch: int = 8
    seq: int = 128
    embed: int = 256
    heads: int = 8
    rounds: int = 30


def block(params: Any, x: torch.Tensor, heads: int, join: Any) -> torch.Tensor:
    """Attention and MLP; `join` makes whole what the devices along tp hold addends of."""
    q, k, v = (
        (x @ params[name]).unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k", "v")
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    x = x + join(mixed @ params["o"])
    return x + join(torch.relu(x @ params["up"]) @ params["down"])


COLUMN, ROW = P(None, "tp"), P("tp", None)
SPECS = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW, "up": COLUMN, "down": ROW}


def programs(size: Size) -> tuple[pfx.api.Jitted, pfx.api.Jitted, tuple[Any, ...]]:
    """The annotated and the hand-written gradient, and what to call them with."""
    mesh = pfx.make_mesh(dp=size.dp, tp=size.tp)
    e, f = size.embed, 4 * size.embed
    shapes = {"q": (e, e), "k": (e, e), "v": (e, e), "o": (e, e), "up": (e, f), "down": (f, e)}
    params = {name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    x = torch.randn(size.batch, size.seq, size.embed)
    by_hand = pfx.shard_map(
        lambda params, x: block(params, x, size.heads // size.tp, lambda y: pfx.lax.psum(y, "tp")),
        mesh=mesh,
        in_specs=(SPECS, P("dp")),
        out_specs=P("dp"),
    )
    plain = lambda params, x: block(params, x, size.heads, lambda y: y)

    def gradient(fn: Any) -> pfx.api.Jitted:
        loss = lambda params, x: (fn(params, x) ** 2).sum()
        specs = (SPECS, P("dp"))
        return pfx.jit(pfx.grad(loss, (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)

    return gradient(plain), gradient(by_hand), (params, x)


def text(step: pfx.api.Jitted, args: Any) -> str:
    """The program without the lines and reasons, which name the source."""
    return re.sub(r"  #.*", "", step.lower(*args).text())


def main(size: Size) -> None:
    annotated, by_hand, args = programs(size)
    same = text(annotated, args) == text(by_hand, args)
    times: dict[str, list[float]] = {"annotated": [], "by hand": []}
    placed = pfx.device_put(args, annotated.mesh, (SPECS, P("dp")))
    for i in range(size.rounds + 3):
        for name, step in (("annotated", annotated), ("by hand", by_hand)):
            start = time.perf_counter()
            step(*placed)
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(f"same program text: {same}")
    print(f"annotated {statistics.median(times['annotated']) * 1e3:.1f} ms a step; "
          f"by hand / annotated: {statistics.median(ratios):.3f}")  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Size))
