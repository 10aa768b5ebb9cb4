"""Pipelines cut into stages, and stages into phases: from one program for a microbatch to what each device runs."""

from __future__ import annotations

from pfx.compiler.ir import Block, PipelineInstr
from pfx.compiler.stages.lay_out import lay_out
from pfx.schedules.action import Schedule
from pfx.schedules.build import build


def lay_out_pipelines(block: Block, schedule: str | Schedule, bucket_bytes: int) -> None:
    """Give every pipeline of a program its schedule and its stages, in place."""
    for i, instr in enumerate(block.instrs):
        if isinstance(instr, PipelineInstr):
            devices = block.mesh.shape[instr.made.axis]
            if isinstance(schedule, str):
                made = build(schedule, stages=devices, microbatches=instr.made.length)
            else:
                made = schedule
            block.instrs[i] = lay_out(instr, made, bucket_bytes)
