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
from pfx.optim.accumulation import AccumulateState as AccumulateState
from pfx.optim.accumulation import accumulate as accumulate
from pfx.optim.adafactor import ScaleByFactoredRmsState as ScaleByFactoredRmsState
from pfx.optim.adafactor import adafactor as adafactor
from pfx.optim.adafactor import clip_by_layer_rms as clip_by_layer_rms
from pfx.optim.adafactor import scale_by_factored_rms as scale_by_factored_rms
from pfx.optim.adafactor import scale_by_parameter_rms as scale_by_parameter_rms
from pfx.optim.alias import adam as adam
from pfx.optim.alias import adamw as adamw
from pfx.optim.alias import sgd as sgd
from pfx.optim.averaging import EmaState as EmaState
from pfx.optim.averaging import ema as ema
from pfx.optim.averaging import ema_params as ema_params
from pfx.optim.base import EmptyState as EmptyState
from pfx.optim.base import GradientTransformation as GradientTransformation
from pfx.optim.base import NewValue as NewValue
from pfx.optim.base import apply_updates as apply_updates
from pfx.optim.base import chain as chain
from pfx.optim.base import find_state as find_state
from pfx.optim.base import global_norm as global_norm
from pfx.optim.base import identity as identity
from pfx.optim.base import stateless as stateless
from pfx.optim.base import update_with as update_with
from pfx.optim.base import updates_if as updates_if
from pfx.optim.decay import decay_mask as decay_mask
from pfx.optim.decay import role_mask as role_mask
from pfx.optim.groups import PartitionState as PartitionState
from pfx.optim.groups import partition as partition
from pfx.optim.groups import role_labels as role_labels
from pfx.optim.guards import SkipCounts as SkipCounts
from pfx.optim.guards import SkipNonfiniteState as SkipNonfiniteState
from pfx.optim.guards import SkipSpikesState as SkipSpikesState
from pfx.optim.guards import skip_nonfinite as skip_nonfinite
from pfx.optim.guards import skip_spikes as skip_spikes
from pfx.optim.lamb import lamb as lamb
from pfx.optim.lamb import scale_by_trust_ratio as scale_by_trust_ratio
from pfx.optim.lion import ScaleByLionState as ScaleByLionState
from pfx.optim.lion import lion as lion
from pfx.optim.lion import scale_by_lion as scale_by_lion
from pfx.optim.masking import MaskedState as MaskedState
from pfx.optim.masking import masked as masked
from pfx.optim.muon import ScaleByMuonState as ScaleByMuonState
from pfx.optim.muon import matrix_mask as matrix_mask
from pfx.optim.muon import muon as muon
from pfx.optim.muon import orthogonalize as orthogonalize
from pfx.optim.muon import scale_by_muon as scale_by_muon
from pfx.optim.reading import learning_rate as learning_rate
from pfx.optim.reading import pre_clip_norm as pre_clip_norm
from pfx.optim.reading import skipped as skipped
from pfx.optim.schedules import Schedule as Schedule
from pfx.optim.transforms import ClipByGlobalNormState as ClipByGlobalNormState
from pfx.optim.transforms import ScaleByAdamState as ScaleByAdamState
from pfx.optim.transforms import ScaleByLearningRateState as ScaleByLearningRateState
from pfx.optim.transforms import TraceState as TraceState
from pfx.optim.transforms import add_decayed_weights as add_decayed_weights
from pfx.optim.transforms import clip_by_global_norm as clip_by_global_norm
from pfx.optim.transforms import clip_by_value as clip_by_value
from pfx.optim.transforms import scale as scale
from pfx.optim.transforms import scale_by_adam as scale_by_adam
from pfx.optim.transforms import scale_by_learning_rate as scale_by_learning_rate
from pfx.optim.transforms import trace as trace
