"""Pipeline runs by name: what the pictures of schedules accept, and how they time it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pfx.compiler.program import Program
from pfx.errors import message
from pfx.schedules import Schedule, Timeline, simulate

Run = Schedule | Timeline | Program
Runs = Run | Sequence[tuple[str, Run]]


class Times(NamedTuple):
    """What a device spends on one microbatch, and what a transfer takes."""

    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_comm: float = 0.0


def named_timelines(where: str, schedules: Runs, times: Times) -> list[tuple[str, Timeline]]:
    """Read one run, or a list of (name, run); simulate the schedules, and predict the programs.

    Raises:
        TypeError: it is neither, the list is empty, times are given that nothing would use, or
            some times are in seconds and others are not.
        ShardingError: a program has no pipeline.
    """
    one = isinstance(schedules, Run)
    given: Any = [(None, schedules)] if one else schedules
    pairs: list[Any] = list(given) if isinstance(given, Sequence) else []
    if not pairs or not all(
        isinstance(p, tuple) and len(p) == 2 and isinstance(p[1], Run) for p in pairs
    ):
        raise TypeError(
            message(
                f"{where}:",
                "needs a Schedule, a Timeline or a Program, or a list of (name, one of them).",
                f"got: {schedules!r:.60}",
                fix=f'{where}([("1F1B", schedules.build("1f1b", stages=4, microbatches=8))])',
            )
        )
    if times != Times() and not any(_uses(run, times) for _, run in pairs):
        raise TypeError(
            message(
                f"{where}:",
                f"got times for a {type(pairs[0][1]).__name__}, which has its own.",
                f"got: {', '.join(f'{name}={time!r:.40}' for name, time in _changed(times))}",
                fix="pass them to schedules.simulate, or pass the Schedule",
            )
        )
    runs = [named for name, run in pairs for named in _named(where, name, run, times)]
    if len({run.unit for _, run in runs}) > 1:
        alone = next(name for name, run in runs if not run.unit)
        raise TypeError(
            message(
                f"{where}:",
                "got times in seconds and times without a unit.",
                f"{alone!r} has none",
                fix='schedules.simulate(schedule, ..., unit="s") for times that are seconds',
            )
        )
    return runs


def _uses(run: Run, times: Times) -> bool:
    """Tell whether times change anything of a run: a program has its own, but for ``t_comm``."""
    if isinstance(run, Program):
        return times == Times(t_comm=times.t_comm)
    return isinstance(run, Schedule)


def _named(where: str, name: object, run: Run, times: Times) -> Iterator[tuple[str, Timeline]]:
    if isinstance(run, Program):
        count = len(run.pipelines())
        for number in range(max(count, 1)):
            timeline = run.timeline(pipeline=number, t_comm=times.t_comm)
            label = timeline.schedule.name if name is None else str(name)
            yield f"{label}, pipeline {number}" if count > 1 else label, timeline
        return
    schedule = run.schedule if isinstance(run, Timeline) else run
    label = schedule.name if name is None else str(name)
    yield label, run if isinstance(run, Timeline) else _simulate(where, run, times)


def _simulate(where: str, schedule: Schedule, times: Times) -> Timeline:
    """Time a schedule whose devices divide their time equally among their stages."""
    for name, time in times._asdict().items():
        if not isinstance(time, int | float):
            raise TypeError(
                message(
                    f"{where}: {name}",
                    "must be a number.",
                    f"got: {time!r:.60}",
                    fix="for a time for each stage, pass schedules.simulate(schedule, ...)",
                )
            )
    t_f, t_b, t_w = (time / max(schedule.virtual, 1) for time in times[:3])
    return simulate(schedule, t_f=t_f, t_b=t_b, t_w=t_w, t_comm=times.t_comm)


def _changed(times: Times) -> Iterator[tuple[str, float]]:
    for name, time, default in zip(Times._fields, times, Times(), strict=True):
        if time != default:
            yield name, time
