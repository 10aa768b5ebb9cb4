"""Random words a second on one core: `pfx.random.bits` against torch's own generator.

python bench/random_bits.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import pfx

COUNT = 1 << 24


def rate(draw: Callable[[], torch.Tensor], rounds: int = 7) -> float:
    """Million words a second, the median of some rounds."""
    draw()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        draw()
        times.append(time.perf_counter() - start)
    return COUNT / statistics.median(times) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    key, out = pfx.random.key(0), torch.empty(COUNT, dtype=torch.int32)
    draws: dict[str, Callable[[], torch.Tensor]] = {
        "torch random_ (mersenne twister)": lambda: out.random_(-(2**31), 2**31 - 1),
        "pfx bits (threefry2x32)": lambda: pfx.random.bits(key, (COUNT,)),
        "pfx uniform": lambda: pfx.random.uniform(key, (COUNT,)),
        "pfx normal": lambda: pfx.random.normal(key, (COUNT,)),
    }
    rates = {name: rate(draw) for name, draw in draws.items()}
    base = next(iter(rates.values()))
    for name, value in rates.items():
        print(f"{name:<34} {value:7.1f} M words/s   {value / base:5.2f} x torch")


if __name__ == "__main__":
    main()
