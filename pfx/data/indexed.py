"""Read a ``.bin`` and ``.idx`` pair: token sequences of documents, as Megatron-LM stores them.

``PREFIX.bin`` holds the tokens of all sequences without a gap. ``PREFIX.idx`` holds, little-endian::

    9 bytes  MMIDIDX 00 00        u64 number of sequences           int32 length of each sequence
    u64      version 1            u64 number of documents + 1       int64 byte offset of each sequence
    u8       code of the dtype                                      int64 first sequence of each document,
                                                                          and the number of sequences
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfx.data.error import DataError
from pfx.errors import message

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_BLOCK = 1 << 18  # sequences that are checked at once


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the dtype that a vocabulary is stored in: uint16 if every id fits, else int32.

    Megatron changes over at 65500 ids. Readers take the dtype from the file, so both read both.

    >>> dtype_for(65536), dtype_for(65537)
    (dtype('uint16'), dtype('int32'))
    """
    return DTYPE_CODES[8] if vocab_size <= 1 << 16 else DTYPE_CODES[4]


def pair(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the paths of the ``.bin`` and the ``.idx`` of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin"), Path(f"{os.fspath(prefix)}.idx")


class _Header(NamedTuple):
    dtype: np.dtype
    sequences: int
    documents: int


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """Token sequences in a pair of files, mapped into memory: opening one reads no tokens.

    Args:
        prefix: what both files' names begin with.
        tokens: all tokens, one after the other.
        lengths: int32, the number of tokens of each sequence.
        pointers: int64, the byte offset of each sequence in the ``.bin`` file.
        document_indices: int64, (documents + 1,): document d is the sequences from entry d up to
            entry d + 1.
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray

    @staticmethod
    def open(prefix: str | os.PathLike[str]) -> IndexedDataset:
        """Map both files, and check every number in the index against the sizes of the files.

        Raises:
            DataError: a file is missing, truncated, too long or damaged; the text names it.
        """
        bin_path, idx_path = pair(prefix)
        header = _read_header(idx_path)
        arrays = _index_arrays(idx_path, header)
        size = _size(bin_path)
        _check_index(idx_path, bin_path, size, header, *arrays)
        tokens = _mapped(bin_path, header.dtype, 0, size // header.dtype.itemsize)
        return IndexedDataset(os.fspath(prefix), tokens, *arrays)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence, a view of the file."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the tokens are stored in."""
        return self.tokens.dtype

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.document_indices) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of a document, a view of the file."""
        start, end = self.document_bounds(index, index + 1)
        return self.tokens[start[0] : end[0]]

    def document_bounds(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where in `tokens` the documents from `first` up to `last` begin and end."""
        indices = self.document_indices[first : last + 1]
        bounds = np.full(len(indices), len(self.tokens), np.int64)
        inside = indices < len(self.lengths)
        bounds[inside] = self.pointers[indices[inside]] // self.dtype.itemsize
        return bounds[:-1], bounds[1:]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(message(str(path), f"cannot be read: {error.strerror}.")) from error


def _read_header(path: Path) -> _Header:
    size = _size(path)
    if size < HEADER.size:
        raise _damaged(path, f"it has {size} bytes; the header alone has {HEADER.size}")
    with open(path, "rb") as file:
        magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC:
        raise _damaged(path, f"it begins with {magic!r} and not with {MAGIC!r}")
    if version != VERSION:
        raise _damaged(path, f"its version is {version}; version {VERSION} can be read")
    if code not in DTYPE_CODES:
        raise _damaged(path, f"its dtype code is {code}; known are 1 to {max(DTYPE_CODES)}")
    if entries < 1:
        raise _damaged(path, "it has no entry for the end of the documents")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size != expected:
        raise _damaged(
            path,
            f"{sequences} sequences and {entries} document entries need {expected} bytes; "
            f"it has {size}",
        )
    return _Header(DTYPE_CODES[code], sequences, entries - 1)


def _index_arrays(path: Path, header: _Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count, offset = header.sequences, HEADER.size
    return (
        _mapped(path, np.dtype("<i4"), offset, count),
        _mapped(path, np.dtype("<i8"), offset + 4 * count, count),
        _mapped(path, np.dtype("<i8"), offset + 12 * count, header.documents + 1),
    )


def _mapped(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)  # nothing cannot be mapped
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def _check_index(
    idx_path: Path,
    bin_path: Path,
    bin_size: int,
    header: _Header,
    lengths: np.ndarray,
    pointers: np.ndarray,
    document_indices: np.ndarray,
) -> None:
    """Check that the sequences fill the ``.bin`` file without a gap, and documents the sequences."""
    end = 0
    for first in range(0, header.sequences, _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64)
        if (wrong := _first(block < 0)) is not None:
            raise _damaged(idx_path, f"the length of sequence {first + wrong} is {block[wrong]}")
        ends = end + np.cumsum(block * header.dtype.itemsize)
        starts = np.concatenate([[end], ends[:-1]])
        found = pointers[first : first + _BLOCK]
        if (wrong := _first(found != starts)) is not None:
            what = f"sequence {first + wrong} is at byte {found[wrong]}, not at {starts[wrong]}"
            raise _damaged(idx_path, f"{what} where the one before it ends")
        end = int(ends[-1])
    if end != bin_size:
        raise _damaged(bin_path, f"it has {bin_size} bytes; {idx_path} counts {end}")
    if document_indices[0] != 0 or document_indices[-1] != header.sequences:
        raise _damaged(
            idx_path,
            f"its documents are the sequences from {document_indices[0]} up to "
            f"{document_indices[-1]}, not from 0 up to {header.sequences}",
        )
    for first in range(0, header.documents, _BLOCK):
        entries = document_indices[first : first + _BLOCK + 1]
        if (wrong := _first(entries[1:] < entries[:-1])) is not None:  # differences can overflow
            raise _damaged(idx_path, f"document {first + wrong} ends before it begins")


def _first(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(message(str(path), "is damaged, or no file of this format:", f"{why}."))
