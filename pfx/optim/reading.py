"""What can be read off an optimizer state, whatever it was chained and wrapped from."""

from __future__ import annotations

from typing import Any

from pfx.optim.base import find_state
from pfx.optim.guards import SkipCounts
from pfx.optim.transforms import ClipByGlobalNormState, ScaleByLearningRateState


def learning_rate(opt_state: Any) -> Any:
    """Return the learning rate of the last update, a 0-d tensor; ``None`` where the state has none.

    Zero before the first update. With several learning rates, the first in the order of the chain.
    A skipped step makes no update.

    >>> import torch
    >>> from pfx import optim
    >>> descent = optim.scale_by_learning_rate(0.1)
    >>> grads = {"w": torch.ones(1)}
    >>> learning_rate(descent.update(grads, descent.init(grads))[1])
    tensor(0.1000, dtype=torch.float64)
    """
    found = find_state(opt_state, ScaleByLearningRateState)
    return None if found is None else found.learning_rate


def pre_clip_norm(opt_state: Any) -> Any:
    """Return the global norm before clipping of the last gradients; ``None`` where nothing keeps it.

    Of what clips or may skip a step, the outermost is asked: a skipped step does not reach the rest.

    >>> import torch
    >>> from pfx import optim
    >>> clip = optim.clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> pre_clip_norm(clip.update(grads, clip.init(grads))[1])
    tensor(5.)
    """
    found = find_state(opt_state, SkipCounts, ClipByGlobalNormState)
    return None if found is None else found.norm


def skipped(opt_state: Any) -> Any:
    """Return how many steps were skipped so far, 0-d int64; ``None`` where nothing may skip one.

    >>> import torch
    >>> from pfx import optim
    >>> guard = optim.skip_nonfinite(optim.sgd(0.1))
    >>> grads = {"w": torch.tensor([float("nan")])}
    >>> skipped(guard.update(grads, guard.init(grads))[1])
    tensor(1)
    """
    # Guards inside each other skip different steps: what the outer one skips, the inner never sees.
    counts = _all_counts(opt_state)
    return sum((c.skipped for c in counts[1:]), counts[0].skipped) if counts else None


def _all_counts(state: Any) -> list[SkipCounts]:
    if isinstance(state, SkipCounts):
        return [state]
    if isinstance(state, dict):
        state = tuple(state.values())
    if not isinstance(state, (tuple, list)):
        return []
    return [counts for child in state for counts in _all_counts(child)]
