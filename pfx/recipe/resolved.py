"""The resolved config: what a run was asked for, where each setting came from, and what may change.

``config.json`` in the run's directory and the metadata of every checkpoint hold it. A run that goes on
from a checkpoint compares; what the trained state or the order of the data depends on may not change.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pfx.errors import message
from pfx.recipe.config import Run
from pfx.recipe.overrides import ConfigError
from pfx.recipe.plain import decode, flat, plain

VERSION = 1

FIXED = (
    "model.module", "model.config", "data", "train.batch_size", "train.seed", "optimizer.name",
)  # fmt: skip
"""What decides the trained state's form, or which data a step sees: a changed one is another run."""

FREE = ("data.tokenizer", "model.config.remat")
"""Below those, what may change all the same."""


class Change(NamedTuple):
    """A setting that is not what it was; None for one that was not there."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {json.dumps(self.before)} -> {json.dumps(self.now)}"


def origins(run: Run, file: str, assignments: Sequence[str]) -> dict[str, str]:
    """Say for each setting that is not its field's default where it came from."""
    given = [text.partition("=")[0].strip() for text in assignments]
    usual = _defaults(run, "")
    found = {}
    for name, value in flat(run).items():
        if any(name == one or name.startswith(f"{one}.") for one in given):
            found[name] = "--set"
        elif name not in usual or usual[name] != value:
            found[name] = file
    return found


def _defaults(value: Any, path: str) -> dict[str, Any]:
    """The plain defaults of every field below a dataclass, by dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        where, now = (
            f"{path}.{field.name}" if path else field.name,
            getattr(value, field.name, None),
        )
        if dataclasses.is_dataclass(now):
            found.update(_defaults(now, where))
        elif field.default is not dataclasses.MISSING:
            found.update(flat(field.default, where))
        elif field.default_factory is not dataclasses.MISSING:
            found.update(flat(field.default_factory(), where))
    return found


def resolved(
    run: Run, origin: Mapping[str, str], contents: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config as JSON has it; what `origin` does not name is a default.

    Args:
        contents: how much data there are, see `pfx.recipe.sources.contents`.
    """
    record = {"version": VERSION, "config": plain(run), "from": dict(origin)}
    return record if contents is None else {**record, "contents": dict(contents)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a resolved config, readable and all at once."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)


def is_resolved(path: Path) -> bool:
    """Whether a file is a resolved config, and not, say, the config.json of Hugging Face weights."""
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(record, dict) and "config" in record and "from" in record


def read(path: Path) -> dict[str, Any]:
    """Read a resolved config back.

    Raises:
        ConfigError: the file is none.
    """
    try:
        return checked(json.loads(path.read_text()), str(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(message(f"{path}:", "no resolved config.", str(error))) from None


def checked(record: Any, where: str) -> dict[str, Any]:
    """Return a resolved config that was read, if it is one of this version."""
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise ConfigError(message(f"{where}:", "no resolved config."))
    if record.get("version") != VERSION:
        what = f"written as version {record.get('version')!r}; this is version {VERSION}."
        raise ConfigError(message(f"{where}:", what))
    return record


def changes(before: Mapping[str, Any], run: Run) -> list[Change]:
    """The settings that differ from those of a resolved config."""
    old, now = flat(before["config"]), flat(run)
    names = [*now, *(name for name in old if name not in now)]
    return [
        Change(name, old.get(name), now.get(name))
        for name in names
        if old.get(name) != now.get(name)
    ]


def may_change(name: str) -> bool:
    """Whether a run can go on from a checkpoint with another value of a setting.

    >>> may_change("train.steps"), may_change("plan.tp"), may_change("model.config.num_layers")
    (True, True, False)
    """
    below = lambda names: any(name == one or name.startswith(f"{one}.") for one in names)
    return below(FREE) or not below(FIXED)


def check_changes(found: Sequence[Change], directory: str) -> None:
    """Raise for changed settings that make it another run.

    Raises:
        ConfigError: listing each with its old and new value.
    """
    wrong = [str(change) for change in found if not may_change(change.name)]
    if wrong:
        fix = "the old values, or another directory: --set directory=runs/another"
        raise ConfigError(
            message(f"{directory}:", "its checkpoints are of another run.", *wrong, fix=fix)
        )


def check_contents(before: Mapping[str, Any], now: Mapping[str, Any], directory: str) -> None:
    """Raise for data that are not those which a run began with: its next batches would be others.

    Raises:
        ConfigError: listing each prefix with what it held and what it holds.
    """
    wrong = [
        f"{prefix}: {json.dumps(before[prefix])} -> {json.dumps(holds)}"
        for prefix, holds in now.items()
        if before.get(prefix, holds) != holds
    ]
    if wrong:
        fix = "the old files, or another directory: --set directory=runs/another"
        raise ConfigError(message(f"{directory}:", "its data have changed.", *wrong, fix=fix))


def model_of(record: Mapping[str, Any], kind: type) -> Any:
    """Make the model's Config of a resolved config again.

    Args:
        record: what `read` returned.
        kind: the Config class of the model's module.

    Raises:
        ConfigError: it does not fit the class.
    """
    try:
        return decode(record["config"]["model"]["config"], kind)
    except (KeyError, TypeError, ValueError) as error:
        what = f"does not fit {kind.__module__}.{kind.__qualname__}: {error}"
        raise ConfigError(message("model.config", what)) from None
