"""Several stages per device, dealt out round robin: interleaved 1F1B, and forwards alone."""

from __future__ import annotations

from itertools import chain

from pfx.schedules.flush import one_f_one_b
from pfx.schedules.slots import Size, Slots


def rounds(devices: int, microbatches: int) -> list[int]:
    """Return how many microbatches go through a chunk before the device turns to its next.

    That is one per device in the paper, which wants a multiple of the devices. A remainder is
    spread over the rounds: a round shorter than the pipeline would leave devices waiting for it.

    >>> rounds(3, 6), rounds(3, 7), rounds(3, 2)
    ([3, 3], [4, 3], [2])
    """
    count = max(1, microbatches // devices)
    return [microbatches // count + (index < microbatches % count) for index in range(count)]


def _chunks(size: Size) -> list[int]:
    """Return the chunk of each forward of a device, in order."""
    each = rounds(size.devices, size.microbatches)
    return [chunk for width in each for chunk in range(size.virtual) for _ in range(width)]


def interleaved(device: int, size: Size) -> Slots:
    """Cut each device's layers into v stages: a v-th of the bubble of 1F1B, more activations.

    At equal times the bubble is (p-1)/v of a microbatch's work on a device, for any m of at
    least p.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2; a remainder of microbatches by
    :func:`rounds`.

    >>> print(*interleaved(1, Size(devices=2, microbatches=2, virtual=2)))
    F0 F0 F1 B1 F1 B1 B0 B0
    """
    if size.virtual == 1:
        return one_f_one_b(device, size)
    chunks = _chunks(size)
    forward = [f"F{chunk}" for chunk in chunks]
    backward = [f"B{size.virtual - 1 - chunk}" for chunk in chunks]
    first = rounds(size.devices, size.microbatches)[0]
    hops = size.devices - 1 - device
    warmup = min((size.virtual - 1) * first + 2 * hops, len(forward))
    steady = chain.from_iterable(zip(forward[warmup:], backward, strict=False))
    return forward[:warmup] + list(steady) + backward[len(forward) - warmup :]


def forward_only(device: int, size: Size) -> Slots:
    """Run the forwards alone, as evaluation does, in the order of interleaved 1F1B.

    >>> print(*forward_only(0, Size(devices=2, microbatches=4, virtual=2)))
    F0 F0 F1 F1 F0 F0 F1 F1
    """
    return [f"F{chunk}" for chunk in _chunks(size)]
