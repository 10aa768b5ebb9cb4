"""The error that bad data raise."""

from __future__ import annotations

from pfx.errors import PfxError


class DataError(PfxError, ValueError):
    """A file that is damaged or does not fit, or data that cannot give what is asked of them."""
