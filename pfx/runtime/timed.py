"""Measured runs of a pipeline: when each action started and ended, on a clock in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pfx.compiler.ir import PipelineInstr
from pfx.compiler.program import Program
from pfx.errors import ShardingError, message
from pfx.runtime import device
from pfx.schedules import Action, Timeline, simulate

Record = Callable[[Action, float, float], None]
Spans = Mapping[Action, tuple[float, float]]


class Log:
    """The spans of one run, by action."""

    def __init__(self) -> None:
        self.spans: dict[Action, tuple[float, float]] = {}

    def record(self, action: Action, start: float, end: float) -> None:
        """Note a span."""
        self.spans[action] = start, end


def only_pipeline(program: Program) -> PipelineInstr:
    """The pipeline of a program that has one; an action does not say which of several."""
    count = len(program.pipelines())
    if count > 1:
        what = f"has {count} pipelines, whose actions have the same names."
        raise ShardingError(message("timed:", what, fix="time a function with one of them"))
    return program.pipeline()


class Watch:
    """Times one action after the other, and reports each; the device has then done its work."""

    def __init__(self, record: Record, device_type: str) -> None:
        self.record, self.device, self.started = record, device_type, 0.0

    def start(self) -> None:
        """An action begins."""
        device.synchronize(self.device)
        self.started = time.perf_counter()

    def stop(self, action: Action) -> None:
        """It is done."""
        device.synchronize(self.device)
        self.record(action, self.started, time.perf_counter())


def as_if_parallel(instr: PipelineInstr, spans: Spans) -> Timeline:
    """Lay out actions that ran one after the other as their devices would run them at once."""
    assert instr.schedule is not None
    seconds = {action: end - start for action, (start, end) in spans.items()}
    return simulate(instr.schedule.computations(), times=seconds, unit="s")


def as_it_was(instr: PipelineInstr, spans: Spans) -> Timeline:
    """Put the spans of all actions, on one clock, in the order of the schedule; from 0 on."""
    assert instr.schedule is not None
    schedule = instr.schedule.computations()
    zero = min((start for start, _ in spans.values()), default=0.0)
    starts = (tuple(spans[action][0] - zero for action in row) for row in schedule.devices)
    ends = (tuple(spans[action][1] - zero for action in row) for row in schedule.devices)
    return Timeline(schedule, tuple(starts), tuple(ends), "s")
