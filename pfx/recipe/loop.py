"""The loop: steps, one after the other, and between them what is due.

The numbers of a step are read while the next one runs, so that the device never waits for the host;
before anything that depends on them (a checkpoint, an evaluation, the end) they are read at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from pfx.recipe.agree import stopping
from pfx.recipe.config import Run
from pfx.recipe.log import Sink
from pfx.recipe.monitor import Alarm, observe
from pfx.recipe.position import Position
from pfx.recipe.signals import Stop
from pfx.train import TrainState, TrainStep

HISTORY = 200  # steps whose numbers an incident report can show


class Unread(NamedTuple):
    """A step whose numbers are still on the device."""

    at: Position
    metrics: Mapping[str, Any]
    tokens: int
    started: float


class Seen(NamedTuple):
    """The numbers of a step, and which batch it saw."""

    step: int
    data_step: int
    numbers: dict[str, float]


class Saves(Protocol):
    """Writes checkpoints."""

    def __call__(self, state: TrainState, at: Position, tier: str) -> None:
        """Save; raises the error of the save before."""
        ...

    def failed(self) -> bool:
        """Whether the save under way has gone wrong."""
        ...

    def wait(self) -> None:
        """Return once nothing is under way; raises its error."""
        ...


@dataclass(frozen=True)
class Job:
    """What stays the same during a run.

    Attributes:
        run: the config.
        train: the compiled step.
        batches: a step's number to its batch.
        world: the processes.
        save: keeps the state at a position, in a tier; in the background, perhaps.
        rewind: after an alarm, write the report; returns the state and position to go on with, or
            None to stop. The state is handed over in a list, so that it can be freed: a device may
            not have the memory for two.
        evaluate: the loss and more on the held-out split; None: there is none.
        gauge: seconds and tokens of a step to more numbers (tokens/s, MFU, memory).
    """

    run: Run
    train: TrainStep
    batches: Callable[[int], Any]
    world: Any
    save: Saves
    rewind: Callable[[list[TrainState], Position, History, tuple[Alarm, ...]], Any]
    evaluate: Callable[[TrainState], dict[str, float]] | None
    gauge: Callable[[float, int], dict[str, float]]


@dataclass
class History:
    """The numbers of the last steps."""

    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def forget_after(self, step: int) -> None:
        """Drop what a rewind has undone."""
        while self.seen and self.seen[-1].step > step:
            self.seen.pop()


class Outcome(NamedTuple):
    """How a run ended: "done", "stopped" by somebody, or "failed" on too many alarms."""

    ending: str
    reason: str
    state: Any  # a TrainState; None where it was given up for an incident's report
    at: Position


def loop(job: Job, state: TrainState, at: Position, sink: Sink, stop: Stop) -> Outcome:
    """Train from a position to the last step, or until all ranks have been asked to stop."""
    history, unread, round = History(), None, 0
    held = [state]
    del state  # an incident may empty `held`, and then nothing else keeps the state
    while at.step < job.run.train.steps:
        if job.save.failed():
            stop.ask("a checkpoint could not be written")  # so that all ranks raise it together
        reason = stopping(job.world, stop, round)
        if reason and unread is None:
            job.save(held[0], at, "temporary")
            return Outcome("stopped", reason, held[0], at)
        course = _Course(at)
        if not reason:
            started = time.perf_counter()
            batch = job.batches(at.data_step)
            held[0], metrics = job.train.step(held[0], batch)
            at, earlier = at.advanced(), unread
            unread, round = Unread(at, metrics, _tokens(batch), started), round + 1
            course = _looked(job, held, at, earlier, started, history, sink)
        if unread is not None and course.on and (reason or due(job.run, at.step)):
            course, unread = _looked(job, held, course.at, unread, None, history, sink), None
        at = course.at
        if course.failed:
            return Outcome("failed", course.failed, held[0] if held else None, at)
        if course.back:
            unread = None
        elif unread is None and not reason:
            at = _between(job, held[0], at, sink)
    return Outcome("done", "", held[0], at)


class _Course(NamedTuple):
    """Where a run goes on: at an earlier step when `back`, not at all when it has `failed`."""

    at: Position
    back: bool = False
    failed: str = ""

    @property
    def on(self) -> bool:
        """Whether nothing is undone."""
        return not self.back and not self.failed


def _looked(
    job: Job,
    held: list[TrainState],
    at: Position,
    unread: Unread | None,
    ended: float | None,
    history: History,
    sink: Sink,
) -> _Course:
    """Read a step's numbers, and answer what is alarming in them; `held` has the state to go on with.

    An alarm that is only reported undoes nothing: the step that runs meanwhile is read as any other.
    """
    at, alarms = _read(job, at, unread, ended, history, sink)
    if not alarms:
        return _Course(at)
    found = job.rewind(held, at, history, alarms)
    if found is None:
        return _Course(at, failed=str(alarms[0]))
    held[:] = [found[0]]
    back = found[1].step < at.step
    if back:
        history.forget_after(found[1].step)
    return _Course(found[1], back)


def due(run: Run, step: int) -> bool:
    """Whether something other than the next step follows this one."""
    wanted = (run.checkpoint.every, run.checkpoint.temporary_every, run.evaluate.every)
    return step == run.train.steps or any(_turn(step, every) for every in wanted)


def _turn(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _read(
    job: Job,
    at: Position,
    unread: Unread | None,
    ended: float | None,
    history: History,
    sink: Sink,
) -> tuple[Position, tuple[Alarm, ...]]:
    """Fetch a step's numbers, log them and let the monitor look.

    A step takes from its start to that of the next one, or until its numbers are there.
    """
    if unread is None:
        return at, ()
    numbers = {name: float(value) for name, value in unread.metrics.items()}
    seconds = (time.perf_counter() if ended is None else ended) - unread.started
    step, data_step = unread.at.step, unread.at.data_step - 1
    numbers |= {**job.gauge(seconds, unread.tokens), "data_step": data_step}
    history.seen.append(Seen(step, data_step, numbers))
    sink.step(step, numbers)
    monitor, alarms = observe(job.run.monitor, at.monitor, numbers)
    return replace(at, monitor=monitor), alarms


def _between(job: Job, state: TrainState, at: Position, sink: Sink) -> Position:
    """Evaluate and save what is due after a step whose numbers are known, and which stays."""
    settings, last = job.run.checkpoint, at.step == job.run.train.steps
    better = False
    if job.evaluate is not None and (last or _turn(at.step, job.run.evaluate.every)):
        numbers = job.evaluate(state)
        sink.event("evaluate", at.step, numbers)
        better = settings.best and _lower(numbers["loss"], at.best)
        at = replace(at, best=numbers["loss"]) if better else at
    for tier in _tiers(job.run, at.step, better):
        job.save(state, at, tier)
    return at


def _lower(loss: float, best: float | None) -> bool:
    """Whether a loss is the best; one that is not finite never is."""
    return math.isfinite(loss) and (best is None or loss < best)


def _tiers(run: Run, step: int, better: bool) -> list[str]:  # noqa: FBT001
    """How a step is saved: once in each tier that may keep it when the others no longer do.

    A better one ends what "best" keeps, newer ones what "regular" does: neither stands for the other.
    """
    settings = run.checkpoint
    if step == run.train.steps:
        return ["best"] * better + ["final"]
    kept = ["best"] * better + ["regular"] * _turn(step, settings.every)
    return kept or ["temporary"] * _turn(step, settings.temporary_every)


def _tokens(batch: Any) -> int:
    leaf = batch["tokens"] if isinstance(batch, Mapping) and "tokens" in batch else None
    return 0 if leaf is None else leaf.numel()
