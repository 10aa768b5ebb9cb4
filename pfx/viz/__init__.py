"""Pictures and tables: who holds what, how much memory, how much communication.

Functions whose name ends in ``_text`` return a string for the terminal. The others return a
matplotlib `Figure`, which a notebook shows as the last value of a cell and
``figure.savefig("who.png")`` writes to a file. They draw from layouts alone, so they work on any
mesh, and the same input always gives the same picture. Colours are Paul Tol's light scheme, which
the colour-blind can tell apart.
"""

from pfx.viz.collectives import collectives as collectives
from pfx.viz.collectives import collectives_text as collectives_text
from pfx.viz.devices import devices as devices
from pfx.viz.memory import memory as memory
from pfx.viz.memory import memory_text as memory_text
from pfx.viz.placement import placement as placement
from pfx.viz.placement import placement_text as placement_text
