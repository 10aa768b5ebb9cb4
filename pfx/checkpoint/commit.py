"""How many processes make one step: each writes its shard and its part, the leader commits.

Everything goes into a folder whose name holds a nonce that the ranks have agreed on for this one
attempt, so that nothing of an earlier, killed attempt can count. A part appears once its shard is
durable. The leader waits for all parts, writes the manifest, and renames the folder: that moment
makes the step complete. Then the pointer moves. A rank that fails says so in a file; ranks talk
through the folder alone, so a save in the background never meets a collective of the training step.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pfx.checkpoint.directory import (
    MANIFEST,
    POINTER,
    UNFINISHED,
    Place,
    head_of,
    name_of,
    places,
)
from pfx.checkpoint.disk import read_whole, sync_folder, write_whole
from pfx.checkpoint.manifest import (
    Manifest,
    Piece,
    opened,
    packed_piece,
    piece_of,
    sealed,
    write_manifest,
)
from pfx.checkpoint.retention import clean
from pfx.checkpoint.values import unpack
from pfx.errors import CheckpointError, message
from pfx.runtime.process_world import World

# Seconds that a save in the background goes on waiting for other ranks once the program has ended.
AFTER_THE_END = 10.0

Part = tuple[int, list[tuple[int, Piece]]]  # the size of a shard file; its pieces, with their leaf


@dataclass(frozen=True)
class Attempt:
    """One attempt to save a step."""

    directory: Path
    step: int
    nonce: str
    world: World

    @property
    def folder(self) -> Path:
        """Where everything lies until the step is complete."""
        return self.directory / f"{UNFINISHED}{name_of(self.step)}-{self.nonce}"

    @property
    def shard(self) -> Path:
        """This rank's file."""
        return self.folder / f"{self.world.rank:05d}.bin"

    def failure(self, rank: int) -> Path:
        """Where a rank says why it has failed: beside the folder, which may have its last name."""
        return self.directory / f"{UNFINISHED}failed-{rank:05d}-{self.nonce}"

    @property
    def where(self) -> str:
        """How errors begin."""
        return f"save: step {self.step} in {self.directory}"


def begin(attempt: Attempt) -> None:
    """Make the folder; the leader removes what killed attempts have left."""
    try:
        if not attempt.directory.is_dir():
            attempt.directory.mkdir(parents=True, exist_ok=True)
            sync_folder(attempt.directory.parent)
        if attempt.world.rank == 0:
            clean(attempt.directory, attempt.nonce)
        attempt.folder.mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot make a folder: {error.strerror or error}."
        raise CheckpointError(message(attempt.where, what)) from error


def finish(attempt: Attempt, part: Part, manifest: Callable[[Sequence[Part]], Manifest]) -> Place:
    """Hand in this rank's part, and return the step's place once it is complete.

    Args:
        manifest: makes the manifest of all ranks' parts; called on the leader.

    Raises:
        CheckpointError: another rank has failed, or did not come in time.
    """
    if attempt.world.rank == 0:
        return _commit(attempt, manifest([part, *_others(attempt)]))
    size, pieces = part
    packed = [[leaf, packed_piece(piece, 0)] for leaf, piece in pieces]
    write_whole(attempt.folder / _part(attempt.world.rank), sealed(attempt.nonce, [size, packed]))
    _wait(attempt, lambda: not attempt.folder.exists(), "the leader's commit")
    own = [place for place in places(attempt.directory) if place.step == attempt.step]
    place = next((place for place in own if _nonce_of(place) == attempt.nonce), None)
    if place is None:
        raise CheckpointError(message(attempt.where, "was given up by rank 0."))
    _wait(attempt, lambda: _points_to(attempt, place), "the leader's commit")
    return place


def fail(attempt: Attempt, error: BaseException) -> None:
    """Tell the other ranks, and free the space that this attempt has taken."""
    with suppress(OSError):
        if attempt.world.size == 1:
            shutil.rmtree(attempt.folder, ignore_errors=True)
            return
        attempt.shard.unlink(missing_ok=True)
        write_whole(attempt.failure(attempt.world.rank), str(error).encode("utf-8", "replace"))


def _others(attempt: Attempt) -> list[Part]:
    """The parts of all ranks but the leader."""
    ranks = range(1, attempt.world.size)
    wanted = {_part(rank): rank for rank in ranks}
    _wait(attempt, lambda: wanted.keys() <= _names(attempt.folder), "a rank's part", wanted)
    return [_read_part(attempt, rank) for rank in ranks]


def _read_part(attempt: Attempt, rank: int) -> Part:
    path = attempt.folder / _part(rank)
    try:
        nonce, body = map(unpack, opened(read_whole(path)))
        assert nonce == attempt.nonce
        size, packed = body
        files = [f"{rank:05d}.bin"]
        return size, [(leaf, piece_of(piece, files)) for leaf, piece in packed]
    except (ValueError, TypeError, AssertionError) as error:
        raise CheckpointError(message(str(path), "is damaged.", str(error))) from error


def _commit(attempt: Attempt, manifest: Manifest) -> Place:
    for name, size in manifest.head.files.items():
        path = attempt.folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            what = f"has {found} bytes; {size} were written."
            raise CheckpointError(message(str(path), what))
    for rank in range(1, attempt.world.size):
        (attempt.folder / _part(rank)).unlink()
    write_whole(attempt.folder / MANIFEST, write_manifest(manifest))  # syncs the folder too
    same = [place.again for place in places(attempt.directory) if place.step == attempt.step]
    again = max(same, default=-1) + 1
    place = Place(attempt.step, again, attempt.directory / name_of(attempt.step, again))
    os.rename(attempt.folder, place.path)
    sync_folder(attempt.directory)
    write_whole(attempt.directory / POINTER, f"{place.path.name}\n".encode())
    return place


def _wait(
    attempt: Attempt, ready: Callable[[], bool], what: str, wanted: dict[str, int] | None = None
) -> None:
    """Look until it is ready, or a rank has failed, or it is too late."""
    end, pause, ended = time.monotonic() + attempt.world.patience, 0.001, False
    while not ready():
        _raise_failure(attempt)
        if not ended and not threading.main_thread().is_alive():
            end, ended = min(end, time.monotonic() + AFTER_THE_END), True
        if time.monotonic() > end:
            here = _names(attempt.folder)
            missing = [rank for name, rank in (wanted or {}).items() if name not in here]
            late = f"ranks {', '.join(map(str, missing[:10]))}" if missing else "rank 0"
            raise CheckpointError(
                message(
                    attempt.where,
                    f"is not complete: {what} did not come in time.",
                    f"waited for: {late}",
                    fix="read what they printed, or wait longer: PFX_TIMEOUT=1200",
                )
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _raise_failure(attempt: Attempt) -> None:
    """Raise what another rank says about its failure."""
    start, nonce = f"{UNFINISHED}failed-", attempt.nonce
    for name in sorted(_names(attempt.directory)):
        if name.startswith(start) and name.endswith(nonce):
            text = read_whole(attempt.directory / name).decode("utf-8", "replace")
            rank = int(name.removeprefix(start).split("-")[0])
            where = f"{attempt.where}: rank {rank} has failed."
            raise CheckpointError(message(where, "", *text.splitlines()))


def _nonce_of(place: Place) -> str:
    """The nonce of a step; none of one that is damaged or just being removed."""
    try:
        return head_of(place).nonce
    except CheckpointError:
        return ""


def _points_to(attempt: Attempt, place: Place) -> bool:
    path = attempt.directory / POINTER
    return path.exists() and read_whole(path).decode("utf-8", "replace").strip() == place.path.name


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _part(rank: int) -> str:
    return f"part-{rank:05d}"
