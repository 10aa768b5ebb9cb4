"""Files that are durable once a function returns, and read with errors that name them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from pfx.errors import CheckpointError, message

LARGEST_MANIFEST = 1 << 32  # bytes


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that at any time there is either the old one or the new one, whole."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(fresh, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_whole(path: Path, limit: int = LARGEST_MANIFEST) -> bytes:
    """The bytes of a small file.

    Raises:
        CheckpointError: it is missing, no file, cannot be read, or is longer than `limit`.
    """
    try:
        # Opening a pipe would otherwise wait for somebody who writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(message(str(path), "is no ordinary file."))
            if size > limit:
                raise CheckpointError(
                    message(str(path), f"has {size} bytes; at most {limit} were expected.")
                )
            return file.read(size)
    except FileNotFoundError:
        raise CheckpointError(message(str(path), "is missing.")) from None
    except OSError as error:
        raise CheckpointError(
            message(str(path), f"cannot be read: {error.strerror or error}.")
        ) from error
