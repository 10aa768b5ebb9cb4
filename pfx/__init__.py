"""pfx: training at any scale as pure functions on PyTorch."""

# Where things live.
# Primitives and transforms.
from torch.func import grad as grad
from torch.func import hessian as hessian
from torch.func import jacfwd as jacfwd
from torch.func import jacrev as jacrev
from torch.func import jvp as jvp
from torch.func import vjp as vjp
from torch.func import vmap as vmap

# Pure libraries.
from pfx import optim as optim
from pfx import random as random
from pfx import tree as tree

# Looking.
from pfx import viz as viz

# Compile a function written for one device.
from pfx.api import ShapeDtype as ShapeDtype
from pfx.api import device_get as device_get
from pfx.api import device_put as device_put
from pfx.api import eval_shape as eval_shape
from pfx.api import jit as jit
from pfx.array import Array as Array
from pfx.lax import constrain as constrain
from pfx.lax import remat as remat
from pfx.lax import scan as scan
from pfx.mesh import Mesh as Mesh
from pfx.mesh import make_mesh as make_mesh

# Training.
from pfx.plan import Plan as Plan
from pfx.spec import P as P
from pfx.train import TrainState as TrainState
from pfx.train import TrainStep as TrainStep
from pfx.train import make_train_step as make_train_step
