"""A process that forks savers, which are killed: see `test_checkpoint_crash`.

``python crash.py`` reads jobs as lines of JSON and answers each with a line. A saver is a child that
saves step after step and writes down each one that is complete.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from pfx import Array, P, checkpoint, make_mesh
from pfx.runtime import process_world
from pfx.runtime.process_world import Alone, Processes, World
from pfx.spec import layout_of, part_of

ROOT = Path(__file__).parents[2]
SHAPE = (6, 512)
# What changes a file system: a saver can be killed before the n-th of these calls.
CALLS = ("mkdir", "open", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir")


def tree_of(step: int, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """What a saver saves as a step: every number in it is the step's."""
    mesh = make_mesh("process" if size > 1 else "simulated", dp=size)
    x = torch.full(SHAPE, float(step))
    layout, here = layout_of(P("dp"), SHAPE, mesh), mesh.coordinate(rank)
    split = Array(SHAPE, x.dtype, mesh, layout, (part_of(x, layout, mesh, here),),
                  here if size > 1 else None)  # fmt: skip
    return {"split": split, "whole": torch.full((700,), step), "step": step}


def world_of(job: dict[str, Any]) -> World:
    if job["size"] == 1:
        return Alone()
    store = FileStore(job["store"], job["size"])
    return Processes(store, job["rank"], job["size"], job["patience"])


def save_all(job: dict[str, Any]) -> None:
    """Save steps, and write down each that is complete."""
    world = world_of(job)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    calls = Calls(job.get("kill_before"))
    for step in range(job["first"], job["first"] + job["count"]):
        tree, options = tree_of(step, world.rank, world.size), {"keep": job["keep"], "world": world}
        if job["background"]:
            checkpoint.save_async(job["run"], step, tree, **options).wait()
        else:
            checkpoint.save(job["run"], step, tree, **options)
        os.write(log, b"%d\n" % step)
    Path(job["log"] + ".calls").write_text(str(calls.number))


class Calls:
    """Counts the calls that change a file system, and dies before the `last` one."""

    def __init__(self, last: int | None) -> None:
        self.number, self.last, self.lock = 0, last, threading.Lock()
        for name in CALLS:
            setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, call: Any) -> Any:
        def act(*args: Any, **named: Any) -> Any:
            with self.lock:
                self.number += 1
                if self.number == self.last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return act


class Savers:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def ask(self, **job: Any) -> int:
        """Start a saver and return its number, or wait for one and return how it ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def main() -> None:
    torch.set_num_threads(1)
    process_world.GRACE = 0.3  # type: ignore[misc]
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if not child:
            status = 1
            try:
                save_all(job)
                status = 0
            finally:
                os._exit(status)
        print(child, flush=True)


if __name__ == "__main__":
    main()
