"""What a directory holds: its steps, the latest, the best, metadata, and whether all of it is sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfx.checkpoint.directory import (
    Place,
    complete,
    head_of,
    latest_place,
    manifest_of,
    place_of,
    places,
)
from pfx.checkpoint.manifest import Head, Leaf, Piece
from pfx.checkpoint.reading import THREADS, Shards, check_piece
from pfx.checkpoint.retention import rank
from pfx.checkpoint.saving import wait_for_pending
from pfx.checkpoint.threads import in_threads
from pfx.errors import CheckpointError
from pfx.mesh import Mesh
from pfx.runtime.process_world import together, world_of


def steps(directory: str | Path) -> list[int]:
    """The complete steps of a directory, in order; none if it is not there.

    >>> steps("/nowhere")
    []
    """
    path = _settled(directory)
    return [place.step for place in complete(path)]


def latest(directory: str | Path, mesh: Mesh | None = None) -> int | None:
    """The step to resume from; None if no step is complete.

    It is the one that the pointer file names. Where that is missing, or names a step that is not
    complete, it is the newest complete one, with a warning that says why.

    Args:
        mesh: of processes, to give every rank what rank 0 sees; all of them call it.

    >>> latest("/nowhere")
    """
    path, world = _settled(directory), world_of(mesh)
    step: int | None = None
    with together(world, "latest:", CheckpointError):
        if world.rank == 0 and (place := latest_place(path)) is not None:
            step = place.step
    return world.exchange(step, "the latest step")[0]


def best(directory: str | Path) -> int | None:
    """The best of the steps that were saved with tier="best"; None if there is none.

    >>> best("/nowhere")
    """
    sound = [head for _, head, _ in heads(directory) if head is not None]
    found = min((head for head in sound if head.tier == "best"), key=rank, default=None)
    return None if found is None else found.step


def metadata(directory: str | Path, step: int | None = None) -> Any:
    """What was given as `metadata` when a step (None: the latest) was saved.

    Raises:
        CheckpointError: the step is not there or not complete.
    """
    return manifest_of(place_of(_settled(directory), step)).metadata


def heads(directory: str | Path) -> Iterator[tuple[Place, Head | None, str]]:
    """Every step with a folder: its head, or what is wrong with it."""
    for place in places(_settled(directory)):
        try:
            yield place, head_of(place), ""
        except CheckpointError as error:
            yield place, None, str(error)


def verify(directory: str | Path, step: int | None = None) -> list[str]:
    """Read everything and compare checksums; returns what is wrong, a line for each file or piece.

    Args:
        step: None: every step of the directory, complete or not.

    Raises:
        CheckpointError: the directory has no such step.
    """
    path = _settled(directory)
    found = [place for place in places(path) if step in (None, place.step)]
    if not found:
        place_of(path, step)  # says so
    return [problem for place in found for problem in _problems(place)]


def _problems(place: Place) -> list[str]:
    try:
        manifest = manifest_of(place)
    except CheckpointError as error:
        return [str(error)]
    problems: list[str] = []

    def check(job: tuple[Leaf, Piece]) -> None:
        leaf, piece = job
        try:
            check_piece(shards, leaf, piece)
        except CheckpointError as error:
            problems.append(str(error))

    with Shards(place.path, manifest) as shards:
        jobs = [(leaf, piece) for leaf in manifest.leaves for piece in leaf.pieces]
        in_threads(check, jobs, THREADS)
    return sorted(problems)


def _settled(directory: str | Path) -> Path:
    path = Path(directory).resolve()
    wait_for_pending(path)
    return path
