"""Models that were written without pfx: modules of torch, and in `pfx.interop.hf` files of weights."""

from pfx.interop.module import from_module as from_module
