"""A run from its config to its end: build, go on from the last checkpoint, loop, close."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfx import random, tree
from pfx.recipe import resolved, saves
from pfx.recipe.build import Functions, make_step, model_functions
from pfx.recipe.config import Run
from pfx.recipe.evaluate import evaluator
from pfx.recipe.incident import Surroundings, on_alarm
from pfx.recipe.log import JsonLines, Several, Sink, TensorBoard
from pfx.recipe.loop import History, Job, Outcome, loop
from pfx.recipe.lost import hosts_of, is_of_others, lost
from pfx.recipe.monitor import Alarm
from pfx.recipe.position import Position
from pfx.recipe.screen import screen
from pfx.recipe.signals import watching
from pfx.recipe.sources import Checked, Source, contents, sources
from pfx.recipe.speed import mfu, model_flops, peak_flops, peak_memory
from pfx.recipe.weights import params_for
from pfx.runtime.process_world import world_of
from pfx.train import TrainState, TrainStep

CONFIG = "config.json"
METRICS = "metrics.jsonl"


def train(run: Run, origin: Mapping[str, str] | None = None) -> Outcome:
    """Train as a config says, from the last checkpoint in its directory or from the beginning.

    Under torchrun every rank calls it; without, all devices of the plan are simulated.

    Args:
        run: the config.
        origin: where its settings came from, for the record.

    Raises:
        PfxError: the config, the data or the checkpoints do not fit.
        LostRanksError: other ranks stopped answering.
    """
    functions = model_functions(run.model)
    step = make_step(run, functions)
    world = world_of(step.mesh)
    hosts = hosts_of(world)
    try:
        with sinks(run, world) as sink, watching() as stop:
            job, state, at = _assembled(run, functions, step, world, sink, origin or {})
            outcome = loop(job, state, at, sink, stop)
            job.save.wait()
            reason = outcome.reason
            if at.step >= run.train.steps:
                reason = f"nothing is left of train.steps={run.train.steps}"
            sink.event(outcome.ending, outcome.at.step, {"reason": reason} if reason else {})
            return outcome
    except (RuntimeError, OSError) as error:
        if world.size == 1 or not is_of_others(error):
            raise
        raise lost(world, hosts, error) from error


@contextmanager
def sinks(run: Run, world: Any) -> Iterator[Sink]:
    """Where the numbers go: on rank 0 screen and files, elsewhere nowhere."""
    if world.rank:
        yield Several()
        return
    folder = Path(run.directory)
    folder.mkdir(parents=True, exist_ok=True)
    with screen(run.train.steps, every=run.log.every, progress=run.log.progress) as shown:
        board = [TensorBoard(folder / "tensorboard")] if run.log.tensorboard else []
        every = Several(*shown, JsonLines(folder / METRICS), *board)
        try:
            yield every
        finally:
            every.close()


def _assembled(
    run: Run,
    functions: Functions,
    step: TrainStep,
    world: Any,
    sink: Sink,
    origin: Mapping[str, str],
) -> tuple[Job, TrainState, Position]:
    """Everything that the loop needs, and where it begins."""
    directory, record = Path(run.directory), resolved.resolved(run, origin, contents(run.data))
    training, held_out = sources(run)
    batches = Checked(training, functions.vocab_size)
    state, at = begin(run, functions, step, world, sink)
    if world.rank == 0:
        resolved.write(directory / CONFIG, record)
    sink.event("start", at.step, _described(run, step))
    for note in step.report:
        sink.event("note", at.step, {"plan": note})
    saver = saves.Saver(directory, run.checkpoint, record, sink)

    def good() -> tuple[TrainState, Position]:
        saver.wait()
        return start(run, functions, step, world)

    vocab = functions.vocab_size
    around = Surroundings(run, step, batches, good, world, sink, vocab)

    def rewind(
        held: list[TrainState], at: Position, history: History, alarms: tuple[Alarm, ...]
    ) -> tuple[TrainState, Position] | None:
        return on_alarm(around, held, at, history, alarms)

    evaluate = None
    if held_out is not None and run.evaluate.every is not None:
        count = held_out.num_batches
        wanted = run.evaluate.batches
        evaluate = evaluator(step, held_out, count if wanted is None else min(count, wanted))
    gauge = gauge_of(run, step, batches)
    return Job(run, step, batches, world, saver, rewind, evaluate, gauge), state, at


def _described(run: Run, step: TrainStep) -> dict[str, Any]:
    """What is about to be trained, in a line."""
    size = sum(math.prod(leaf.shape) for leaf in tree.leaves(step.shapes.params))
    mesh = f"{step.mesh} ({step.mesh.kind})"
    return {"parameters": size, "mesh": mesh, "precision": str(run.plan.precision)}


def begin(
    run: Run, functions: Functions, step: TrainStep, world: Any, sink: Sink
) -> tuple[TrainState, Position]:
    """The state to begin with, and a note of what has changed since it was saved.

    Raises:
        ConfigError: what has changed makes it another run.
    """
    found = saves.last_position(Path(run.directory), step.mesh)
    if found is not None:
        before = resolved.checked(found[1], run.directory)
        changed = resolved.changes(before, run)
        resolved.check_changes(changed, run.directory)
        resolved.check_contents(before.get("contents", {}), contents(run.data), run.directory)
        state, at = start(run, functions, step, world)
        sink.event("resume", at.step, {"data_step": at.data_step})
        for change in changed:
            sink.event("changed", at.step, {"setting": str(change)})
        return state, at
    return start(run, functions, step, world)


def start(
    run: Run, functions: Functions, step: TrainStep, world: Any
) -> tuple[TrainState, Position]:
    """The state of the last checkpoint with its position; without one, a fresh state."""
    directory = Path(run.directory)
    found = saves.last_position(directory, step.mesh)
    if found is not None:
        at = saves.after_rewinds(directory, found[0], world)
        return start_at(run, functions, step, at.step), at
    fresh = saves.after_rewinds(directory, Position(), world)
    return fresh_state(run, functions, step), fresh


def start_at(run: Run, functions: Functions, step: TrainStep, number: int) -> TrainState:
    """The state after so many steps: a checkpoint, or for none a fresh one."""
    if not number:
        return fresh_state(run, functions, step)
    return saves.restore(Path(run.directory), step, number)


def fresh_state(run: Run, functions: Functions, step: TrainStep) -> TrainState:
    """Parameters drawn from the seed, or those of Hugging Face weights."""
    key = random.key(run.train.seed)
    if run.model.weights is None:
        return step.init(key)
    params = params_for(run.model, step.mesh, step.state_specs.params, step.shapes.params)
    return step.with_params(step.init(key), params)


def gauge_of(
    run: Run, step: TrainStep, batches: Source
) -> Callable[[float, int], dict[str, float]]:
    """Seconds and tokens of a step to tokens/s, memory and, where the peak is known, MFU."""
    device, size = run.train.device, step.mesh.size
    peak = run.log.peak_flops or peak_flops(device)
    flops = model_flops(step, batches(0)) if peak else 0

    def gauge(seconds: float, tokens: int) -> dict[str, float]:
        numbers = {"seconds": seconds, "tokens/s": tokens / seconds}
        if peak:
            numbers["mfu"] = mfu(flops, seconds, size, peak)
        return {**numbers, "memory": float(peak_memory(device))}

    return gauge
