"""The checkpoints of a run: state in the tree, position and config in the metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfx import checkpoint
from pfx.errors import CheckpointError
from pfx.mesh import Mesh
from pfx.recipe.config import Checkpoint
from pfx.recipe.log import Sink
from pfx.recipe.position import Position, position_of
from pfx.train import TrainState, TrainStep

FOLDER = "checkpoints"
JOURNAL = "rewinds.jsonl"


class Saver:
    """Writes checkpoints, one at a time; the one thing that remembers a save under way."""

    def __init__(
        self, directory: Path, settings: Checkpoint, config: Mapping[str, Any], sink: Sink
    ) -> None:
        self.directory, self.settings = directory / FOLDER, settings
        self.config, self.sink = config, sink
        self.handle: Any = None

    def __call__(self, state: TrainState, at: Position, tier: str) -> None:
        """Save, in the background if the settings say so; an error of the last save is raised here."""
        self.wait()
        named: dict[str, Any] = {
            "metadata": {"position": at.to_plain(), "config": dict(self.config)},
            "tier": tier,
            "keep": self.settings.keep if tier == "regular" else None,
            "metric": at.best if tier == "best" else None,
        }
        tree = {"state": state}
        if self.settings.asynchronous and tier != "final":
            self.handle = checkpoint.save_async(self.directory, at.step, tree, **named)
        else:
            checkpoint.save(self.directory, at.step, tree, **named)
        self.sink.event("checkpoint", at.step, {"tier": tier})

    def failed(self) -> bool:
        """Whether the save under way has gone wrong; it is not waited for."""
        try:
            if self.handle is not None:
                self.handle.check()
        except CheckpointError:
            return True
        return False

    def wait(self) -> None:
        """Return once the last save is on disk; raises its error."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()


def last_position(directory: Path, mesh: Mesh) -> tuple[Position, dict[str, Any]] | None:
    """Where the newest checkpoint of a run is, and its resolved config; the same on all ranks."""
    folder = directory / FOLDER
    step = checkpoint.latest(folder, mesh)
    if step is None:
        return None
    metadata = checkpoint.metadata(folder, step)
    where = f"{folder}, step {step}"
    known = metadata if isinstance(metadata, dict) else {}
    return position_of(known.get("position"), where), known.get("config", {})


def restore(directory: Path, train: TrainStep, step: int) -> TrainState:
    """Read a state onto the mesh and plan of a training step, whatever those it was saved on."""
    like, specs = {"state": train.shapes}, {"state": train.state_specs}
    folder = directory / FOLDER
    try:
        return checkpoint.restore(folder, step, like=like, mesh=train.mesh, specs=specs)["state"]
    except CheckpointError as error:
        if "fix:" in str(error):
            raise
        fix = f"pfx ckpt verify {directory}; move step {step} away to go on from the one before"
        raise CheckpointError(f"{error}\n  fix: {fix}") from error


def journal(directory: Path, at: Position, data_step: int, rewinds: int) -> None:
    """Note that the run went back to a checkpoint, and with which data it goes on."""
    record = {"step": at.step, "data_step": data_step, "rewinds": rewinds}
    with (directory / JOURNAL).open("a") as file:
        file.write("\n" + json.dumps(record) + "\n")  # a kill may have torn the line before


def after_rewinds(directory: Path, at: Position, world: Any) -> Position:
    """A checkpoint's position, with the data that rewinds to it have left out.

    A checkpoint does not know that the run came back to it. Without this, a run that is killed after a
    rewind, and before its next checkpoint, would meet the same data again.
    """
    path = directory / JOURNAL
    text = path.read_text() if world.rank == 0 and path.exists() else ""
    for line in world.exchange(text, "the rewinds")[0].splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # empty; or torn by a kill, and the rewind had not begun
        if record["step"] == at.step and record["data_step"] > at.data_step:
            at = dataclasses.replace(at, data_step=record["data_step"], rewinds=record["rewinds"])
    return at
