"""Primitives: operations with a transpose and a batching rule that the compiler knows."""

from pfx.lax.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
)
from pfx.lax.constrain import Constraint, constrain
from pfx.lax.custom_vjp import custom_vjp
from pfx.lax.label import label
from pfx.lax.pcast import pcast
from pfx.lax.remat import remat
from pfx.lax.scan import Loop, scan
from pfx.lax.stop_gradient import stop_gradient
from pfx.lax.vmap import vmap

__all__ = [
    "psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute",
    "pshuffle", "axis_index", "axis_size", "pcast",
    "Constraint", "Loop", "constrain", "custom_vjp", "label", "remat", "scan", "stop_gradient",
    "vmap",
]  # fmt: skip
