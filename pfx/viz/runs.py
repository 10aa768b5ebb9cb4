"""Pipeline runs by name: what the pictures of schedules accept, and how they time it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pfx.errors import message
from pfx.schedules import Schedule, Timeline, simulate

Run = Schedule | Timeline
Runs = Run | Sequence[tuple[str, Run]]


class Times(NamedTuple):
    """What a device spends on one microbatch, and what a transfer takes."""

    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_comm: float = 0.0


def named_timelines(where: str, schedules: Runs, times: Times) -> list[tuple[str, Timeline]]:
    """Read one run, or a list of (name, run), and simulate the schedules.

    Raises:
        TypeError: it is neither, the list is empty, or times are given that nothing would use.
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
                "needs a Schedule or a Timeline, or a list of (name, either).",
                f"got: {schedules!r:.60}",
                fix=f'{where}([("1F1B", schedules.build("1f1b", stages=4, microbatches=8))])',
            )
        )
    if times != Times() and all(isinstance(run, Timeline) for _, run in pairs):
        raise TypeError(
            message(
                f"{where}:",
                "got times for a Timeline, which has its own.",
                f"got: {', '.join(f'{name}={time!r:.40}' for name, time in _changed(times))}",
                fix="pass them to schedules.simulate, or pass the Schedule",
            )
        )
    return [_named(where, name, run, times) for name, run in pairs]


def _named(where: str, name: object, run: Run, times: Times) -> tuple[str, Timeline]:
    schedule = run.schedule if isinstance(run, Timeline) else run
    label = schedule.name if name is None else str(name)
    return label, run if isinstance(run, Timeline) else _simulate(where, run, times)


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
