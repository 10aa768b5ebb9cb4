"""Models that were written without pfx."""

from pfx.interop.module import from_module as from_module
