"""Optimizers as stateless transforms of gradient pytrees; schedules are in `pfx.optim.schedules`.

>>> import torch
>>> from pfx import optim
>>> params = {"w": torch.tensor([1.0, 2.0])}
>>> optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.5))
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update({"w": torch.tensor([3.0, 4.0])}, state, params)
>>> optim.apply_updates(params, updates)
{'w': tensor([0.7000, 1.6000])}
"""

from pfx.optim import schedules as schedules
from pfx.optim.alias import adam as adam
from pfx.optim.alias import adamw as adamw
from pfx.optim.alias import sgd as sgd
from pfx.optim.base import EmptyState as EmptyState
from pfx.optim.base import GradientTransformation as GradientTransformation
from pfx.optim.base import apply_updates as apply_updates
from pfx.optim.base import chain as chain
from pfx.optim.base import global_norm as global_norm
from pfx.optim.base import identity as identity
from pfx.optim.base import stateless as stateless
from pfx.optim.decay import decay_mask as decay_mask
from pfx.optim.decay import role_mask as role_mask
from pfx.optim.masking import MaskedState as MaskedState
from pfx.optim.masking import masked as masked
from pfx.optim.schedules import Schedule as Schedule
from pfx.optim.transforms import ClipByGlobalNormState as ClipByGlobalNormState
from pfx.optim.transforms import ScaleByAdamState as ScaleByAdamState
from pfx.optim.transforms import ScaleByLearningRateState as ScaleByLearningRateState
from pfx.optim.transforms import TraceState as TraceState
from pfx.optim.transforms import add_decayed_weights as add_decayed_weights
from pfx.optim.transforms import clip_by_global_norm as clip_by_global_norm
from pfx.optim.transforms import clip_by_value as clip_by_value
from pfx.optim.transforms import learning_rate as learning_rate
from pfx.optim.transforms import pre_clip_norm as pre_clip_norm
from pfx.optim.transforms import scale as scale
from pfx.optim.transforms import scale_by_adam as scale_by_adam
from pfx.optim.transforms import scale_by_learning_rate as scale_by_learning_rate
from pfx.optim.transforms import trace as trace
