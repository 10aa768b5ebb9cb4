"""Primitives: operations with a transpose and a batching rule that the compiler knows."""

from pfx.lax.constrain import Constraint, constrain
from pfx.lax.label import label
from pfx.lax.remat import remat
from pfx.lax.scan import Loop, scan

__all__ = ["Constraint", "Loop", "constrain", "label", "remat", "scan"]
