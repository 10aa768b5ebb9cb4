"""Where a run is, besides its trained state: what is saved in the metadata of every checkpoint."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pfx.errors import message
from pfx.recipe.monitor import MonitorState
from pfx.recipe.overrides import ConfigError
from pfx.recipe.plain import decode


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: updates made, skipped ones counted.
        data_step: batches used or left out; the next batch is that of this number.
        rewinds: how often the run went back.
        best: the lowest evaluation loss so far.
        monitor: the running means.
    """

    step: int = 0
    data_step: int = 0
    rewinds: int = 0
    best: float | None = None
    monitor: MonitorState = field(default_factory=MonitorState)

    def advanced(self) -> Position:
        """After one more step."""
        return replace(self, step=self.step + 1, data_step=self.data_step + 1)

    def to_plain(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def position_of(record: Any, where: str) -> Position:
    """Read a position back.

    Raises:
        ConfigError: the record is none.

    >>> position_of(Position(step=3).to_plain(), "x").step
    3
    """
    if isinstance(record, Mapping):
        known = typing.get_type_hints(Position)
        try:
            return Position(**{name: decode(record[name], kind) for name, kind in known.items()})
        except (KeyError, ValueError):
            pass
    raise ConfigError(message(f"{where}:", "its metadata do not say where the run was."))
