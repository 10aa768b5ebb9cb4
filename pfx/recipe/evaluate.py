"""The loss on held-out data: the mean over all of its tokens, each counted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pfx.api import Jitted, jit
from pfx.spec import P
from pfx.train import TrainState, TrainStep


def evaluator(
    train: TrainStep, batches: Callable[[int], Any], count: int
) -> Callable[[TrainState], dict[str, float]]:
    """Return a function from a state to loss, perplexity and weight on `count` batches.

    Sums are added in Python's float64 and divided once: the mean does not depend on how rows fall into
    batches. No key is passed to the loss: nothing is dropped.

    Args:
        train: the step whose loss and mesh to use.
        batches: a number to a batch.
        count: how many.
    """
    forward = _forward(train)

    def evaluate(state: TrainState) -> dict[str, float]:
        sums = [
            tuple(float(x) for x in forward(batch)(state.params, batch))
            for batch in map(batches, range(count))
        ]
        weight = math.fsum(weight for _, weight in sums)
        loss = math.fsum(loss for loss, _ in sums) / weight if weight else math.nan
        return {"loss": loss, "perplexity": _exp(loss), "weight": weight, "batches": count}

    return evaluate


def _forward(train: TrainStep) -> Callable[[Any], Jitted]:
    """The compiled sums of a batch, by the batch's keys."""
    made: dict[Any, Jitted] = {}

    def loss(params: Any, batch: Any) -> tuple[Any, Any]:
        computed = train.plan.policy.computed(params)
        loss_sum, weight, _ = train.loss_fn(computed, batch, None)
        return loss_sum.double(), weight

    def of(batch: Any) -> Jitted:
        form = tuple(sorted(batch))
        if form not in made:
            made[form] = jit(
                loss, mesh=train.mesh, out_specs=P(), names=train.plan.logical_names,
                in_specs=(train.state_specs.params, train.batch_specs(batch)),
            )  # fmt: skip
        return made[form]

    return of


def _exp(x: float) -> float:
    return math.inf if x >= 700 else math.exp(x)
