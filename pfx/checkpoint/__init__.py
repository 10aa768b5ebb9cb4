"""Checkpoints: a pytree saved by all ranks, and restored onto any mesh, plan and number of ranks."""

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
