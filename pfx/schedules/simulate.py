"""How long a schedule takes: every action at the earliest time that its needs allow.

The model is the one of Qi et al. 2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241): a device
runs one computation at a time, a value reaches another device ``t_comm`` after it is made, and
transfers hold up nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pfx.errors import message
from pfx.schedules.action import COMPUTATIONS, Action, Schedule, ScheduleError
from pfx.schedules.order import Value, needs, play, value
from pfx.schedules.validate import peak_activations, validate

Time = float | Sequence[float]
"""One time for all stages, or one for each."""

Times = Mapping[Action, float] | Callable[[Action], float]
"""The time of each computation."""


class Row(NamedTuple):
    """One bar of a chart: an action, where and when."""

    device: int
    action: Action
    start: float
    end: float


_SECONDS = ((0, "s"), (3, "ms"), (6, "us"))


@dataclass(frozen=True)
class Timeline:
    """Hold when each action of a schedule starts and ends.

    Args:
        schedule: what was simulated.
        start: for each device the start of each of its actions.
        end: likewise the ends. A send or a receive takes no time of its device.
        unit: of the times: "s" for seconds, "" for a unit without a name.
    """

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    unit: Literal["", "s"] = ""

    def rows(self) -> tuple[Row, ...]:
        """Return a row ``(device, action, start, end)`` for each action, device by device."""
        return tuple(
            Row(device, action, start, end)
            for device, (actions, starts, ends) in enumerate(
                zip(self.schedule.devices, self.start, self.end, strict=True)
            )
            for action, start, end in zip(actions, starts, ends, strict=True)
        )

    def computations(self) -> tuple[Row, ...]:
        """Return the rows that are computations."""
        return tuple(row for row in self.rows() if row.action.kind in COMPUTATIONS)

    @property
    def makespan(self) -> float:
        """The longest time from a device's first computation's start to its last one's end."""
        spans: dict[int, tuple[float, float]] = {}
        for row in self.computations():
            first, last = spans.get(row.device, (row.start, row.end))
            spans[row.device] = min(first, row.start), max(last, row.end)
        return max((last - first for first, last in spans.values()), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of ``makespan`` that a device is idle: ``(makespan - work) / makespan``.

        The work is that of one device, on average where they differ (Qi et al. 2023, section 5.3).
        """
        work = math.fsum(row.end - row.start for row in self.computations())
        makespan = self.makespan
        return 1 - work / len(self.schedule.devices) / makespan if makespan else 0.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations that each device holds at once."""
        return peak_activations(self.schedule)

    def time_text(self, digits: int) -> str:
        """Return the makespan with so many digits; seconds as what is read best of s, ms and us."""
        if not self.unit:
            return f"{self.makespan:.{digits}g}"
        power, name = next((p, n) for p, n in _SECONDS if self.makespan >= 10.0**-p or p == 6)
        return f"{self.makespan * 10**power:.{min(digits, 3)}g} {name}"

    def text(self, *, width: int = 120) -> str:
        """Return a grid of characters: a line per device, time to the right, dots for idle time.

        Args:
            width: the most characters that the time may take; a chart that needs more is squeezed
                and shows the kinds of the actions alone.

        >>> from pfx.schedules.text import parse
        >>> print(simulate(parse("0F0 0B0\\n1F0 1B0"), t_f=1, t_b=1, t_w=1).text())
        device 0: 0F0 ............0B0----
        device 1: ....1F0 1B0---- .......
        makespan 6, bubble 50.0%
        """
        bars = self.computations()
        total = max((bar.end for bar in bars), default=0.0)
        named = _scale(bars)
        scale = min(named, width / total if total else 0.0)
        rows: list[list[str]] = [["."] * round(total * scale) for _ in self.schedule.devices]
        for bar in bars:
            name = str(bar.action) if scale == named else bar.action.kind
            first, last = round(bar.start * scale), round(bar.end * scale)
            rows[bar.device][first:last] = _label(name, last - first)
        lines = [f"device {device}: {''.join(row).rstrip()}" for device, row in enumerate(rows)]
        lines.append(f"makespan {self.time_text(6)}, bubble {100 * self.bubble:.1f}%")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def simulate(
    schedule: Schedule,
    *,
    t_f: Time | None = None,
    t_b: Time | None = None,
    t_w: Time = 0.0,
    t_comm: float = 0.0,
    times: Times | None = None,
    unit: Literal["", "s"] = "",
) -> Timeline:
    """Time every action of a schedule, each at the earliest start that its needs allow.

    The times are of one stage in any unit: where a device holds ``v`` stages, divide the times of
    a device by ``v``. An ``I`` takes ``t_b``, a ``W`` takes ``t_w``, a whole backward ``B`` both.
    Whether sends and receives are written out changes no time.

    Args:
        schedule: what to time; it is validated first.
        t_f: the time of a forward, one number or one for each stage.
        t_b: the time of the gradient of the input, likewise.
        t_w: the time of the gradient of the weights, likewise.
        t_comm: the time a value takes to another device.
        times: instead of ``t_f``, ``t_b`` and ``t_w`` the time of each computation: a mapping from
            `Action`, or a function of one.
        unit: of all these times: "s" for seconds, "" for one without a name.

    Raises:
        TypeError: neither or both of ``times`` and ``t_f``, ``t_b`` are given.
        ScheduleError: the schedule cannot run, or a time is missing, negative or not finite, or
            not one for each stage.

    >>> from pfx.schedules.text import parse
    >>> timeline = simulate(parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"), t_f=1, t_b=1)
    >>> timeline.makespan, round(timeline.bubble, 4), timeline.peak_activations
    (6.0, 0.3333, (2, 1))
    >>> simulate(timeline.schedule, times=lambda action: 1 + action.stage).makespan
    10.0
    """
    validate(schedule)
    costs = _costs(schedule, _given(schedule, t_f, t_b, t_w, times))
    (delay,) = _times("t_comm", t_comm, 1)
    clock = [0.0] * schedule.num_devices
    made: dict[Value, tuple[float, int]] = {}
    start: list[list[float]] = [[] for _ in clock]
    end: list[list[float]] = [[] for _ in clock]
    for device, action in play(schedule):
        arrivals = [
            time + delay * (maker != device)
            for time, maker in (made[need] for need in needs(action, schedule))
        ]
        begin = max([clock[device], *arrivals])
        clock[device] = begin + costs.get(action, 0.0)
        made[value(action)] = clock[device], device
        start[device].append(begin)
        end[device].append(clock[device])
    return Timeline(schedule, tuple(map(tuple, start)), tuple(map(tuple, end)), unit)


def _given(
    schedule: Schedule, t_f: Time | None, t_b: Time | None, t_w: Time, times: Times | None
) -> Times:
    """Return the times as they were given, or from those of the kinds."""
    kinds = {"t_f": t_f, "t_b": t_b, "t_w": t_w or None}
    if times is not None:
        if extra := [name for name, time in kinds.items() if time is not None]:
            what = f"got times and {', '.join(extra)}."
            raise TypeError(message("simulate:", what, fix="give times alone, or t_f, t_b and t_w"))
        return times
    if t_f is None or t_b is None:
        what = f"got no {'t_f' if t_f is None else 't_b'}."
        raise TypeError(message("simulate:", what, fix="simulate(schedule, t_f=1, t_b=1, t_w=1)"))
    table = _by_kind(schedule.stages, t_f, t_b, t_w)
    return lambda action: table[action.kind, action.stage]


def _costs(schedule: Schedule, times: Times) -> dict[Action, float]:
    """Return the time of each computation."""
    found: dict[Action, float] = {}
    for _, action in schedule.computations().actions():
        if isinstance(times, Mapping) and action not in times:
            what, fix = f"has no time for {action}.", "give one for every computation"
            raise ScheduleError(message("simulate: times", what, fix=fix))
        time = times[action] if isinstance(times, Mapping) else times(action)
        (found[action],) = _times(f"the time of {action}", time, 1)
    return found


def _by_kind(count: int, t_f: Time, t_b: Time, t_w: Time) -> dict[tuple[str, int], float]:
    """Return the time of each kind of computation of each stage."""
    times = {"F": _times("t_f", t_f, count), "I": _times("t_b", t_b, count)}
    times["W"] = _times("t_w", t_w, count)
    times["B"] = tuple(i + w for i, w in zip(times["I"], times["W"], strict=True))
    return {(kind, stage): row[stage] for kind, row in times.items() for stage in range(count)}


def _times(name: str, time: Time, stages: int) -> tuple[float, ...]:
    times = tuple(time) if isinstance(time, Sequence) else (time,) * stages
    if len(times) != stages:
        raise ScheduleError(
            message(
                f"simulate: {name}",
                f"has {len(times)} times for {stages} stages.",
                fix=f"give one number, or {stages}",
            )
        )
    for number in times:
        if not (math.isfinite(number) and number >= 0):
            raise ScheduleError(
                message(f"simulate: {name}", f"is {number}.", fix="give a time of at least 0")
            )
    return tuple(map(float, times))


def _scale(bars: Sequence[Row]) -> float:
    """Return the characters per unit of time that give every label its place and a space."""
    lengths = [(bar.end - bar.start, len(str(bar.action)) + 1) for bar in bars]
    return max((label / length for length, label in lengths if length > 0), default=0.0)


def _label(name: str, size: int) -> str:
    """Return a name in ``size`` characters, the last of them a gap if there is room for one."""
    return (name.ljust(size - 1, "-") + " ")[: max(size, 0)]
