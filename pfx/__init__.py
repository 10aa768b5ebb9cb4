"""pfx: training at any scale as pure functions on PyTorch."""

from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from pfx import lax, optim, random, tree
from pfx.api import ShapeDtype, device_get, device_put, jit
from pfx.array import Array
from pfx.lax import constrain, remat, scan
from pfx.mesh import Mesh, make_mesh
from pfx.spec import P
