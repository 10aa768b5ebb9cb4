"""pfx: training at any scale as pure functions on PyTorch."""

# Transforms that are torch's own; the others are at the end.
from torch.func import hessian as hessian
from torch.func import jacfwd as jacfwd
from torch.func import jacrev as jacrev

# Saving and restoring.
from pfx import checkpoint as checkpoint

# Collectives, inside `shard_map`.
from pfx import lax as lax

# Pure libraries.
from pfx import optim as optim
from pfx import precision as precision
from pfx import random as random
from pfx import schedules as schedules
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

# Existing torch modules as pure functions.
from pfx.interop import from_module as from_module

# Inside a function: placement, loops, rematerialization, batches, rules of one's own.
from pfx.lax import constrain as constrain
from pfx.lax import custom_vjp as custom_vjp
from pfx.lax import remat as remat
from pfx.lax import scan as scan
from pfx.lax import vmap as vmap

# Devices.
from pfx.mesh import Deal as Deal
from pfx.mesh import Mesh as Mesh
from pfx.mesh import make_mesh as make_mesh

# Training by a plan.
from pfx.plan import Plan as Plan

# Write the function of one device by hand.
from pfx.shard_map import shard_map as shard_map

# Where the parts of a tensor live.
from pfx.spec import P as P

# Training.
from pfx.train import TrainState as TrainState
from pfx.train import TrainStep as TrainStep
from pfx.train import make_train_step as make_train_step

# Transforms, on any tree.
from pfx.transforms import grad as grad
from pfx.transforms import jvp as jvp
from pfx.transforms import value_and_grad as value_and_grad
from pfx.transforms import vjp as vjp
