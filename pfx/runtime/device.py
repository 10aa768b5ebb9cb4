"""What differs between kinds of devices: their backend, which one is ours, waiting, memory.

Everything else in pfx names a device only as the torch device type of its mesh.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from pfx.errors import MeshError, message

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_NEVER = 1 << 30  # bytes

# torch device type -> the torch.distributed backend that moves its tensors
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def backend_of(device: str) -> str:
    """Return the torch.distributed backend of a device type.

    Raises:
        MeshError: for a device type that none is known for.

    >>> backend_of("cpu")
    'gloo'
    """
    if device not in BACKENDS:
        raise MeshError(
            message(
                "process mesh:",
                f"no backend moves tensors of device {device!r}.",
                fix=f"device= one of {', '.join(map(repr, BACKENDS))}",
            )
        )
    return BACKENDS[device]


def select(device: str, local_rank: int) -> None:
    """Make the device of this process the current one; the CPU is all processes' own, with its memory.

    Raises:
        MeshError: when this host has no device for this process.
    """
    if device == "cpu":
        _keep_freed_memory()
        return
    module = _module(device)
    count = module.device_count()
    if local_rank >= count:
        raise MeshError(
            message(
                f"process mesh on {device}:",
                "more processes than devices on this host.",
                f"LOCAL_RANK={local_rank}; {count} devices, numbered from 0.",
                fix=f'torchrun --nproc-per-node {count}, or device="cpu"',
            )
        )
    module.set_device(local_rank)


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one.

    glibc hands freed memory back in large pieces, and the system clears every page when it is next
    asked for: 2 % of a step of a small model. Whoever has set glibc's own variables is obeyed, and
    other allocators do not know of this.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _NEVER)


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given; the CPU always has."""
    if device != "cpu":
        _module(device).synchronize()


def peak_bytes(device: str) -> int | None:
    """The most memory torch has held on the device since `reset_peak`; None for the CPU."""
    return None if device == "cpu" else int(_module(device).max_memory_allocated())


def reset_peak(device: str) -> None:
    """Start measuring `peak_bytes` anew."""
    if device != "cpu":
        _module(device).reset_peak_memory_stats()


def _module(device: str):  # noqa: ANN202 (torch.cuda, torch.npu: modules with one interface)
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        raise MeshError(
            message(
                "process mesh:",
                f"this torch cannot use device {device!r}.",
                str(error).splitlines()[0],
                fix='device="cpu", or install the device\'s torch',
            )
        ) from None
