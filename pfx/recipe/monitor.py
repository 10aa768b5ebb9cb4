"""The monitor: running means of loss and gradient norm, and what is alarming beside them.

Pure: ``observe(settings, state, numbers) -> (state, alarms)``. Its state is five numbers, saved with
every checkpoint, so that a run that goes on raises the alarms it would have raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pfx.recipe.config import Monitor

Kind = Literal["nonfinite", "spike", "skips"]


@dataclass(frozen=True)
class MonitorState:
    """Running means, how many steps they are of, and how many steps were skipped.

    Attributes:
        count: steps that are in the means.
        loss: the running mean.
        grad_norm: the running mean.
        skipped: steps skipped in the whole run.
        in_a_row: steps skipped just now, one after the other.
    """

    count: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    skipped: int = 0
    in_a_row: int = 0


@dataclass(frozen=True)
class Alarm:
    """One thing that should not be: the metric, its value and what it was compared with."""

    kind: Kind
    metric: str
    value: float
    mean: float
    limit: float

    def __str__(self) -> str:
        if self.kind == "nonfinite":
            return f"{self.metric} is {self.value}; its running mean is {self.mean:.4g}"
        if self.kind == "skips":
            return f"{self.value:.0f} steps in a row were skipped; the limit is {self.limit:.0f}"
        times = self.value / self.mean
        return (
            f"{self.metric} {self.value:.4g} is {times:.1f} times its running mean {self.mean:.4g}; "
            f"the limit is {self.limit:.4g}"
        )


def observe(
    settings: Monitor, state: MonitorState, numbers: Mapping[str, float]
) -> tuple[MonitorState, tuple[Alarm, ...]]:
    """Look at the numbers of one step.

    A step that was skipped changed nothing: it is counted, and alarming only as one of many. What is
    alarming does not enter the means.

    Args:
        settings: what counts as a spike.
        state: of the steps before.
        numbers: "loss", "grad_norm", and "skipped" (in the whole run) if steps can be.

    >>> state, _ = observe(Monitor(warmup=1), MonitorState(), {"loss": 2.0, "grad_norm": 1.0})
    >>> _, alarms = observe(Monitor(warmup=1), state, {"loss": 30.0, "grad_norm": 1.0})
    >>> print(alarms[0])
    loss 30 is 15.0 times its running mean 2; the limit is 20
    """
    skipped = int(numbers.get("skipped", state.skipped))
    if skipped > state.skipped:
        return _skipped(settings, replace(state, skipped=skipped, in_a_row=state.in_a_row + 1))
    state = replace(state, skipped=skipped, in_a_row=0)
    alarms = tuple(
        alarm
        for name, mean in (("loss", state.loss), ("grad_norm", state.grad_norm))
        if name in numbers
        for alarm in _judged(settings, state.count, name, float(numbers[name]), mean)
    )
    return (state if alarms else _averaged(settings, state, numbers)), alarms


def _skipped(settings: Monitor, state: MonitorState) -> tuple[MonitorState, tuple[Alarm, ...]]:
    if state.in_a_row < settings.max_skips:
        return state, ()
    alarm = Alarm("skips", "skipped", state.in_a_row, 0.0, settings.max_skips)
    return replace(state, in_a_row=0), (alarm,)


def _judged(settings: Monitor, count: int, name: str, value: float, mean: float) -> list[Alarm]:
    limit = settings.factor * mean
    if not math.isfinite(value):
        return [Alarm("nonfinite", name, value, mean, limit)]
    if count >= settings.warmup and count and mean > 0 and value > limit:
        return [Alarm("spike", name, value, mean, limit)]
    return []


def _averaged(settings: Monitor, state: MonitorState, numbers: Mapping[str, float]) -> MonitorState:
    """A plain mean of the first steps, then one that forgets: each step weighs at least 1/window."""
    count = state.count + 1
    weight = 1 / min(count, settings.window)
    mean = lambda old, name: old + weight * (float(numbers.get(name, old)) - old)
    return replace(
        state,
        count=count,
        loss=mean(state.loss, "loss"),
        grad_norm=mean(state.grad_norm, "grad_norm"),
    )
