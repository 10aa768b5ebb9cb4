"""The loop on two processes: rewinds and stops that both make, although one alone was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pfx
from pfx import checkpoint
from pfx.recipe import (
    Checkpoint,
    Data,
    Evaluate,
    Log,
    Model,
    Monitor,
    Optimizer,
    Run,
    Train,
    session,
)
from pfx.recipe.log import read_metrics
from pfx.recipe.signals import STOPPED
from tests.dist import launch
from tests.sim import recipe_model

STEPS, BAD, ASKED = 30, 9, 19

CONFIG = """
import os, signal
from pathlib import Path
from tests.dist import test_recipe_processes as made
from tests.sim import recipe_model

def source(run, part):
    if part == "train":
        recipe_model.WANTED["factors"] = {{made.BAD: 100.0}}
        if os.environ.get("RANK") == "1":
            recipe_model.WANTED["signals"] = {{made.ASKED: signal.SIGTERM}}
    return recipe_model.counting(run, part)

def config():
    return made.config(Path({folder!r}), "run", "pfx_source:source")
"""


def config(folder: Path, directory: str, source: str) -> Run:
    return Run(
        directory=str(folder / directory),
        model=Model(module="tests.sim.recipe_model", config=recipe_model.Config()),
        data=Data(source=source, seq_len=16),
        optimizer=Optimizer(lr=0.02, schedule="constant"),
        train=Train(steps=STEPS, batch_size=8),
        checkpoint=Checkpoint(every=5),
        evaluate=Evaluate(every=10),
        log=Log(progress=False),
        monitor=Monitor(warmup=3),
        plan=pfx.Plan(dp=2, zero=2),
    )


def run_two(folder: Path) -> list[tuple[int, str]]:
    """The exit code and the output of each rank."""
    port = launch.free_port()
    base = {k: v for k, v in os.environ.items() if k not in launch.LAUNCHED}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "pfx", "train", str(folder / "pfx_source.py")],
            env={**base, **launch.environment(rank, 2, port), "PYTHONPATH": str(launch.ROOT),
                 "PFX_TIMEOUT": "60"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [job.communicate(timeout=200)[0] for job in jobs]
    return [(job.returncode, text) for job, text in zip(jobs, printed, strict=True)]


@pytest.mark.timeout(300)
def test_both_ranks_go_back_and_stop_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pfx_source.py").write_text(CONFIG.format(folder=str(tmp_path)))
    (code, shown), (other, quiet) = run_two(tmp_path)
    assert (code, other) == (STOPPED, STOPPED), shown + quiet
    assert "stopped at step" in shown and "step " not in quiet  # rank 0 alone prints
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (incident,) = [r for r in records if r.get("event") == "incident"]
    assert incident["action"] == "went back to step 5; batches 5 to 9 are left out"
    report = json.loads(Path(incident["report"]).with_suffix(".json").read_text())
    assert report["disagreeing"] == [] and report["same_bits"] is True
    stopped = next(r for r in records if r.get("event") == "stopped")
    assert stopped["reason"] == "SIGTERM (rank 1)"
    # Asked before batch 19, which is step 15 after the rewind; at most two steps more are made.
    step = checkpoint.latest(tmp_path / "run/checkpoints")
    assert step == stopped["step"] and 15 <= step <= 17

    # Here, on simulated devices, the run goes on; and here is one that nobody stopped.
    monkeypatch.syspath_prepend(str(tmp_path))
    assert session.train(config(tmp_path, "run", "pfx_source:source")).ending == "done"
    assert session.train(config(tmp_path, "whole", "pfx_source:source")).at.rewinds == 1
    found, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    losses = lambda found: {step: record["loss"] for step, record in found.items()}
    assert losses(found) == losses(expected)  # bit for bit
