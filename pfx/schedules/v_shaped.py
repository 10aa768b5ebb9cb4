"""Two stages per device, placed as a V: device d holds stages d and 2p-1-d.

The first device holds both ends of the model (its tied embeddings, its loss), and the turn of the V
is inside the last device. Both families are written for a pipeline that is full at some time, and
:func:`.slots.number` leaves out what a smaller one has not.
"""

from __future__ import annotations

from pfx.schedules.slots import Size, Slots


def zb_v(device: int, size: Size) -> Slots:
    """Leave no bubble at equal times of F, I and W, within the p activations of 1F1B.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6; the V as a
    building block: Qi et al. 2024, arXiv:2405.15362, section 3.

    >>> print(*zb_v(1, Size(devices=2, microbatches=3, virtual=2)))
    F0 F1 F0 F1 I1 W1 F0 I0 W0 F1 I1 W1 I0 I1 I0 W0 W1 W0
    """
    p, d = size.devices, device
    m = max(size.microbatches, 2 * p - 1)
    warmup = ["F0"] * (2 * (p - d) - 1) + ["F1", "F0"] * d + ["F1", "I1", "W1"] * (p - d)
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - 2 * p + d + 1)
    drain = ["I0", "W0", "F1", "I1", "W1"] * (p - d - 1)
    cooldown = ["I0", "I1"] * d + ["I0", "W0"] * (p - d) + ["W1"] * d + ["W0"] * d
    return warmup + steady + drain + cooldown


def dualpipe_v(device: int, size: Size) -> Slots:
    """Pair each forward of one chunk with a backward of the other, to hide communication.

    A pair that DualPipe overlaps is its F and then its B here. Each stage is held once, against
    twice in DualPipe, whose two mirrored pipelines this folds into one.

    DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1; cut in half:
    github.com/deepseek-ai/DualPipe, ``DualPipeV``.

    >>> print(*dualpipe_v(0, Size(devices=2, microbatches=4, virtual=2)))
    F0 F0 F0 F1 I1 W1 F1 F0 B1 F1 B0 B1 F1 B0 B1 I0 W0 I0 W0
    """
    p, d = size.devices, device
    m, hops = max(size.microbatches, 2 * p), p - 1 - d
    warmup = ["F0"] * (2 * hops) + ["F0", "F1"] * (d + 1) + ["I1", "W1", "F1"] * hops
    steady = ["F0", "B1", "F1", "B0"] * (m - 2 * p + d + 1)
    drain = ["B1", "F1", "B0"] * hops
    # Of the last backwards, the second half is split, and W waits until no I is held up by it.
    last = [1, 0] * (d + 1)
    whole, split = last[: d + 1], last[d + 1 :]
    late = [f"W{chunk}" for chunk in split + [0] * hops]
    cooldown = [f"B{chunk}" for chunk in whole] + [f"I{chunk}" for chunk in split]
    for slot in late[:hops]:
        cooldown += [slot, "I0"]
    return warmup + steady + drain + cooldown + late[hops:]
