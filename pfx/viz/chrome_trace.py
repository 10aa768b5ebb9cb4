"""`chrome_trace`: the run of a pipeline for the trace viewers, chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from pfx.errors import message
from pfx.schedules import Row, Timeline
from pfx.viz.runs import Runs, Times, named_timelines
from pfx.viz.timeline import KINDS

Event = dict[str, Any]


def chrome_trace(
    schedules: Runs,
    path: str | PathLike[str] | None = None,
    *,
    t_f: float = 1.0,
    t_b: float = 1.0,
    t_w: float = 1.0,
    t_comm: float = 0.0,
    scale: float | None = None,
) -> str:
    """Write the run of a pipeline as Chrome trace events: a process per schedule, a thread a device.

    A computation is a complete event, a send or a receive an instant one; the stage, the kind and
    the microbatch are its arguments.

    Args:
        schedules: a `Schedule`, a `Timeline` (its own times), a `Program` (the times that
            `Program.timeline` predicts), or a list of (name, one of them).
        path: the file to write as well, replaced if it exists.
        t_f: of a `Schedule`: the time of a forward of one microbatch through all stages of a
            device, which share it equally; so schedules with and without virtual stages do the
            same work.
        t_b: the time of the gradient of the inputs, likewise.
        t_w: the time of the gradient of the weights, likewise.
        t_comm: the time a value takes to another device.
        scale: the microseconds that one unit of these times is; None: 1 for times without a unit,
            1e6 for seconds, which those of a program and of a measured run are.

    Returns:
        The JSON text.

    Raises:
        TypeError: it is none of them, times are given for what has its own, or some are seconds
            and others have no unit.
        ValueError: ``scale`` is not a positive number.
        ScheduleError: the schedule cannot run, or a time is negative or not finite.
        ShardingError: the program has no pipeline.

    >>> import json
    >>> from pfx import schedules
    >>> trace = chrome_trace(schedules.build("1f1b", stages=2, microbatches=2), t_f=250)
    >>> [(e["name"], e["ts"], e["dur"]) for e in json.loads(trace)["traceEvents"] if e["ph"] == "X"][:2]
    [('0F0', 0.0, 250.0), ('0F1', 250.0, 250.0)]

    The format is described in "Trace Event Format" (Google), sections "Complete Events", "Instant
    Events" and "Metadata Events".
    """
    where = "viz.chrome_trace"
    runs = named_timelines(where, schedules, Times(t_f, t_b, t_w, t_comm))
    if scale is None:
        scale = 1e6 if runs[0][1].unit else 1.0
    if not (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0):
        fix = "scale=1e6 for times in seconds"
        raise ValueError(
            message(f"{where}:", f"scale={scale!r:.60} is no positive number.", fix=fix)
        )
    events = [
        event
        for pid, (name, run) in enumerate(runs)
        for event in (*_labels(pid, name, run), *(_event(pid, row, scale) for row in run.rows()))
    ]
    text = _json(events)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _labels(pid: int, name: str, run: Timeline) -> Iterator[Event]:
    """Name the process and its threads, and keep both in order."""
    summary = f"{name} (bubble {100 * run.bubble:.1f}%)"
    process = {"ph": "M", "pid": pid, "tid": 0}
    yield process | {"name": "process_name", "args": {"name": summary}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": pid}}
    for device in range(run.schedule.num_devices):
        thread = {"ph": "M", "pid": pid, "tid": device}
        yield thread | {"name": "thread_name", "args": {"name": f"device {device}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": device}}


def _event(pid: int, row: Row, scale: float) -> Event:
    stage, kind, microbatch = row.action.stage, row.action.kind, row.action.microbatch
    event = {
        "name": str(row.action),
        "cat": KINDS[kind][1] if kind in KINDS else "communication",
        "pid": pid,
        "tid": row.device,
        "ts": row.start * scale,
        "args": {"stage": stage, "kind": kind, "microbatch": microbatch},
    }
    if kind in KINDS:
        return event | {"ph": "X", "dur": (row.end - row.start) * scale}
    return event | {"ph": "i", "s": "t"}  # an instant in its thread alone


def _json(events: list[Event]) -> str:
    """One event a line, so that two traces can be compared with diff."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'
