"""Pipeline schedules as data: build, read, check and time them.

A ``Schedule`` lists, for every device, which stage works on which microbatch and in which order.

>>> from pfx import schedules
>>> schedule = schedules.build("1f1b", stages=2, microbatches=2)
>>> print(schedule)
device 0: 0F0 0F1 0B0 0B1
device 1: 1F0 1B0 1F1 1B1
>>> schedules.validate(schedule)  # the peak of live activations of each device
(2, 1)
>>> print(schedules.simulate(schedule, t_f=1, t_b=1, t_w=1))
device 0: 0F0 0F1 ........0B0---- ....0B1----
device 1: ....1F0 1B0---- 1F1 1B1---- ........
makespan 9, bubble 33.3%
"""

from pfx.schedules.action import KINDS, Action, Kind, Schedule, ScheduleError
from pfx.schedules.build import build
from pfx.schedules.simulate import Row, Timeline, simulate
from pfx.schedules.text import parse
from pfx.schedules.validate import peak_activations, validate

__all__ = [
    "KINDS",
    "Action",
    "Kind",
    "Row",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "build",
    "parse",
    "peak_activations",
    "simulate",
    "validate",
]
