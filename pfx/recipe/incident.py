"""What happens on an alarm: look, repeat, judge, write it down, and go back to a good state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pfx.array import Array
from pfx.recipe.config import Run
from pfx.recipe.health import broken_moments, disagreeing, fingerprints, leaves_of, nonfinite
from pfx.recipe.log import Sink
from pfx.recipe.loop import History, Seen
from pfx.recipe.monitor import Alarm
from pfx.recipe.oddities import oddities
from pfx.recipe.position import Position
from pfx.recipe.report import write_report
from pfx.recipe.saves import journal
from pfx.recipe.verdict import Evidence, judge
from pfx.train import TrainState, TrainStep

USUAL = 4  # batches before the alarming one that it is compared with
LARGEST = 24  # leaves or layers shown, those with the largest gradients

RANGES = ("zero", "subnormal", "overflow", "nonfinite")

Restored = tuple[TrainState, Position]


@dataclass(frozen=True)
class Surroundings:
    """What an incident may look at and use.

    Attributes:
        good: gives the last good state and its position: the last checkpoint, or the beginning.
        vocab_size: None where the model does not say.
    """

    run: Run
    train: TrainStep
    batches: Callable[[int], Any]
    good: Callable[[], Restored]
    world: Any
    sink: Sink
    vocab_size: int | None

    @property
    def directory(self) -> Path:
        """Of the run."""
        return Path(self.run.directory)


def on_alarm(
    around: Surroundings,
    held: list[TrainState],
    at: Position,
    history: History,
    alarms: Sequence[Alarm],
) -> Restored | None:
    """Write an incident's report; returns what to go on with, None to give up.

    All ranks call it alike. The state after the step, alone in `held`, is looked at first, then given
    up for the last good one, which is brought up to the step again.
    """
    settings, culprit = around.run.monitor, history.seen[-1]
    evidence = replace(_of_numbers(around, culprit, history, alarms), **_of_state(around, held[0]))
    if settings.action == "report":
        action, found = "none, training goes on", (held[0], at)
    else:
        held.clear()
        evidence = replace(evidence, **_of_repeating(around, culprit, history))
        action, found = _decide(around, at, culprit)
    verdict = judge(evidence)
    if around.world.rank == 0:
        path = write_report(around.directory / "incidents", evidence, verdict, action)
        what = {"alarm": str(alarms[0]), "verdict": str(verdict), "action": action}
        around.sink.event("incident", culprit.step, {**what, "report": str(path)})
    return found


def _of_numbers(
    around: Surroundings, culprit: Seen, history: History, alarms: Sequence[Alarm]
) -> Evidence:
    """What the numbers and the batch say, without the device."""
    usual = [around.batches(i) for i in _usual(culprit.data_step)]
    batch, ids = around.batches(culprit.data_step), getattr(around.batches, "ids", None)
    return Evidence(
        step=culprit.step,
        data_step=culprit.data_step,
        alarms=[str(alarm) for alarm in alarms],
        batch_ids=None if ids is None else _listed(ids(culprit.data_step)),
        oddities=oddities(batch, usual, around.vocab_size),
        lr=culprit.numbers.get("lr"),
        loss_scale=culprit.numbers.get("loss_scale"),
        history=[seen.numbers for seen in history.seen],
        precision=_computed_in(around.train),
        deterministic=_deterministic(around.train),
        factor=around.run.monitor.factor,
    )


def _of_state(around: Surroundings, state: TrainState) -> dict[str, Any]:
    """What the state after the step says: what is not finite, and whether copies still agree."""
    prints = around.world.exchange(fingerprints(state), "an incident")
    leaves = leaves_of(state, around.train.mesh)
    return {"nonfinite": nonfinite(leaves), "disagreeing": disagreeing(prints)}


def _of_repeating(around: Surroundings, culprit: Seen, history: History) -> dict[str, Any]:
    """Go from the last good state to the step again, and look at the step from there."""
    state, at = around.good()
    leaves = leaves_of(state, around.train.mesh)
    before = {"nonfinite_before": nonfinite(leaves), "broken_moments": broken_moments(leaves)}
    state, same, replayed = _replay(around, state, at, culprit, history)
    batch = around.batches(culprit.data_step)
    usual = _numbers(
        around.train.diagnose(state, around.batches(next(iter(_usual(culprit.data_step)))))
    )
    here = _numbers(around.train.diagnose(state, batch))
    mine = same_bits(around.train, state, batch) and same is not False
    everyone = around.world.exchange(mine, "the bits of a step")
    return {
        **before,
        "same_bits": all(everyone),
        "replayed": replayed,
        "grad_norm": here["grad_norm"],
        "usual_norm": usual["grad_norm"],
        "ranges": {kind: _highest(here["gradients"], kind) for kind in RANGES},
        "layers": _largest(here["gradients"], usual["gradients"]),
    }


def _replay(
    around: Surroundings, state: TrainState, at: Position, culprit: Seen, history: History
) -> tuple[TrainState, bool | None, str]:
    """Repeat the steps before the culprit, if they are few enough, and compare their losses."""
    known = {seen.step: seen for seen in history.seen}
    steps = range(at.step + 1, culprit.step)
    if len(steps) > around.run.monitor.replay or any(step not in known for step in steps):
        return state, None, ""
    same = True
    for step in steps:
        state, metrics = around.train.step(state, around.batches(known[step].data_step))
        same &= same_number(float(metrics["loss"]), known[step].numbers["loss"])
    return state, same, f"from step {at.step} on"


def same_number(one: float, other: float) -> bool:
    """Whether two losses are the same; that of a skipped step may be NaN both times.

    >>> same_number(math.nan, math.nan), same_number(1.0, math.nan)
    (True, False)
    """
    return one == other or (math.isnan(one) and math.isnan(other))


def same_bits(train: TrainStep, state: TrainState, batch: Any) -> bool:
    """Whether running a step twice gives the same bits, on this process; the state is kept."""
    first, second = (fingerprints(train.rerun(state, batch)) for _ in range(2))
    return first == second


def _decide(around: Surroundings, at: Position, culprit: Seen) -> tuple[str, Restored | None]:
    """Go back, with the data after those of the step; or stop."""
    settings = around.run.monitor
    if settings.action == "stop":
        return "stopped", None
    if at.rewinds >= settings.max_rewinds:
        return f"stopped after {at.rewinds} rewinds", None
    state, good = around.good()
    data_step = culprit.data_step + 1
    if around.world.rank == 0:
        journal(around.directory, good, data_step, at.rewinds + 1)
    left_out = f"batches {good.data_step} to {data_step - 1} are left out"
    found = replace(good, data_step=data_step, rewinds=at.rewinds + 1, best=at.best)
    return f"went back to step {good.step}; {left_out}", (state, found)


def _usual(data_step: int) -> list[int]:
    """The batches before, or behind where there are none before."""
    before = list(range(max(data_step - USUAL, 0), data_step))
    return before + list(range(data_step + 1, data_step + 1 + USUAL - len(before)))


def _computed_in(train: TrainStep) -> str:
    dtype = train.plan.policy.compute
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _deterministic(train: TrainStep) -> bool:
    """Whether the kernels promise the same bits: on GPUs some, as attention's, add in any order."""
    return train.mesh.device == "cpu" or torch.are_deterministic_algorithms_enabled()


def _numbers(found: Any) -> Any:
    """A tree of Arrays as numbers and lists."""
    if isinstance(found, Mapping):
        return {name: _numbers(value) for name, value in found.items()}
    return found.full_tensor().tolist() if isinstance(found, Array) else found


def _largest(here: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, list[float]]:
    """The largest gradient norms of leaves, and of layers where there are some, beside usual ones."""
    rows: dict[str, list[float]] = {}
    for path, leaf in here.items():
        layers = leaf.get("layers")
        if layers is None:
            rows[path] = [leaf["norm"], usual[path]["norm"]]
            continue
        for i, pair in enumerate(zip(layers, usual[path]["layers"], strict=True)):
            rows[f"{path} layer {i}"] = list(pair)
    # NaN first, whatever it is compared with.
    order = sorted(rows, key=lambda name: (rows[name][0] == rows[name][0], -rows[name][0]))
    return {name: rows[name] for name in order[:LARGEST]}


def _highest(leaves: Mapping[str, Any], kind: str) -> float:
    """The highest share of a leaf's elements that are of a kind."""
    return max((leaf[kind] for leaf in leaves.values()), default=0.0)


def _listed(ids: Any) -> Any:
    """Ids as msgpack and JSON have them."""
    return ids.tolist() if hasattr(ids, "tolist") else ids
