"""A step of a run once more, on demand: from the checkpoint before it, twice, and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfx import checkpoint
from pfx.errors import message
from pfx.recipe import saves
from pfx.recipe.build import make_step, model_functions
from pfx.recipe.config import Run
from pfx.recipe.incident import same_bits, same_number
from pfx.recipe.log import read_metrics
from pfx.recipe.overrides import ConfigError
from pfx.recipe.session import METRICS, start_at
from pfx.recipe.sources import sources
from pfx.runtime.process_world import world_of


@dataclass(frozen=True)
class Rerun:
    """What came of it.

    Attributes:
        step: which step.
        since: the checkpoint that it was repeated from.
        loss: of the step, now.
        logged: the losses of the steps since the checkpoint that the run's log has otherwise.
        compared: how many steps of the log could be compared.
        same: whether running the step twice gave the same bits.
    """

    step: int
    since: int
    loss: float
    logged: dict[int, tuple[float, float]]
    compared: int
    same: bool

    def __str__(self) -> str:
        lines = [
            f"step {self.step}, repeated from step {self.since}: loss {self.loss!r}",
            f"run twice from one state: {'the same bits' if self.same else 'OTHER BITS'}",
            f"losses that differ from the log: {len(self.logged)} of {self.compared}",
        ]
        lines += [f"  step {s}: {old!r} then, {new!r} now" for s, (old, new) in self.logged.items()]
        return "\n".join(lines)


def rerun(run: Run, step: int, note: Callable[[str], Any] = lambda text: None) -> Rerun:
    """Repeat a step of a run.

    The plan may be another one than the run's; then losses are the log's to rounding only.

    Args:
        run: the config.
        step: the update to repeat, from 1 on.
        note: is told of each step.

    Raises:
        ConfigError: the log does not have the steps since the last checkpoint before it.
    """
    directory = Path(run.directory)
    functions = model_functions(run.model)
    train = make_step(run, functions)
    world = world_of(train.mesh)
    before = [one for one in checkpoint.steps(directory / saves.FOLDER) if one < step]
    since = world.exchange(max(before, default=0), "a step to repeat")[0]
    known = read_metrics(directory / METRICS) if (directory / METRICS).exists() else {}
    missing = [one for one in range(since + 1, step + 1) if one not in known]
    if missing:
        what = f"has no step {missing[0]}."
        raise ConfigError(message(f"{directory / METRICS}:", what, fix="a step that was run"))
    batches, _ = sources(run)
    state = start_at(run, functions, train, since)
    differing: dict[int, tuple[float, float]] = {}
    loss, same = 0.0, True
    for one in range(since + 1, step + 1):
        batch = batches(int(known[one]["data_step"]))
        if one == step:
            same = same_bits(train, state, batch)
        state, metrics = train.step(state, batch)
        loss, then = float(metrics["loss"]), float(known[one]["loss"])
        if not same_number(loss, then):
            differing[one] = (then, loss)
        note(f"step {one}: loss {loss!r}")
    everywhere = all(world.exchange(same, "the bits of a step"))
    return Rerun(step, since, loss, differing, step - since, everywhere)
