"""The schedule of a pipeline: built by name, or a user's own, and checked against what it is to run."""

from __future__ import annotations

from collections.abc import Sequence
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
    devices, microbatches = mesh.shape[axis], instr.made.length
    made = wanted
    if not isinstance(made, Schedule):
        place = mesh.deal(axis).place
        name = made or _usual(place, devices)
        held = len(place) // devices
        virtual = held if held > 1 else virtual_stages(name)
        made = build(name, stages=devices, microbatches=microbatches, virtual=virtual)
    made = made.computations()
    if not trains(instr):
        made = only_forward(made)
    _check_sizes(made, instr, f"{where}: schedule {made.name!r}")
    _check_place(made, axis, mesh, f"{where}: schedule {made.name!r}")
    _check_layers(instr, where)
    validate(made)
    if trains(instr) and not any(action.kind in ("B", "I") for _, action in made.actions()):
        fix = "a schedule with B, or with I and W, for every F"
        what = "has no backward pass, the function has."
        raise ShardingError(message(f"{where}: schedule {made.name!r}", what, fix=fix))
    return made


def _usual(place: Sequence[int], devices: int) -> str:
    """The schedule to use where none is named: the stages' places tell."""
    if len(place) == devices:
        return "1f1b"
    there_and_back = (*range(devices), *reversed(range(devices)))
    return "zb-v" if tuple(place) == there_and_back else "interleaved"


def _check_sizes(made: Schedule, instr: PipelineInstr, where: str) -> None:
    axis, microbatches = instr.made.axis, instr.made.length
    devices = instr.body.mesh.shape[axis]
    if made.num_devices != devices or made.microbatches != microbatches:
        raise ShardingError(
            message(
                where,
                "is for another pipeline.",
                f"schedule: {made.num_devices} devices, {made.microbatches} microbatches",
                f"pipeline: {axis}={devices}, {microbatches} microbatches",
                fix=f"schedules.build(..., stages={devices}, microbatches={microbatches})",
            )
        )


def _check_place(made: Schedule, axis: str, mesh: Mesh, where: str) -> None:
    place = mesh.deal(axis).place
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


def _check_layers(instr: PipelineInstr, where: str) -> None:
    layers, sizes = instr.made.layers, instr.body.mesh.deal(instr.made.axis).sizes
    if sizes and sum(sizes) != layers:
        raise ShardingError(
            message(
                f"{where}: stages",
                f"of {sizes} layers do not hold the {layers} layers that are scanned.",
                f"{' + '.join(map(str, sizes))} = {sum(sizes)}; layers: {layers}",
                f"mesh: {instr.body.mesh}",
                fix=f"sizes whose sum is {layers}, or none for equal ones",
            )
        )


def trains(instr: PipelineInstr) -> bool:
    """Tell whether a pipeline has a backward pass."""
    return sum(isinstance(i, LoopInstr) and bool(i.axis) for i in instr.body.instrs) == 2


def only_forward(schedule: Schedule) -> Schedule:
    """The same order of forward actions, without the backward pass."""
    rows = (tuple(a for a in row if a.kind == "F") for row in schedule.devices)
    return replace(schedule, devices=tuple(rows))
