"""JSON files that someone else wrote: bounded in size, without double keys, an object at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pfx.errors import message
from pfx.interop.hf.problems import WeightsError

MEGABYTE = 2**20


def read_json(path: Path, *, limit: int = 16 * MEGABYTE) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        limit: bytes above which the file is not read.

    Raises:
        WeightsError: the file is missing, too large, not JSON, or not an object.
    """
    text = read_text(path, limit=limit)
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise WeightsError(message(f"{path}:", "cannot be read as JSON.", str(error))) from error
    if not isinstance(value, dict):
        raise WeightsError(message(f"{path}:", f"holds a {type(value).__name__}, not an object."))
    return value


def read_text(path: Path, *, limit: int = 16 * MEGABYTE) -> str:
    """Read a text file in UTF-8 of at most `limit` bytes.

    Raises:
        WeightsError: the file is missing, too large, or not such text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise WeightsError(message(f"{path}:", f"cannot be read: {error.strerror}.")) from error
    if len(data) > limit:
        raise WeightsError(message(f"{path}:", f"is larger than {limit:,} bytes; not read."))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WeightsError(message(f"{path}:", "is not UTF-8.", str(error))) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return value
