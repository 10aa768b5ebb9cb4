"""Savers are killed at every point and at random ones, and run out of space: no step is ever half.

Ranks find each other through a file here, so that a process costs a fork and not seconds.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pfx import checkpoint
from pfx.errors import CheckpointError
from tests.dist.crash import ROOT, Savers, tree_of

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "10"))


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    found = Savers()
    yield found
    found.close()


def job(folder: Path, first: int, count: int = 1, **changes: Any) -> dict[str, Any]:
    return {"run": str(folder / "run"), "store": str(folder / f"store {first}"), "rank": 0,
            "size": 1, "first": first, "count": count, "keep": 1, "background": False,
            "patience": 0.3, "log": str(folder / "log"), **changes}  # fmt: skip


def sound(folder: Path) -> int:
    """The latest step, once everything in the directory is as it must be after any crash."""
    run = folder / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the pointer names a complete step: nothing to warn of
        found = checkpoint.latest(run)
    assert checkpoint.verify(run) == [] if checkpoint.steps(run) else found is None
    if found is None:
        return 0
    like = tree_of(0)
    restored = checkpoint.restore(run, like=like)
    assert restored["step"] == found
    assert bool((restored["split"].full_tensor() == found).all())
    assert torch.equal(restored["whole"], torch.full((700,), found))
    log = folder / "log"
    said = [int(line) for line in log.read_text().split()] if log.exists() else []
    assert found >= max(said, default=0)  # what a saver was told is complete is never lost
    return found


@pytest.mark.parametrize("background", [False, True])
def test_killed_before_any_call(savers: Savers, tmp_path: Path, background: bool) -> None:
    """Step 2 is saved and step 1 removed; the saver dies before its n-th call, for every n."""
    first = tmp_path / "first"
    first.mkdir()
    assert savers.ask(wait=savers.ask(**job(first, 1))) == 0
    probe = tmp_path / "probe"
    shutil.copytree(first, probe)
    assert savers.ask(wait=savers.ask(**job(probe, 2, background=background))) == 0
    calls = int((probe / "log.calls").read_text())
    assert sound(probe) == 2 and calls > 10
    seen = []
    for n in range(1, calls + 1):
        folder = tmp_path / str(n)
        shutil.copytree(first, folder)
        killed = savers.ask(**job(folder, 2, background=background, kill_before=n))
        assert savers.ask(wait=killed) == -signal.SIGKILL
        seen.append(sound(folder))
        if n % 4 == 0:  # the next save cleans up
            assert savers.ask(wait=savers.ask(**job(folder, 3))) == 0
            names = sorted(path.name for path in (folder / "run").iterdir())
            assert sound(folder) == 3 and "step-00000003" in names
            assert not [name for name in names if name.startswith(".")]
            assert len(names) == 2 or names == ["latest", "step-00000001", "step-00000003"]
        shutil.rmtree(folder)
    assert seen == sorted(seen) and set(seen) == {1, 2}


@pytest.mark.parametrize("who", ["leader", "other", "all"])
def test_one_of_several_ranks_is_killed(savers: Savers, tmp_path: Path, who: str) -> None:
    draw = random.Random(who)
    size, latest = 3, 1
    assert savers.ask(wait=savers.ask(**job(tmp_path, 1))) == 0
    for number in range(max(EXAMPLES // 2, 3)):
        first = latest + 1
        ranks = {"leader": [0], "other": [1 + number % 2], "all": [0, 1, 2]}[who]
        kills = {rank: draw.randint(1, 24) for rank in ranks}
        for rank in range(size):
            (tmp_path / f"log{rank}").unlink(missing_ok=True)
        jobs = [
            job(tmp_path, first, 2, rank=rank, size=size, kill_before=kills.get(rank),
                store=str(tmp_path / f"store {number}"), background=bool(number % 2))
            for rank in range(size)
        ]  # fmt: skip
        ends = [savers.ask(wait=child) for child in [savers.ask(**each) for each in jobs]]
        assert all(ends[rank] in (-signal.SIGKILL, 0, 1) for rank in ranks)
        assert -signal.SIGKILL in ends or 1 not in ends
        found = sound(tmp_path)
        assert found >= latest
        latest = found
    jobs = [job(tmp_path, latest + 1, rank=rank, size=size, store=str(tmp_path / "store"),
                patience=30.0) for rank in range(size)]  # fmt: skip
    assert [savers.ask(wait=child) for child in [savers.ask(**each) for each in jobs]] == [0] * 3
    assert sound(tmp_path) == latest + 1


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_random_times_of_fifty_saves(savers: Savers, tmp_path: Path, size: int) -> None:
    draw, latest, kills = random.Random(size), 2, 0
    assert savers.ask(wait=savers.ask(**job(tmp_path, 1))) == 0
    start = time.monotonic()
    assert savers.ask(wait=savers.ask(**job(tmp_path, 2))) == 0
    one = time.monotonic() - start
    while latest < 50:
        jobs = [
            job(tmp_path, latest + 1, 50 - latest, rank=rank, size=size, keep=2,
                store=str(tmp_path / f"store {kills}"), background=bool(kills % 2))
            for rank in range(size)
        ]  # fmt: skip
        children = [savers.ask(**each) for each in jobs]
        time.sleep(draw.uniform(0, 6 * one))
        for child in children[draw.randint(0, size - 1) :]:
            os.kill(child, signal.SIGKILL)
        ends = [savers.ask(wait=child) for child in children]
        assert set(ends) <= {-signal.SIGKILL, 0, 1}
        found = sound(tmp_path)
        assert found >= latest
        latest, kills = found, kills + 1
    assert kills > 3
    # What saves that were killed as they were complete did not remove, the next one does.
    assert savers.ask(wait=savers.ask(**job(tmp_path, latest + 1, 1, keep=2))) == 0
    assert checkpoint.steps(tmp_path / "run") == [latest, latest + 1]


def test_a_save_outlives_the_program_that_began_it(tmp_path: Path) -> None:
    """The last lines of a script: nobody waits."""
    script = f"""
import torch
from pfx import checkpoint
from pfx.checkpoint import saving
import time, threading
begin = saving.begin
def late(attempt):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    begin(attempt)
saving.begin = late
checkpoint.save_async({str(tmp_path / "run")!r}, 1, {{"x": torch.ones(3 << 22)}})
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert checkpoint.latest(tmp_path / "run") == 1 and not checkpoint.verify(tmp_path / "run")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write it is that finds no space: an error that says so, and the step before stays."""
    run, write, left = tmp_path / "run", os.pwrite, [0]

    def limited(handle: int, data: Any, offset: int) -> int:
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(handle, data[:4096], offset)  # a short write first, as at the end of a disk

    checkpoint.save(run, 1, tree_of(1))
    monkeypatch.setattr(os, "pwrite", limited)
    for writes in range(4):
        left[0] = writes
        with pytest.raises(
            CheckpointError,
            match=r"(?s)00000.bin cannot be written: No space left.*it needs 20480.*fix: free some",
        ):
            checkpoint.save_async(run, 2, tree_of(2)).wait()
        assert checkpoint.latest(run) == 1
        assert sorted(path.name for path in run.iterdir()) == ["latest", "step-00000001"]
    left[0] = 100
    checkpoint.save(run, 2, tree_of(2))
    assert sound(tmp_path) == 2


def test_a_full_disk_while_the_manifest_is_written(tmp_path: Path) -> None:
    run, replace = tmp_path / "run", os.replace

    def refusing(name: str) -> Any:
        def act(source: Any, target: Any) -> None:
            if Path(target).name == name:
                raise OSError(28, "No space left on device")
            replace(source, target)

        return act

    checkpoint.save(run, 1, tree_of(1))
    for name in ("manifest.msgpack", "latest"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", refusing(name))
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpoint.save(run, 2, tree_of(2))
        assert sound(tmp_path) == 1
    checkpoint.save(run, 3, tree_of(3), keep=1)
    assert sound(tmp_path) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 1 MiB that holds one step and not two."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system mounts nothing")
    try:
        tree = {"w": torch.ones(150_000)}
        checkpoint.save(tmp_path / "run", 1, tree)
        for save in (checkpoint.save, lambda *a: checkpoint.save_async(*a).wait()):
            with pytest.raises(CheckpointError, match="No space left on device"):
                save(tmp_path / "run", 2, tree)
        assert checkpoint.latest(tmp_path / "run") == 1 and checkpoint.verify(tmp_path / "run") == []
        found = checkpoint.restore(tmp_path / "run", like=tree)
        assert torch.equal(found["w"], tree["w"])
        del found
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
