"""Why did it jump? The usual causes, each with what speaks for it; the first that holds is named.

A table of (cause, test): a test reads the evidence and returns what speaks for its cause. The order is
that of certainty: a copy that differs is a fact, a learning rate that is too high a conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of an incident.

    Attributes:
        step: the alarming step.
        data_step: the number of its batch.
        alarms: what was alarming.
        batch_ids: which samples were in the batch.
        oddities: what is odd in the batch.
        lr: the learning rate of the step; None where there is none.
        history: the numbers of the steps before, oldest first; the last are those of the step.
        precision: what the policy computes in, "float16".
        loss_scale: of the step; None without one.
        ranges: of the gradients in the computing dtype, the shares that are zero, subnormal, overflow
            or not finite; each the highest of any leaf.
        grad_norm: of this batch at the state before the step, or at the last checkpoint.
        usual_norm: of a usual batch at the same state.
        layers: gradient norms by leaf and layer, of this batch and of a usual one.
        nonfinite: leaves of the state that are not finite, after the step.
        nonfinite_before: the same at the state before it.
        broken_moments: second moments below zero.
        disagreeing: copies that should be the same on all ranks.
        same_bits: whether repeating gave the same bits, on all ranks; None: not tried.
        deterministic: whether the kernels promise that it does.
        replayed: how many steps were repeated, and from which.
        factor: of the monitor.
    """

    step: int
    data_step: int
    alarms: Sequence[str]
    batch_ids: Any = None
    oddities: Sequence[str] = ()
    lr: float | None = None
    history: Sequence[Mapping[str, float]] = ()
    precision: str = ""
    loss_scale: float | None = None
    ranges: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    usual_norm: float | None = None
    layers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    nonfinite: Sequence[str] = ()
    nonfinite_before: Sequence[str] = ()
    broken_moments: Sequence[str] = ()
    disagreeing: Sequence[str] = ()
    same_bits: bool | None = None
    deterministic: bool = True
    replayed: str = ""
    factor: float = 10.0


@dataclass(frozen=True)
class Verdict:
    """The most probable cause, and what speaks for it."""

    cause: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.cause}: {'; '.join(self.reasons)}" if self.reasons else self.cause


def judge(evidence: Evidence) -> Verdict:
    """Name the first cause that something speaks for.

    >>> print(judge(Evidence(step=3, data_step=3, alarms=[], oddities=["rows 0 and 1 are the same"])))
    bad batch: rows 0 and 1 are the same
    """
    for cause, test in CAUSES:
        reasons = tuple(test(evidence))
        if reasons:
            return Verdict(cause, reasons)
    return Verdict("unknown", ("nothing of the usual speaks for itself",))


def _disagreeing(e: Evidence) -> list[str]:
    return [f"{len(e.disagreeing)} copies differ, {e.disagreeing[0]}"] if e.disagreeing else []


def _machine(e: Evidence) -> list[str]:
    other = e.same_bits is False and e.deterministic
    return ["repeating the step gave other bits"] if other else []


def _corrupted(e: Evidence) -> list[str]:
    before = [f"not finite before the step: {text}" for text in e.nonfinite_before[:1]]
    return before + [f"a second moment below zero: {text}" for text in e.broken_moments[:1]]


def _bad_batch(e: Evidence) -> list[str]:
    found = list(e.oddities)
    if e.grad_norm is None or e.usual_norm is None:
        return found
    if not math.isfinite(e.grad_norm) and math.isfinite(e.usual_norm):
        return [*found, "its gradient is not finite where that of a usual batch is"]
    if 0 < e.factor * e.usual_norm < e.grad_norm:
        times = e.grad_norm / e.usual_norm
        return [*found, f"its gradient is {times:.0f} times that of a usual batch, same parameters"]
    return found


def _fp16(e: Evidence) -> list[str]:
    if e.precision != "float16":
        return []
    overflow = e.ranges.get("overflow", 0.0)
    if overflow > 0:
        return [f"{overflow:.1%} of a gradient's elements are beyond float16"]
    if e.loss_scale is not None and e.loss_scale <= 1:
        return [f"the loss scale has fallen to {e.loss_scale:g}"]
    return []


def _learning_rate(e: Evidence) -> list[str]:
    """Gradients that grew for some steps before the alarm, rather than in one."""
    norms = [x["grad_norm"] for x in e.history[:-1] if math.isfinite(x.get("grad_norm", math.nan))]
    if e.lr is None or len(norms) < 12:
        return []
    late, early = fmean(norms[-4:]), fmean(norms[-12:-4])
    if late > 2 * early > 0:
        grown = f"the gradient norm grew from {early:.3g} to {late:.3g} in the steps before"
        return [f"{grown}, at a learning rate of {e.lr:.3g}"]
    return []


def _exploding(e: Evidence) -> list[str]:
    found = [text for text in e.alarms if text.startswith("grad_norm")]
    return found or [f"not finite after the step: {text}" for text in e.nonfinite[:1]]


CAUSES: Sequence[tuple[str, Callable[[Evidence], list[str]]]] = (
    ("ranks disagree", _disagreeing),
    ("faulty machine", _machine),
    ("corrupted optimizer state", _corrupted),
    ("float16 range", _fp16),
    ("bad batch", _bad_batch),
    ("learning rate too high", _learning_rate),
    ("exploding gradient", _exploding),
)
