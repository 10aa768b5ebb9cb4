"""Writing pieces as fast as a plain sequential write, each byte summed on its way.

Pieces are gathered into aligned stretches of memory that are written past the page cache where the
file system can do that (open(2), O_DIRECT), by a few threads: one sums while another writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfx.checkpoint.boxes import LARGEST
from pfx.checkpoint.checksum import checksum
from pfx.checkpoint.manifest import ALIGNMENT
from pfx.checkpoint.snapshot import Source
from pfx.checkpoint.threads import in_threads
from pfx.checkpoint.values import as_bits
from pfx.errors import CheckpointError, message

Room = np.ndarray[Any, np.dtype[np.uint8]]

THREADS = 2
_DIRECT_FROM = 8 << 20  # bytes: a small file is not worth it


def room_for(nbytes: int, *, pinned: bool = False) -> Room:
    """Aligned memory, in large pages where the system has them.

    Args:
        pinned: that an accelerator can copy to without waiting.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    memory = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


def fill(room: Room, sources: Sequence[Source], start: int, threads: int = 1) -> None:
    """Copy pieces to their places in memory that stands for the file from `start` on, and wait."""

    def place(source: Source) -> None:
        at, end = source.offset - start, source.offset - start + source.nbytes
        assert source.data is not None
        bits = as_bits(source.data)
        target = torch.from_numpy(room[at:end]).view(bits.dtype).view(bits.shape)
        target.copy_(bits, non_blocking=True)
        room[end : _aligned(end)] = 0  # so that files do not hold what was in memory before

    in_threads(place, sources, threads)
    devices = {source.data.device for source in sources if source.data is not None}
    for device in devices - {torch.device("cpu")}:
        torch.get_device_module(device).synchronize(device)


def stretches(sources: Sequence[Source]) -> list[list[Source]]:
    """Neighbouring pieces that are written at once: whole ones, up to `LARGEST` bytes of them."""
    found: list[list[Source]] = []
    for source in sources:
        if found and source.offset + source.nbytes - found[-1][0].offset <= LARGEST:
            found[-1].append(source)
        else:
            found.append([source])
    return found


def write(path: Path, sources: Sequence[Source], size: int, staged: Room | None) -> list[bytes]:
    """Write a file of pieces; it is durable when this returns.

    Args:
        size: of the file.
        staged: the pieces in their places, if they have been copied already.

    Returns:
        The checksum of each piece.

    Raises:
        CheckpointError: the disk is full, or the system refuses otherwise.
    """
    try:
        with _File(path, direct=size >= _DIRECT_FROM) as file:
            return _written(file, stretches(sources), staged)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = f"cannot be written: {error.strerror or error}."
        fix = "free some space, or keep fewer steps: keep=2" if full else ""
        raise CheckpointError(
            message(str(path), what, f"it needs {size} bytes", fix=fix)
        ) from error


def _written(file: _File, parts: list[list[Source]], staged: Room | None) -> list[bytes]:
    rooms: queue.SimpleQueue[Room] = queue.SimpleQueue()
    if staged is None:
        longest = max((_end(part) - part[0].offset for part in parts), default=0)
        for _ in range(min(THREADS, len(parts))):
            rooms.put(room_for(longest))

    def one(part: list[Source]) -> list[bytes]:
        start, end = part[0].offset, _end(part)
        if staged is not None:
            return _sums_written(file, part, staged[start:end])
        room = rooms.get()
        try:
            fill(room, part, start)
            return _sums_written(file, part, room[: end - start])
        finally:
            rooms.put(room)

    return [each for sums in in_threads(one, parts, THREADS) for each in sums]


def _sums_written(file: _File, part: list[Source], room: Room) -> list[bytes]:
    start = part[0].offset
    sums = [checksum(room[s.offset - start :][: s.nbytes]) for s in part]
    file.write(room, start)
    return sums


class _File:
    """A file that is written at given places, and durable once it is closed without an error."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path, self.direct = path, direct and hasattr(os, "O_DIRECT")
        self.handle = self._open()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return os.open(self.path, flags, 0o666)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self.handle)
        finally:
            os.close(self.handle)

    def write(self, room: Room, offset: int) -> None:
        data, done = room.data, 0
        while done < len(data):
            try:
                done += os.pwrite(self.handle, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._buffered()  # some file systems refuse only now, or after a short write

    def _buffered(self) -> None:
        self.direct = False
        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        fcntl.fcntl(self.handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _end(part: Sequence[Source]) -> int:
    return _aligned(part[-1].offset + part[-1].nbytes)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
