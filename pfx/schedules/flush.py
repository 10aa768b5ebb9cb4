"""One stage per device, a flush at the end of the step: GPipe and 1F1B."""

from __future__ import annotations

from pfx.schedules.slots import Size, Slots


def gpipe(device: int, size: Size) -> Slots:
    """Run all forwards, then all backwards: (p-1)/(m+p-1) of bubble, all m activations alive.

    Backwards run in the order of the forwards, so that gradients add up in the same order as in
    every other schedule.

    Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.

    >>> print(*gpipe(0, Size(devices=3, microbatches=2, virtual=1)))
    F0 F0 B0 B0
    """
    return ["F0"] * size.microbatches + ["B0"] * size.microbatches


def one_f_one_b(device: int, size: Size) -> Slots:
    """Run each backward as early as it can: the bubble of GPipe, p - device activations alive.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).

    >>> print(*one_f_one_b(0, Size(devices=3, microbatches=4, virtual=1)))
    F0 F0 F0 B0 F0 B0 B0 B0
    """
    warmup = min(size.devices - 1 - device, size.microbatches)
    return ["F0"] * warmup + ["F0", "B0"] * (size.microbatches - warmup) + ["B0"] * warmup
