"""Write a ``.bin`` and ``.idx`` pair with flat memory; until it is whole, nothing looks like one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from pfx.data.error import DataError
from pfx.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, pair
from pfx.errors import message

_BLOCK = 1 << 16  # lengths that are turned into byte offsets at once
_INT32_MAX = 2**31 - 1


class IndexedWriter:
    """Write documents one after the other to ``PREFIX.bin`` and ``PREFIX.idx``.

    The names appear when a ``with`` block is left without an error, the ``.idx`` last. A killed run
    leaves ``PREFIX.bin.incomplete``, which the next one overwrites.

    Args:
        prefix: what both files' names begin with.
        dtype: of the stored tokens; `dtype_for` gives the one of a vocabulary.
        overwrite: replace the files that are there.

    Raises:
        DataError: the files are there already, or another run is writing them.

    >>> from pfx.data.indexed import IndexedDataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with IndexedWriter(f"{folder}/corpus", np.uint16) as writer:
    ...         writer.add_documents(np.array([5, 6, 7]), np.array([1, 2]))
    ...     dataset = IndexedDataset.open(f"{folder}/corpus")
    >>> dataset.document(1), dataset.num_documents
    (array([6, 7], dtype=uint16), 2)
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: np.dtype | type, *, overwrite: bool = False
    ) -> None:
        self.bin_path, self.idx_path = pair(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _code(self.dtype)
        if self.idx_path.exists() and not overwrite:
            fix = "choose another prefix, or overwrite=True (--overwrite)"
            raise DataError(message(str(self.idx_path), "exists.", fix=fix))
        folder = self.bin_path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._bin_part = _incomplete(self.bin_path)
        self._idx_part = _incomplete(self.idx_path)
        self._bin = _open_locked(self._bin_part)
        # Without a name, so that a killed run leaves nothing of them.
        self._lengths: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._documents: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._documents.write(np.zeros(1, "<i8").tobytes())
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add documents of one sequence each: their tokens joined, and how many each has."""
        self._add_sequences(tokens, lengths)
        first = self.num_sequences - len(lengths) + 1
        self._documents.write(np.arange(first, self.num_sequences + 1, dtype="<i8").tobytes())
        self.num_documents += len(lengths)

    def add_document(self, *sequences: Sequence[int] | np.ndarray) -> None:
        """Add one document of any number of sequences."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        filled = [array for array in arrays if len(array)]  # of no elements the dtype says nothing
        joined = np.concatenate(filled) if filled else np.empty(0, self.dtype)
        self._add_sequences(joined, np.array([len(array) for array in arrays], np.int64))
        self._documents.write(np.array([self.num_sequences], "<i8").tobytes())
        self.num_documents += 1

    def _add_sequences(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        if len(tokens) != int(lengths.sum()):
            raise ValueError(f"{len(tokens)} tokens for lengths that sum to {int(lengths.sum())}")
        if len(lengths) and int(lengths.max()) > _INT32_MAX:
            what = f"has {int(lengths.max())} tokens; the format counts up to {_INT32_MAX}."
            raise DataError(message(f"{self.bin_path}: a sequence", what))
        if self.dtype.kind in "iu" and not _whole(tokens):
            what = f"are {tokens.dtype.name}, and would be cut to {self.dtype.name}."
            raise DataError(message(f"{self.bin_path}: tokens", what, fix="give integers"))
        self._check_range(tokens)
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_sequences += len(lengths)
        self.num_tokens += len(tokens)

    def _check_range(self, tokens: np.ndarray) -> None:
        if self.dtype.kind not in "iu" or not len(tokens) or tokens.dtype == self.dtype:
            return
        limits = np.iinfo(self.dtype)
        for found in (int(tokens.min()), int(tokens.max())):
            if not limits.min <= found <= limits.max:
                what = f"does not fit in {self.dtype.name} ({limits.min} to {limits.max})."
                fix = "give the vocabulary's true size, or dtype=numpy.int32"
                raise DataError(message(f"{self.bin_path}: token id {found}", what, fix=fix))

    def finish(self) -> None:
        """Write the index, make all bytes durable, and give both files their names."""
        finish_together([self])

    def discard(self) -> None:
        """Close and remove what was written, unless it is finished."""
        if self._bin.closed:
            return
        for path in (self._bin_part, self._idx_part):
            path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        for file in (self._bin, self._lengths, self._documents):
            file.close()

    def write_index(self) -> None:
        """Write the index under its provisional name, and make both files' bytes durable."""
        _sync(self._bin)
        with open(self._idx_part, "wb") as file:
            counts = (self.num_sequences, self.num_documents + 1)
            file.write(HEADER.pack(MAGIC, VERSION, self._code, *counts))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, file)
            self._write_pointers(file)
            self._documents.seek(0)
            shutil.copyfileobj(self._documents, file)
            _sync(file)

    def _write_pointers(self, file: IO[bytes]) -> None:
        self._lengths.seek(0)
        end = 0
        while block := self._lengths.read(4 * _BLOCK):
            sizes = np.frombuffer(block, "<i4").astype("<i8") * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            file.write((ends - sizes).tobytes())
            end = int(ends[-1])

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.discard()


def finish_together(writers: Sequence[IndexedWriter], *, stale: Sequence[Path] = ()) -> None:
    """Finish several pairs as one: the ``.idx`` of the first writer appears last.

    Args:
        writers: all are written to no more.
        stale: index files of an earlier run that go with the first one's.
    """
    for writer in writers:
        writer.write_index()
    # An old index beside new tokens would look whole, so the old ones go first.
    for path in [*(writer.idx_path for writer in writers), *stale]:
        path.unlink(missing_ok=True)
    folders = {writer.bin_path.parent for writer in writers}
    _sync_folders(folders)
    for writer in writers:
        os.replace(_incomplete(writer.bin_path), writer.bin_path)
    _sync_folders(folders)
    for writer in reversed(writers):
        os.replace(_incomplete(writer.idx_path), writer.idx_path)
        writer._close()
    _sync_folders(folders)


def _whole(tokens: np.ndarray) -> bool:
    """Whether all tokens are whole numbers."""
    if tokens.dtype.kind == "f":
        return bool((np.isfinite(tokens) & (np.trunc(tokens) == tokens)).all())
    return tokens.dtype.kind in "iub"


def _code(dtype: np.dtype) -> int:
    for code, known in DTYPE_CODES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in DTYPE_CODES.values())
    raise DataError(message(f"IndexedWriter: dtype {dtype}", f"cannot be stored; one of {names}."))


def _incomplete(path: Path) -> Path:
    return path.with_name(path.name + ".incomplete")


def _open_locked(path: Path) -> IO[bytes]:
    """Open for writing; only once the lock is held is what is there thrown away."""
    file = open(path, "ab")  # noqa: SIM115 (closed by the writer)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other run may have finished just now: what is open is then its whole file.
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileExistsError(path)
    except OSError as error:
        file.close()
        what = "is being written by another run."
        raise DataError(
            message(str(path), what, fix="wait for it, or choose another prefix")
        ) from error
    file.truncate(0)
    return file


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folders(folders: set[Path]) -> None:
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot
                os.fsync(handle)
        finally:
            os.close(handle)
