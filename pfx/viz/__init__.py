"""Pictures and tables: who holds what, memory, communication, and who works when in a pipeline.

Functions whose name ends in ``_text`` return a string for the terminal. The others return a
matplotlib `Figure`, which a notebook shows as the last value of a cell and
``figure.savefig("who.png")`` writes to a file. They draw from layouts alone, so they work on any
mesh, and the same input always gives the same picture. Colours are Paul Tol's light scheme, which
the colour-blind can tell apart.
"""

from pfx.viz.chrome_trace import chrome_trace as chrome_trace
from pfx.viz.collectives import collectives as collectives
from pfx.viz.collectives import collectives_text as collectives_text
from pfx.viz.devices import devices as devices
from pfx.viz.memory import memory as memory
from pfx.viz.memory import memory_text as memory_text
from pfx.viz.placement import placement as placement
from pfx.viz.placement import placement_text as placement_text
from pfx.viz.timeline import timeline as timeline
from pfx.viz.timeline import timeline_text as timeline_text
