"""The schedule of a pipeline: built by name, or a user's own, and checked against what it is to run."""

from __future__ import annotations

from dataclasses import replace

from pfx.compiler.ir import LoopInstr, PipelineInstr
from pfx.errors import ShardingError, message
from pfx.mesh import Mesh
from pfx.schedules import Schedule, build, validate
from pfx.schedules.build import virtual_stages


def schedule_of(instr: PipelineInstr, wanted: str | Schedule | None, where: str) -> Schedule:
    """The schedule to run a pipeline by; of one that has no backward pass, the forward actions.

    Raises:
        ShardingError: the schedule is for other devices, microbatches or places, or only forward.
        ScheduleError: it cannot run.
    """
    axis, mesh = instr.made.axis, instr.body.mesh
    place, devices = place_of(axis, mesh), mesh.shape[axis]
    made = wanted
    if not isinstance(made, Schedule):
        held = len(place) // devices
        name = made or ("1f1b" if held == 1 else "interleaved")
        virtual = virtual_stages(name) if virtual_stages(name) > 1 else held
        made = build(name, stages=devices, microbatches=instr.made.length, virtual=virtual)
    made = made.computations()
    if not trains(instr):
        made = only_forward(made)
    where = f"{where}: schedule {made.name!r}"
    if made.num_devices != devices or made.microbatches != instr.made.length:
        raise ShardingError(
            message(
                where,
                "is for another pipeline.",
                f"schedule: {made.num_devices} devices, {made.microbatches} microbatches",
                f"pipeline: {axis}={devices}, {instr.made.length} microbatches",
                fix=f"schedules.build(..., stages={devices}, microbatches={instr.made.length})",
            )
        )
    if made.place != place:
        raise ShardingError(
            message(
                where,
                "puts the stages on other devices than the mesh puts the layers.",
                f"schedule: stages on devices {made.place}",
                f"mesh: {mesh}, stages on devices {place}",
                fix=f'make_mesh(..., deals={{"{axis}": Deal({made.place})}})',
            )
        )
    sizes = dict(mesh.deals)[axis].sizes if axis in dict(mesh.deals) else ()
    if sizes and sum(sizes) != instr.made.layers:
        raise ShardingError(
            message(
                f"{where.split(':')[0]}: stages",
                f"of {sizes} layers do not hold the {instr.made.layers} layers that are scanned.",
                f"{' + '.join(map(str, sizes))} = {sum(sizes)}; layers: {instr.made.layers}",
                f"mesh: {mesh}",
                fix=f"sizes whose sum is {instr.made.layers}, or none for equal ones",
            )
        )
    validate(made)
    if trains(instr) and not any(
        action.kind == "B" or action.kind == "I" for _, action in made.actions()
    ):
        fix = "a schedule with B, or with I and W, for every F"
        raise ShardingError(message(where, "has no backward pass, the function has.", fix=fix))
    return made


def place_of(axis: str, mesh: Mesh) -> tuple[int, ...]:
    """The device of each stage: as the axis deals its rows, or one stage a device."""
    deals = dict(mesh.deals)
    return deals[axis].place if axis in deals else tuple(range(mesh.shape[axis]))


def trains(instr: PipelineInstr) -> bool:
    """Tell whether a pipeline has a backward pass."""
    return sum(isinstance(i, LoopInstr) and bool(i.axis) for i in instr.body.instrs) == 2


def only_forward(schedule: Schedule) -> Schedule:
    """The same order of forward actions, without the backward pass."""
    rows = (tuple(a for a in row if a.kind == "F") for row in schedule.devices)
    return replace(schedule, devices=tuple(rows))
