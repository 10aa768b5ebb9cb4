"""The table of built-in schedules, and :func:`build`, which makes one for a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pfx.errors import message
from pfx.schedules.action import Schedule, ScheduleError
from pfx.schedules.flush import gpipe, one_f_one_b
from pfx.schedules.interleaved import forward_only, interleaved
from pfx.schedules.slots import Size, Slots, number
from pfx.schedules.v_shaped import dualpipe_v, zb_v
from pfx.schedules.zero_bubble import zb_h1, zb_h2


def _loop(size: Size) -> tuple[int, ...]:
    return tuple(range(size.devices)) * size.virtual


def _v(size: Size) -> tuple[int, ...]:
    return (*range(size.devices), *reversed(range(size.devices)))


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of schedule: a device's slots, each stage's device, the stages per device it has."""

    slots: Callable[[int, Size], Slots]
    place: Callable[[Size], tuple[int, ...]] = _loop
    virtual: int | None = 1  # None: any


FAMILIES = {
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b),
    "interleaved": Family(interleaved, virtual=None),
    "zb-h1": Family(zb_h1),
    "zb-h2": Family(zb_h2),
    "zb-v": Family(zb_v, _v, virtual=2),
    "dualpipe-v": Family(dualpipe_v, _v, virtual=2),
    "forward": Family(forward_only, virtual=None),
}


def build(name: str, *, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Make a schedule: what each device computes, in order, for any size of pipeline.

    Every stage takes the microbatches in order, forward and backward, so all schedules add up
    gradients in one order. Fewer microbatches than stages are a shorter schedule, never a hang.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"zb-v"``,
            ``"dualpipe-v"`` or, for evaluation, ``"forward"``.
        stages: the devices of the pipeline (the size of its mesh axis), at least 1.
        microbatches: how many a step has, at least 1.
        virtual: the stages on each device. Any for ``"interleaved"`` (1 is ``"1f1b"``) and
            ``"forward"``, 2 for ``"zb-v"`` and ``"dualpipe-v"``, else 1.

    Raises:
        ScheduleError: an unknown name, a size below 1, or a ``virtual`` that the schedule has not.

    >>> print(*build("1f1b", stages=3, microbatches=4).devices[0])
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3

    Papers and sections are in the docstrings of the families: Narayanan et al. 2021
    (arXiv:2104.04473) is the place to begin.
    """
    where = f"schedules.build({name!r})"
    size = Size(devices=stages, microbatches=microbatches, virtual=virtual)
    family = _family(where, name)
    _check(where, size, family)
    place = family.place(size)
    return Schedule(
        name=name,
        stages=len(place),
        microbatches=microbatches,
        devices=tuple(
            number(
                family.slots(device, size),
                stages=[stage for stage, holder in enumerate(place) if holder == device],
                microbatches=microbatches,
            )
            for device in range(stages)
        ),
        place=place,
    )


def virtual_stages(name: str) -> int:
    """Return the stages per device that a schedule usually has: 2 of those that need several.

    >>> virtual_stages("zb-v"), virtual_stages("interleaved"), virtual_stages("1f1b")
    (2, 2, 1)
    """
    family = _family(f"schedules.build({name!r})", name)
    return family.virtual or (2 if name == "interleaved" else 1)


def _family(where: str, name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    fix = f"name one of {', '.join(FAMILIES)}."
    raise ScheduleError(message(where, "is no schedule.", fix=fix))


def _check(where: str, size: Size, family: Family) -> None:
    given = f"stages={size.devices} microbatches={size.microbatches} virtual={size.virtual}"
    if min(size.devices, size.microbatches, size.virtual) < 1:
        raise ScheduleError(
            message(where, "needs at least one of each.", given, fix="pass numbers of at least 1.")
        )
    if family.virtual not in (None, size.virtual):
        raise ScheduleError(
            message(
                where,
                f"has virtual={family.virtual} (stages per device), not virtual={size.virtual}.",
                given,
                fix=f"pass virtual={family.virtual}, or a schedule that has "
                f"virtual={size.virtual}: {_with(size.virtual)}.",
            )
        )


def _with(virtual: int) -> str:
    return ", ".join(name for name, kind in FAMILIES.items() if kind.virtual in (None, virtual))
