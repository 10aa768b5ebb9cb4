"""JSON Lines as bytes: records end at ``\\n`` and nowhere else, and files are read in chunks.

A byte order mark at the start of a file and a ``\\r`` before the ``\\n`` are no part of a record.
U+2028, U+2029 and U+0085, at which ``str.splitlines`` would cut, are ordinary characters.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pfx.data.error import DataError
from pfx.errors import message

CHUNK_BYTES = 1 << 20
_SEARCH_BYTES = 1 << 16


class Line(NamedTuple):
    """A record: its line (from 1) and byte offset in the file, and its bytes without line end."""

    number: int
    offset: int
    data: bytes


class BadLine(NamedTuple):
    """A line that gave no document, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Chunk(NamedTuple):
    """A range of bytes of a file that begins and ends where lines do."""

    file: str
    offset: int
    size: int


def total_size(files: Sequence[str | os.PathLike[str]]) -> int:
    """Return the bytes of all files.

    Raises:
        DataError: there is no file, or one cannot be read or is a folder.
    """
    if not files:
        raise DataError(message("files", "are none.", fix="give at least one JSONL file"))
    total = 0
    for file in files:
        try:
            with open(file, "rb") as handle:
                status = os.fstat(handle.fileno())
        except OSError as error:
            what = f"cannot be read: {error.strerror}."
            raise DataError(message(os.fspath(file), what)) from error
        if not stat.S_ISREG(status.st_mode):  # a pipe has no size, and would be read as empty
            fix = "write what comes out of it to a file first"
            raise DataError(message(os.fspath(file), "is no ordinary file.", fix=fix))
        total += status.st_size
    return total


def chunks(files: Sequence[str | os.PathLike[str]], *, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut files into chunks of at least `size` bytes that end where a line does."""
    for file in files:
        with open(file, "rb") as handle:
            start, end_of_file = 0, os.fstat(handle.fileno()).st_size
            while start < end_of_file:
                end = _line_end(handle, min(start + size, end_of_file), end_of_file)
                yield Chunk(os.fspath(file), start, end - start)
                start = end


def _line_end(handle: Any, position: int, end_of_file: int) -> int:
    """Return the first place at or after `position` at which a line has just ended."""
    handle.seek(position - 1)
    while block := handle.read(_SEARCH_BYTES):
        if (found := block.find(b"\n")) >= 0:
            return handle.tell() - len(block) + found + 1
    return end_of_file


def read_chunk(chunk: Chunk) -> tuple[list[Line], int]:
    """Return the lines of a chunk that are not blank, and how many lines it has in all.

    Numbers count from 1 within the chunk, offsets within the file.
    """
    with open(chunk.file, "rb") as handle:
        handle.seek(chunk.offset)
        data = handle.read(chunk.size)
    lines: list[Line] = []
    offset = chunk.offset
    pieces = data.split(b"\n")
    for number, piece in enumerate(pieces, 1):
        start, width = offset, len(piece) + 1
        if start == 0 and piece.startswith(codecs.BOM_UTF8):
            piece, start = piece[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        record = piece.removesuffix(b"\r")
        if record.strip():
            lines.append(Line(number, start, record))
        offset += width
    return lines, len(pieces) - 1


def parse(line: bytes) -> tuple[Any, str]:
    """Return the value of a line and "", or None and why there is none."""
    try:
        return json.loads(line.decode("utf-8")), ""
    except UnicodeDecodeError as error:
        return None, f"no UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return None, f"no JSON: {error.msg} at character {error.pos}"
    except (RecursionError, ValueError) as error:
        return None, f"no JSON that can be read: {error}"


def text_of(record: Any, key: str) -> tuple[str, str]:
    """Return the text under a key of a record and "", or "" and why there is none.

    >>> text_of({"text": "abc"}, "text"), text_of({"body": "abc"}, "text")
    (('abc', ''), ('', 'no key "text"; it has "body"'))
    """
    if not isinstance(record, dict):
        return "", f"a {type(record).__name__} and not an object"
    if key not in record:
        names = ", ".join(f'"{name}"' for name in list(record)[:8])
        return "", f'no key "{key}"; it has {names or "none"}'
    text = record[key]
    if not isinstance(text, str):
        return "", f'"{key}" is a {type(text).__name__} and not a string'
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f'"{key}" holds half of a surrogate pair'
    return text, ""


def iterate_texts(files: Sequence[str | os.PathLike[str]], *, key: str = "text") -> Iterator[str]:
    """Yield the text of every good line; bad ones are left out.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "two.jsonl")
    ...     _ = path.write_bytes(b'{"text": "one"}\\n\\nnot json\\n{"text": "two"}')
    ...     list(iterate_texts([path]))
    ['one', 'two']
    """
    total_size(files)
    for chunk in chunks(files):
        for line in read_chunk(chunk)[0]:
            record, reason = parse(line.data)
            if reason:
                continue
            text, reason = text_of(record, key)
            if not reason:
                yield text
