"""Backwards in two halves, the weights' half filling the bubble: ZB-H1 and ZB-H2."""

from __future__ import annotations

from pfx.schedules.slots import Size, Slots


def _one_f_one_i(*, warmup: int, lag: int, microbatches: int) -> Slots:
    """Run 1F1B with each W ``lag`` input gradients after its own."""
    warmup, lag = min(warmup, microbatches), min(lag, microbatches)
    slots = ["F0"] * warmup
    for index in range(microbatches):
        slots += ["F0"] * (index < microbatches - warmup) + ["I0"] + ["W0"] * (index >= lag)
    return slots + ["W0"] * lag


def zb_h1(device: int, size: Size) -> Slots:
    """Fill the bubble of 1F1B with W at no more memory: a third of the bubble at equal times.

    Stage i warms up with p-i-1 forwards, and its W run i input gradients late.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1.

    >>> print(*zb_h1(1, Size(devices=3, microbatches=3, virtual=1)))
    F0 F0 I0 F0 I0 W0 I0 W0 W0
    """
    warmup = size.devices - 1 - device
    return _one_f_one_i(warmup=warmup, lag=device, microbatches=size.microbatches)


def zb_h2(device: int, size: Size) -> Slots:
    """Warm up twice as long, so that no bubble is left at equal times; 2p-1 activations alive.

    Stage i warms up with 2(p-i-1) forwards, and its W run 2i input gradients late. Devices end
    apart, so the optimizer's step must not wait for all of them.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.2.

    >>> print(*zb_h2(0, Size(devices=2, microbatches=3, virtual=1)))
    F0 F0 F0 I0 W0 I0 W0 I0 W0
    """
    warmup = 2 * (size.devices - 1 - device)
    return _one_f_one_i(warmup=warmup, lag=2 * device, microbatches=size.microbatches)
