"""pfx: training at any scale as pure functions on PyTorch."""

from pfx.lax import constrain, remat, scan
from pfx.mesh import make_mesh
from pfx.spec import P

__all__ = ["P", "constrain", "make_mesh", "remat", "scan"]
