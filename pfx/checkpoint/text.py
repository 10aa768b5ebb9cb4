"""Steps as text, for people: what is in a directory, what is in a step, whether it is sound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pfx.checkpoint.asking import heads, verify
from pfx.checkpoint.directory import manifest_of, place_of
from pfx.checkpoint.manifest import Leaf
from pfx.checkpoint.values import TENSOR_KINDS, decode
from pfx.tree import path_string

_LONGEST = 60  # characters of a value


def listing(directory: str | Path) -> str:
    """A line for each step of a directory, with what is wrong under those that are not complete.

    >>> print(listing("/nowhere"))
    no steps in /nowhere
    """
    rows: list[tuple[str, ...]] = []
    notes: dict[int, str] = {}
    for place, head, problem in heads(directory):
        if head is None:
            notes[len(rows)] = problem
            rows.append((place.path.name, "incomplete", "", "", ""))
            continue
        metric = "" if head.metric is None else f"{head.metric:g}"
        rows.append((place.path.name, head.tier, size_text(head.nbytes), _time(head.saved), metric))
    if not rows:
        return f"no steps in {directory}"
    lines = aligned([("step", "tier", "size", "saved", "metric"), *rows])
    out = lines[:1]
    for number, line in enumerate(lines[1:]):
        out += [line, *(f"  {note}" for note in notes.get(number, "").splitlines())]
    return "\n".join(out)


def contents(directory: str | Path, step: int | None = None) -> str:
    """What a step (None: the latest) holds: a line for each leaf, and its metadata.

    Raises:
        CheckpointError: the step is not there or not complete.
    """
    place = place_of(Path(directory).resolve(), step)
    found = manifest_of(place)
    head, tensors = found.head, [leaf for leaf in found.leaves if leaf.kind in TENSOR_KINDS]
    mesh = " ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    lines = [
        f"{place.path.name}: {head.tier}, {size_text(head.nbytes)} in {len(head.files)} files, "
        f"{len(tensors)} tensors of {size_text(sum(leaf.nbytes for leaf in tensors))}"
        + (f", saved on {mesh}" if mesh else "")
    ]
    lines += aligned([(path_string(leaf.path) or ".", *_leaf(leaf)) for leaf in found.leaves])
    if found.metadata is not None:
        lines += ["metadata:", json.dumps(_named(found.metadata), indent=2, default=repr)]
    return "\n".join(lines)


def verdict(directory: str | Path, step: int | None = None) -> tuple[bool, str]:
    """Whether a step (None: every step) is sound, and the text that says so or what is wrong.

    Raises:
        CheckpointError: there is no such step.
    """
    problems = verify(directory, step)
    checked = "every step" if step is None else f"step {step}"
    if problems:
        return False, "\n".join(problems)
    return True, f"{checked} of {directory} is sound: all files are there, all checksums agree"


def size_text(nbytes: int) -> str:
    """Bytes for people.

    >>> size_text(1536), size_text(12)
    ('1.5 KiB', '12 B')
    """
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with their columns under each other.

    >>> aligned([("a", "bb"), ("ccc", "d")])
    ['a    bb', 'ccc  d']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _time(saved: int) -> str:
    try:
        return f"{datetime.fromtimestamp(saved / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return "no date"


def _named(value: Any) -> Any:
    """Metadata with keys that JSON has."""
    if isinstance(value, dict):
        keys = {key: key if isinstance(key, str) else repr(key) for key in value}
        return {keys[key]: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list) else value


def _leaf(leaf: Leaf) -> tuple[str, str]:
    if leaf.kind in TENSOR_KINDS:
        return leaf.text(), size_text(leaf.nbytes)
    return leaf.kind, _short(decode(leaf.kind, leaf.value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
