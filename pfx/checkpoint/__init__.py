"""Checkpoints: a pytree saved by all ranks, and restored onto any mesh, plan and number of ranks.

A step is a folder with a msgpack manifest and, for each rank that wrote, one file of raw bytes. A
tensor is stored as boxes of its global index space, so nothing depends on the mesh it was saved on:

- `snapshot`: which boxes this rank writes; `image`: how they get to the disk; `commit`: how the ranks
  make one step of them, or none; `saving`: the two functions.
- `matching`: what is asked for against what is saved; `reading`: boxes out of files; `restoring`.
- `manifest`, `boxes`, `values`, `checksum`: the format. `directory`, `retention`: steps and tiers.
"""

from pfx.checkpoint.asking import best as best
from pfx.checkpoint.asking import latest as latest
from pfx.checkpoint.asking import metadata as metadata
from pfx.checkpoint.asking import steps as steps
from pfx.checkpoint.asking import verify as verify
from pfx.checkpoint.restoring import restore as restore
from pfx.checkpoint.saving import Handle as Handle
from pfx.checkpoint.saving import save as save
from pfx.checkpoint.saving import save_async as save_async
from pfx.checkpoint.text import contents as contents
from pfx.checkpoint.text import listing as listing
from pfx.checkpoint.text import verdict as verdict
