"""In which dtypes a step keeps, computes and adds: policies, masters and loss scales.

>>> from pfx import precision
>>> str(precision.as_policy("bf16"))
'params=f32,compute=bf16,reduce=f32'
"""

from pfx.precision import loss_scale as loss_scale
from pfx.precision.masters import MasterWeightsState as MasterWeightsState
from pfx.precision.masters import master_weights as master_weights
from pfx.precision.masters import refresh_masters as refresh_masters
from pfx.precision.policy import Policy as Policy
from pfx.precision.policy import as_policy as as_policy
