"""Two nodes train together, the wire between them is cut, both say who is lost, and the job resumes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import pfx
from pfx.recipe import Checkpoint, Data, Log, Model, Optimizer, Run, Train, session
from pfx.recipe.log import read_metrics
from tests.dist.nodes import Node, torchrun, two_nodes, why_not
from tests.sim import recipe_model

STEPS, CUT_AFTER, PATIENCE = 40, 14, 20
NO_NODES = why_not()

CONFIG = """
import time
from pathlib import Path
from tests.dist import test_nodes
from tests.sim import recipe_model

def slowly(run, part):
    source = recipe_model.counting(run, part)
    def batches(step):
        time.sleep(0.05)
        return source(step)
    return batches

def config():
    return test_nodes.config(Path({folder!r}), "run", "config:slowly")
"""


def config(folder: Path, directory: str, source: str) -> Run:
    return Run(
        directory=str(folder / directory),
        model=Model(module="tests.sim.recipe_model", config=recipe_model.Config()),
        data=Data(source=source, seq_len=16),
        optimizer=Optimizer(lr=0.02),
        train=Train(steps=STEPS, batch_size=8),
        checkpoint=Checkpoint(every=10, asynchronous=False),
        log=Log(progress=False),
        plan=pfx.Plan(dp=2),
    )


def losses(directory: Path) -> dict[int, float]:
    path = directory / "metrics.jsonl"
    found = read_metrics(path) if path.exists() else {}
    return {step: record["loss"] for step, record in found.items()}


def start(nodes: tuple[Node, Node], port: int, folder: Path) -> list[subprocess.Popen[str]]:
    script = ["-m", "pfx", "train", str(folder / "config.py")]
    return [torchrun(node, nodes[0], port, script, PFX_TIMEOUT=str(PATIENCE)) for node in nodes]


def finished(
    nodes: tuple[Node, Node], jobs: list[subprocess.Popen[str]], limits: tuple[float, float]
) -> list[str]:
    """What each printed; what is there after so many seconds, the second's from the first's end, is killed."""
    printed = []
    for node, job, limit in zip(nodes, jobs, limits, strict=True):
        try:
            printed.append(job.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            node.end_all()
            printed.append(job.communicate()[0] + f"\nkilled after {limit} s")
    return printed


@pytest.mark.skipif(bool(NO_NODES), reason=NO_NODES)
@pytest.mark.timeout(600)
def test_a_node_that_is_cut_off_is_named_and_the_job_resumes(tmp_path: Path):
    (tmp_path / "config.py").write_text(CONFIG.format(folder=str(tmp_path)))
    with two_nodes() as nodes:
        jobs = start(nodes, 29400, tmp_path)
        end = time.monotonic() + 150
        while len(losses(tmp_path / "run")) < CUT_AFTER and time.monotonic() < end:
            if any(job.poll() is not None for job in jobs):
                break
            time.sleep(0.05)
        nodes[1].wired("down")
        # The launcher of the node that is cut off looks for the other for minutes; its rank does not.
        first, second = finished(nodes, jobs, (PATIENCE + 90, PATIENCE))
        assert CUT_AFTER <= len(losses(tmp_path / "run")) < STEPS, first + second
        assert "LostRanksError: rank 0 of 2 (node-a): lost rank 1 (node-b)." in first, first
        assert "LostRanksError: rank 1 of 2 (node-b): lost the store at " in second, second
        assert "and with it ranks on other hosts: 0 (node-a)." in second
        assert all(job.returncode for job in jobs)

        nodes[1].wired("up")
        jobs = start(nodes, 29401, tmp_path)
        printed = finished(nodes, jobs, (200, 60))
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(printed)
        assert "resume at step" in printed[0]

    source = "tests.sim.recipe_model:counting"
    session.train(config(tmp_path, "uninterrupted", source))
    expected, found = losses(tmp_path / "uninterrupted"), losses(tmp_path / "run")
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-6), step
