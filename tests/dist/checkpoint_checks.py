"""Checkpoints of real processes: saved by two and restored by one, and the other way round."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import pfx
from pfx import P, checkpoint, make_mesh
from pfx.errors import CheckpointError
from pfx.runtime import process_world
from tests.common import Case
from tests.sim.pipelines import assert_same_bits

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_of(name: str) -> Path:
    """A directory that all ranks share."""
    return Path(sys.argv[1]) / name


def exchanged_objects() -> None:
    """Every rank gets what all gave; nothing but the store is needed for it."""
    mesh = make_mesh(a=SIZE)
    assert (process_world.rank(mesh), process_world.count(mesh)) == (RANK, SIZE)
    for i in range(3):
        given = {"rank": RANK, "text": "x" * i, "number": 2**60 + RANK}
        found = process_world.exchange(mesh, given)
        assert found == [given | {"rank": r, "number": 2**60 + r} for r in range(SIZE)]
    process_world.barrier(mesh)
    assert process_world.world_of().size == SIZE


def checkpoints() -> None:
    """Save in the background of a step, restore on the same mesh, on one process, and back."""
    case = Case("toy", {"vocab_size": 8, "dropout": 0.3}, {"dp": SIZE, "zero": 1}, "adamw")
    train = case.train()
    simulated = case.train(mesh=train.plan.mesh(kind="simulated"))
    state, _ = train.step(train.init(pfx.random.key(0)), case.batch(0))
    saved = pfx.device_get(state)
    run, back = run_of("run"), run_of("back")
    handle = checkpoint.save_async(run, 1, {"train": state, "seen": 1}, metadata={"by": SIZE})
    state, metrics = train.step(state, case.batch(1))  # writes over what is being saved
    expected = [(pfx.device_get(state), pfx.device_get(metrics))]
    assert handle.wait().name == "step-00000001"
    assert checkpoint.latest(run, train.mesh) == 1 and checkpoint.metadata(run) == {"by": SIZE}
    like, specs = {"train": train.shapes, "seen": 0}, {"train": train.state_specs, "seen": None}

    def resumed(folder: Path, step: pfx.TrainStep) -> None:
        found = checkpoint.restore(folder, like=like, mesh=step.mesh, specs=specs)
        assert found["seen"] == 1
        whole = pfx.device_get(found["train"])
        for one, other in zip(pfx.tree.leaves(whole), pfx.tree.leaves(saved), strict=True):
            assert torch.equal(one, other)
        now, told = step.step(found["train"], case.batch(1))
        assert_same_bits([(pfx.device_get(now), pfx.device_get(told))], expected)

    resumed(run, train)
    if RANK == 0:  # one process, all devices simulated
        resumed(run, simulated)
        found = checkpoint.restore(run, like=like, mesh=simulated.mesh, specs=specs)
        checkpoint.save(back, 1, found)
        assert len(list((back / "step-00000001").iterdir())) == 2  # one shard, one manifest
        assert not checkpoint.verify(run) and not checkpoint.verify(back)
    process_world.barrier(train.mesh)
    resumed(back, train)


def checkpoints_that_fail() -> None:
    """What one rank cannot save or read is an error on all, and the next save works."""
    mesh, run = make_mesh(a=SIZE), run_of("failing")
    x = pfx.device_put(torch.arange(8.0), mesh, P("a"))
    trees = [{"x": x, "n": 1j if RANK == SIZE - 1 else 1}, {"x": x, "n": RANK}]
    for tree, said in zip(trees, (f"rank {SIZE - 1} says:", "differs between ranks"), strict=True):
        for save in (checkpoint.save, checkpoint.save_async):
            try:
                save(run, 1, tree)
            except CheckpointError as error:
                assert said in str(error), error
            else:
                raise AssertionError("saved")
    checkpoint.save(run, 2, {"x": x, "n": 1})
    if RANK == SIZE - 1:
        shard = run / f"step-00000002/{RANK:05d}.bin"
        shard.write_bytes(shard.read_bytes()[:-1])
    process_world.barrier(mesh)
    try:
        checkpoint.restore(run, 2, like={"x": x, "n": 0})
    except CheckpointError as error:
        assert f"{SIZE - 1:05d}.bin has 4095 bytes" in str(error), error
    else:
        raise AssertionError("restored")
    checkpoint.save(run, 2, {"x": x, "n": 1})
    found = checkpoint.restore(run, like={"x": x, "n": 0})
    assert torch.equal(pfx.device_get(found["x"]), torch.arange(8.0))
