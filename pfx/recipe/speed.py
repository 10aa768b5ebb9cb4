"""Tokens a second, the share of the devices' peak that the model's own arithmetic uses, and memory.

MFU as Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) define it: the operations of one forward
pass and twice as many for the backward pass, over what the devices could have done in that time. What
is recomputed does not count.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from pfx import random
from pfx.api import jit
from pfx.compiler.work import work_of
from pfx.mesh import Mesh
from pfx.train import TrainStep

PEAK_FLOPS: Mapping[str, float] = {
    # Dense bfloat16 with float32 sums, from NVIDIA's data sheets (those with sparsity, halved).
    "A100": 312e12, "H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "H20": 148e12,
    "B200": 2250e12, "L40S": 362e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """What one device can do in a second; None for one that is not in the table, as CPUs.

    >>> peak_flops("cpu") is None
    True
    """
    if not device.startswith("cuda"):
        return None
    return known_peak(torch.cuda.get_device_name())


def known_peak(name: str) -> float | None:
    """Look a device's name up; of several that are in it, the longest counts.

    >>> known_peak("NVIDIA H100 PCIe"), known_peak("NVIDIA H200")
    (756000000000000.0, 989400000000000.0)
    """
    found = [known for known in PEAK_FLOPS if known in name]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def model_flops(train: TrainStep, batch: Any) -> int:
    """Floating-point operations of one step of the model itself, forward and backward."""
    alone = train.on_one_device().plan
    mesh: Mesh = alone.mesh(kind="abstract")
    forward = jit(train.loss_fn, mesh=mesh, names=alone.logical_names)
    program = forward.lower(train.shapes.params, batch, random.key(0))
    return 3 * work_of(program).flops


def mfu(flops: float, seconds: float, devices: int, peak: float) -> float:
    """The share of all devices' peak that `flops` operations in so many seconds are."""
    return flops / (seconds * devices * peak)


def peak_memory(device: str) -> int:
    """The most bytes that this process has had on its device; on CPUs, in its whole memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
