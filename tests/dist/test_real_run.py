"""A run as a user makes it: text to tokens, two processes, a kill, and on with another plan."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import pfx
from models import gpt
from models.python_docs import write
from pfx import data
from pfx.recipe import Checkpoint, Data, Evaluate, Log, Model, Optimizer, Run, Train, session
from pfx.recipe.log import read_metrics
from tests.dist import launch

VOCAB, SEQ, STEPS, KILLED_AFTER = 512, 32, 70, 24
TOLERANCE = 0.003
"""Relative, of a loss: bfloat16 has 8 bits, and plans round their partial products differently. Losses
and gradients are added in float32."""

CONFIG = """
from pathlib import Path
import pfx
from tests.dist import test_real_run
def config():
    plan = pfx.Plan(dp=2, zero=1, precision="bf16")
    return test_real_run.config(Path({folder!r}), plan)
"""


def config(folder: Path, plan: pfx.Plan, directory: str = "run") -> Run:
    sizes = gpt.Config(
        num_layers=4,
        embed_dim=64,
        num_heads=4,
        mlp_dim=128,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        init_std=0.08,
    )
    return Run(
        directory=str(folder / directory),
        model=Model(module="models.gpt", config=sizes),
        data=Data(prefixes=(str(folder / "docs"),), seq_len=SEQ, split=(0.95, 0.05)),
        optimizer=Optimizer(lr=6e-3, warmup_steps=5, options={"b2": 0.95}),
        train=Train(steps=STEPS, batch_size=16),
        checkpoint=Checkpoint(every=10, keep=2),
        evaluate=Evaluate(every=35, batches=2),
        log=Log(progress=False),
        plan=plan,
    )


def prepare(folder: Path) -> None:
    """The documentation of Python as tokens of a BPE trained on it."""
    write(folder / "docs.jsonl", most=900)
    tokenizer = data.train_bpe([folder / "docs.jsonl"], VOCAB, folder / "tokenizer.json")
    summary = data.preprocess([folder / "docs.jsonl"], tokenizer, folder / "docs", workers=1)
    assert summary.documents == 900 and not summary.bad_count
    assert summary.tokens > STEPS * 16 * SEQ


def entropy(folder: Path) -> float:
    """Of the frequencies of tokens, in nats a token."""
    counts = np.bincount(data.IndexedDataset.open(folder / "docs").tokens)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def losses(directory: Path) -> dict[int, float]:
    path = directory / "metrics.jsonl"
    found = read_metrics(path) if path.exists() else {}
    return {step: record["loss"] for step, record in found.items()}


def start(folder: Path, rank: int, port: int) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in launch.LAUNCHED}
    environment |= launch.environment(rank, 2, port)
    environment |= {"PYTHONPATH": str(launch.ROOT), "PFX_TIMEOUT": "60"}
    return subprocess.Popen(
        [sys.executable, "-m", "pfx", "train", str(folder / "config.py")], env=environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def killed_after(folder: Path, step: int) -> str:
    """Train with two processes and kill both with SIGKILL after a step; returns what they printed."""
    port = launch.free_port()
    jobs = [start(folder, rank, port) for rank in range(2)]
    end = time.monotonic() + 200
    while len(losses(folder / "run")) < step and time.monotonic() < end:
        if any(job.poll() is not None for job in jobs):
            break
        time.sleep(0.05)
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return "".join(job.communicate()[0] for job in jobs)


@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_elsewhere_with_the_same_losses(tmp_path: Path):
    prepare(tmp_path)
    source = CONFIG.format(folder=str(tmp_path))
    (tmp_path / "config.py").write_text(source)
    printed = killed_after(tmp_path, KILLED_AFTER)
    before = losses(tmp_path / "run")
    assert KILLED_AFTER <= len(before) < STEPS, printed

    # Elsewhere: one process, four simulated devices, ZeRO 3 instead of 1.
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    plan = pfx.Plan(dp=2, tp=2, zero=3, precision="bf16")
    outcome = session.train(config(tmp_path, plan, "copied"))
    assert (outcome.ending, outcome.at.step) == ("done", STEPS)
    found = losses(tmp_path / "copied")
    assert sorted(found) == list(range(1, STEPS + 1))

    session.train(config(tmp_path, pfx.Plan(precision="bf16"), "uninterrupted"))
    expected = losses(tmp_path / "uninterrupted")
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), step
    # It has learnt more than how frequent each token is.
    assert fmean(found[step] for step in range(STEPS - 9, STEPS + 1)) < entropy(tmp_path)
