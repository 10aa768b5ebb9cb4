"""Lay a pipeline out: which layers each stage has, and what it runs in each phase.

Every stage is cut from the one program for a microbatch, so all agree on what travels between them, and
compiling does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pfx.compiler.ir import PipelineInstr, Stage
from pfx.compiler.stages.phases import stage_of
from pfx.compiler.stages.share import Layers, Share
from pfx.mesh import Mesh
from pfx.schedules.action import Schedule
from pfx.schedules.in_turn import in_turn


def lay_out(instr: PipelineInstr, schedule: Schedule, bucket_bytes: int) -> PipelineInstr:
    """Give a pipeline its schedule and its stages."""
    schedule = in_turn(schedule)
    stages: list[Stage] = []
    alike: dict[Any, Stage] = {}
    for layers in layers_of(instr.made.axis, instr.made.layers, instr.body.mesh, schedule):
        kinds = frozenset(a.kind for _, a in schedule.actions() if a.stage == len(stages))
        share = Share(instr, layers)
        # What tells two inner stages apart is rows of what is no parameter, such as keys.
        start = layers.start if share.selects else 0
        key = (layers.first, layers.last, len(layers), start, kinds)
        if key not in alike:
            alike[key] = stage_of(share, kinds, bucket_bytes)
        where = {name: getattr(layers, name) for name in ("device", "start", "stop", "rows")}
        stages.append(replace(alike[key], **where))
    return replace(instr, schedule=schedule, stages=tuple(stages))


def layers_of(axis: str, layers: int, mesh: Mesh, schedule: Schedule) -> Iterator[Layers]:
    """The layers of each stage; a device's own part of a stack has those of its stages in order."""
    blocks = mesh.blocks(axis, layers)
    held = [0] * mesh.shape[axis]
    for stage, (device, (start, stop)) in enumerate(zip(schedule.place, blocks, strict=True)):
        rows = held[device], held[device] + stop - start
        held[device] = rows[1]
        yield Layers(device, start, stop, rows, stage == 0, stage == schedule.stages - 1)
