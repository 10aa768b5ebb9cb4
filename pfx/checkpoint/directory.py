"""A directory of steps: their names, which are complete, and which one is the latest.

::

    run/latest                          the name of the step to resume from
    run/step-00000010/manifest.msgpack
    run/step-00000010/00000.bin         what rank 0 has written
    run/step-00000010~1/                the same step, saved once more
    run/.tmp-step-00000020-1f9c…/       an attempt that is not, or never was, finished

A step is complete when its manifest is whole and every file has the size that the manifest says.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from pfx.checkpoint.disk import read_whole
from pfx.checkpoint.manifest import Head, Manifest, read_head, read_manifest
from pfx.errors import CheckpointError, message

MANIFEST = "manifest.msgpack"
POINTER = "latest"
UNFINISHED = ".tmp-"
DISCARDED = ".old-"
_NAME = re.compile(r"step-(\d{8,18})(?:~(\d{1,9}))?")


@dataclass(frozen=True, order=True)
class Place:
    """A step's folder: the step, how often it had been saved before, and where it is."""

    step: int
    again: int
    path: Path

    @property
    def manifest(self) -> Path:
        """The file that says what is in it."""
        return self.path / MANIFEST


def name_of(step: int, again: int = 0) -> str:
    """The name of a step's folder.

    >>> name_of(10), name_of(10, 1)
    ('step-00000010', 'step-00000010~1')
    """
    return f"step-{step:08d}" + (f"~{again}" if again else "")


def parse(directory: Path, name: str) -> Place | None:
    """The place of a name; None when no step is named so."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    place = Place(int(found[1]), int(found[2] or 0), directory / name)
    return place if name_of(place.step, place.again) == name else None


def places(directory: Path) -> list[Place]:
    """All steps that have a folder, complete or not, in order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            message(str(directory), f"cannot be read: {error.strerror or error}.")
        ) from error
    return sorted(place for name in names if (place := parse(directory, name)) is not None)


def head_of(place: Place) -> Head:
    """The head of a complete step.

    Raises:
        CheckpointError: naming the file that is missing, short or damaged.
    """
    head = read_head(read_whole(place.manifest), str(place.manifest))
    _check(place, head)
    return head


def manifest_of(place: Place) -> Manifest:
    """The manifest of a complete step.

    Raises:
        CheckpointError: naming the file that is missing, short or damaged.
    """
    found = read_manifest(read_whole(place.manifest), str(place.manifest))
    _check(place, found.head)
    return found


def _check(place: Place, head: Head) -> None:
    if head.step != place.step:
        what = f"is of step {head.step}, in a folder named {place.path.name}."
        raise CheckpointError(message(str(place.manifest), what))
    for name, size in head.files.items():
        path = place.path / name
        try:
            found = path.stat().st_size
        except OSError:
            raise CheckpointError(message(str(path), "is missing.")) from None
        if found != size:
            what = f"has {found} bytes; the manifest says {size}."
            raise CheckpointError(message(str(path), what))


def problem_of(place: Place) -> str:
    """Why a step is not complete; nothing if it is."""
    try:
        head_of(place)
    except CheckpointError as error:
        return str(error)
    return ""


def complete(directory: Path) -> list[Place]:
    """The complete steps, in order; of one saved several times, the last complete one."""
    found = {place.step: place for place in places(directory) if not problem_of(place)}
    return list(found.values())


def latest_place(directory: Path) -> Place | None:
    """The step that the pointer names; warns and takes the newest complete one where it cannot.

    None: there is no complete step.
    """
    named, problem = _pointed(directory)
    if named is not None and not problem:
        return named
    whole = complete(directory)
    broken = [p for p in places(directory) if p not in whole and (not whole or p > whole[-1])]
    if whole or broken:
        used = f"step {whole[-1].step} is used" if whole else "no step is complete"
        reasons = [problem, *(problem_of(place) for place in broken if place != named)]
        warnings.warn(
            message(f"checkpoints in {directory}:", f"{used}.", *filter(None, reasons)),
            stacklevel=4,
        )
    return whole[-1] if whole else None


def _pointed(directory: Path) -> tuple[Place | None, str]:
    """The step that the pointer names, and what is wrong with it."""
    path = directory / POINTER
    try:
        name = read_whole(path, 256).decode().strip()
    except CheckpointError as error:
        return None, str(error)
    except UnicodeDecodeError:
        return None, message(str(path), "names no step.")
    place = parse(directory, name)
    if place is None:
        return None, message(str(path), f"names no step: {name[:40]!r}.")
    return place, problem_of(place)


def place_of(directory: Path, step: int | None) -> Place:
    """The folder of a complete step; None is the latest.

    Raises:
        CheckpointError: it is not there, or not complete, naming the missing or short file.
    """
    if step is None:
        found = latest_place(directory)
        if found is None:
            raise CheckpointError(
                message(
                    f"checkpoints in {directory}:",
                    "there is no complete step.",
                    fix="look at the path; a run that has saved nothing starts without restore",
                )
            )
        return found
    tried = [place for place in places(directory) if place.step == step]
    problems = {place: problem_of(place) for place in reversed(tried)}
    whole = [place for place, problem in problems.items() if not problem]
    if whole:
        return whole[0]
    known = ", ".join(str(place.step) for place in complete(directory)) or "none"
    what = f"step {step} is not complete." if tried else f"there is no step {step}."
    raise CheckpointError(
        message(f"checkpoints in {directory}:", what, *problems.values(), f"complete: {known}")
    )
