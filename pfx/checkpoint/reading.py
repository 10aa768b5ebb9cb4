"""Reading boxes of tensors from shard files: only the bytes that are wanted, by a few threads.

A piece that a process wants whole, if for several devices, is checked against its checksum on the way.
Of a piece that it wants in part only the part is read, which no checksum covers; `read` says which
these are, so that the processes can share the work of reading each of them whole once.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfx.checkpoint.boxes import Box, extents, intersection, volume, whole, within
from pfx.checkpoint.checksum import HOT, Checksum
from pfx.checkpoint.manifest import Leaf, Manifest, Piece
from pfx.checkpoint.threads import in_threads
from pfx.checkpoint.values import DTYPES, as_bits
from pfx.errors import CheckpointError, message

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Memory is what reading waits for: the second thread of a core, which counts as one here, adds nothing.
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
_GAP = 4096  # bytes between two wanted stretches that are read along: a page is what a disk reads
_LARGE = 4 << 20  # bytes from which memory is asked for in large pages
_LINE = 64  # the alignment that torch gives tensors; kernels may add up otherwise without it


def _unseen(room: Bytes) -> None:
    pass


class Shards:
    """The open shard files of a step.

    Attributes:
        bytes_read: so far, of all files.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.sizes, self.bytes_read = folder, manifest.head.files, 0
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def read(self, name: str, offset: int, room: Bytes) -> None:
        """Fill memory with the bytes at an offset.

        Raises:
            CheckpointError: the file is missing, has another size, or cannot be read.
        """
        self.read_each(name, offset, (room,))

    def read_each(
        self,
        name: str,
        offset: int,
        rooms: Iterable[Bytes],
        seen: Callable[[Bytes], None] = _unseen,
    ) -> None:
        """Fill several stretches of memory with what follows each other; `seen` is told of each."""
        handle, at = self._handle(name), offset
        try:
            for room in rooms:
                end = at + len(room)
                while at < end:
                    count = os.preadv(handle, [room[at - end :].data], at)
                    if not count:
                        raise CheckpointError(
                            message(str(self.folder / name), f"ends at byte {at}.")
                        )
                    at += count
                seen(room)
        except OSError as error:
            raise self._unread(name, error) from error
        with self._lock:
            self.bytes_read += at - offset

    def _handle(self, name: str) -> int:
        with self._lock:
            if name not in self._handles:
                try:
                    handle = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise self._unread(name, error) from error
                self._handles[name] = handle
                size = os.fstat(handle).st_size
                if size != self.sizes[name]:
                    what = f"has {size} bytes; the manifest says {self.sizes[name]}."
                    raise CheckpointError(message(str(self.folder / name), what))
        return self._handles[name]

    def _unread(self, name: str, error: OSError) -> CheckpointError:
        what = f"cannot be read: {error.strerror or error}."
        return CheckpointError(message(str(self.folder / name), what))


@dataclass(frozen=True)
class Wanted:
    """A box of a leaf, and the tensor that takes it."""

    leaf: Leaf
    box: Box
    out: torch.Tensor


def room_for(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor, in large pages where the system has them: new ones come twice as fast."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(nbytes + _LINE, np.uint8)  # numpy asks for large pages, torch does not
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(tuple(shape))


PieceId = tuple[str, int]  # a file, and where in it the piece begins


def read(shards: Shards, wanted: Iterable[Wanted]) -> list[PieceId]:
    """Read everything that is wanted; returns the pieces that were read in part, so not checked.

    Raises:
        CheckpointError: a file cannot be read, or a piece is not what was written, naming both.
    """
    jobs: dict[PieceId, list[_Job]] = {}
    for each in wanted:
        for piece in each.leaf.pieces:
            if (shared := intersection(piece.box, each.box)) is not None:
                jobs.setdefault((piece.file, piece.offset), []).append((each, piece, shared))
    in_threads(lambda place: _read_jobs(shards, jobs[place]), sorted(jobs), THREADS)
    return sorted(place for place, parts in jobs.items() if not _is_whole(parts))


def check(shards: Shards, manifest: Manifest, wanted: Iterable[PieceId]) -> None:
    """Read pieces whole, to compare their checksums.

    Raises:
        CheckpointError: one is not what was written.
    """
    named = {(p.file, p.offset): (leaf, p) for leaf in manifest.leaves for p in leaf.pieces}
    jobs = [named[place] for place in wanted]
    in_threads(lambda job: check_piece(shards, *job), jobs, THREADS)


_Job = tuple[Wanted, Piece, Box]


def _read_jobs(shards: Shards, jobs: Sequence[_Job]) -> None:
    """Read what is wanted of one piece: at once where parts of it make up the whole, which is checked."""
    leaf, piece = jobs[0][0].leaf, jobs[0][1]
    if len(jobs) == 1 or not _is_whole(jobs):
        for job in jobs:
            _read_piece(shards, *job)
        return
    room = np.empty(piece.length, np.uint8)
    check_piece(shards, leaf, piece, room)
    found = as_bits(torch.from_numpy(room).view(DTYPES[leaf.dtype]).view(extents(piece.box)))
    for wanted, _, box in jobs:
        as_bits(_part(wanted.out, box, wanted.box)).copy_(_part(found, box, piece.box))


def _is_whole(jobs: Sequence[_Job]) -> bool:
    """Tell whether the boxes, which share no element, are all of their piece."""
    return sum(volume(box) for _, _, box in jobs) >= volume(jobs[0][1].box)


def _part(tensor: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    """The elements of a box in a tensor that holds the elements of an outer one."""
    for dim, (start, stop) in enumerate(within(box, outer)):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _read_piece(shards: Shards, wanted: Wanted, piece: Piece, box: Box) -> None:
    bits = as_bits(_part(wanted.out, box, wanted.box))
    if box == piece.box:
        room = _flat(bits) if bits.is_contiguous() else np.empty(piece.length, np.uint8)
        check_piece(shards, wanted.leaf, piece, room)
        if not bits.is_contiguous():
            bits.copy_(torch.from_numpy(room).view(bits.dtype).view(bits.shape))
        return
    part = within(box, piece.box)
    _read_part(shards, piece, part, DTYPES[wanted.leaf.dtype].itemsize, bits)


def check_piece(shards: Shards, leaf: Leaf, piece: Piece, room: Bytes | None = None) -> None:
    """Read a whole piece, into memory if some is given, and compare its checksum.

    Raises:
        CheckpointError: it differs.
    """
    found = Checksum()
    starts = range(0, piece.length, HOT)
    if room is None:
        spare = np.empty(min(HOT, piece.length), np.uint8)
        stretches = (spare[: piece.length - start] for start in starts)
    else:
        stretches = (room[start : start + HOT] for start in starts)
    shards.read_each(piece.file, piece.offset, stretches, found.add)
    if found.digest() != piece.checksum:
        raise CheckpointError(
            message(
                str(shards.folder / piece.file),
                f"is damaged: {piece_text(leaf, piece)} has another checksum than was written.",
            )
        )


def piece_text(leaf: Leaf, piece: Piece) -> str:
    """Name a piece: ``params['w'][0:4, 0:8] (bytes 4096 to 4224)``."""
    index = "" if piece.box == whole(leaf.shape) else _index(piece.box)
    end = piece.offset + piece.length
    return f"{''.join(leaf.path) or 'the tree'}{index} (bytes {piece.offset} to {end})"


def _index(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _read_part(shards: Shards, piece: Piece, part: Box, itemsize: int, out: torch.Tensor) -> None:
    """Read a box of a piece, stretch by stretch, into a tensor of its shape."""
    sizes, shape = extents(piece.box), extents(part)
    strides = [math.prod(sizes[dim + 1 :]) * itemsize for dim in range(len(sizes))]
    inner, length = _stretch(shape, strides, itemsize)
    exact = length == math.prod(shape[inner:]) * itemsize
    base = piece.offset + sum(start * s for (start, _), s in zip(part, strides, strict=True))
    room = None if exact and out.is_contiguous() else np.empty(length, np.uint8)
    for outer in itertools.product(*map(range, shape[:inner])):
        at = base + sum(i * stride for i, stride in zip(outer, strides, strict=False))
        target = out[outer]
        if room is None:
            shards.read(piece.file, at, _flat(target))
            continue
        shards.read(piece.file, at, room)
        elements = np.lib.stride_tricks.as_strided(
            room[: length // itemsize * itemsize].view(f"V{itemsize}"),
            shape[inner:],
            strides[inner:],
        )
        packed = np.ascontiguousarray(elements).view(np.uint8).reshape(-1)
        target.copy_(torch.from_numpy(packed).view(out.dtype).view(target.shape))


def _stretch(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """From which dim on a box is read in one go, gaps included, and the bytes from first to last."""
    length, inner = itemsize, len(shape)
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1 and strides[dim] - length > _GAP:
            break
        length += (shape[dim] - 1) * strides[dim]
        inner = dim
    return inner, length


def _flat(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
