"""Pipelines cut into stages, and stages into phases: what each device of the axis runs."""

from __future__ import annotations

from pfx.compiler.ir import Block, PipelineInstr
from pfx.compiler.stages.lay_out import lay_out
from pfx.compiler.stages.scheduled import schedule_of
from pfx.schedules.action import Schedule


def lay_out_pipelines(
    block: Block, schedule: str | Schedule | None, bucket_bytes: int, where: str
) -> None:
    """Give every pipeline of a program its schedule and its stages, in place."""
    for i, instr in enumerate(block.instrs):
        if isinstance(instr, PipelineInstr):
            made = schedule_of(instr, schedule, where)
            block.instrs[i] = lay_out(instr, made, bucket_bytes)
