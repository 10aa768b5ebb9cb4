"""Saving and restoring: against a plain sequential write and read, and torch.distributed.checkpoint.

``python bench/checkpoint.py`` [--mib 1024] [--rounds 5] [--folder .]

The state is like that of a model of 32 layers with AdamW: stacks of matrices and of vectors, three
times over. All sides see the same tensors, in turns, and flush to the disk as often (once a file).
The plain write is of one buffer with all bytes, in blocks of 8 MiB; the plain read fills new memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import pfx
from pfx import checkpoint

BLOCK = 8 << 20


def state_of(mib: int) -> dict[str, dict[str, torch.Tensor]]:
    width = math.ceil((mib * 2**20 / (3 * 4 * 32 * 12)) ** 0.5 / 64) * 64
    shapes = {
        "qkv": (32, width, 3 * width),
        "out": (32, width, width),
        "up": (32, width, 4 * width),
        "down": (32, 4 * width, width),
        **{f"norm{i}": (32, width) for i in range(8)},
    }
    draw = torch.Generator().manual_seed(0)
    return {
        name: {key: torch.rand(shape, generator=draw) for key, shape in shapes.items()}
        for name in ("params", "mu", "nu")
    }


def plain_write(path: Path, data: np.ndarray) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(data), BLOCK):
        os.write(handle, data[start : start + BLOCK].data)
    os.fsync(handle)
    os.close(handle)


def plain_read(path: Path) -> np.ndarray:
    data = np.empty(path.stat().st_size, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(data), BLOCK):
            file.readinto(data[start : start + BLOCK].data)
    return data


def cached(folder: Path, *, keep: bool) -> None:
    """Have the pages of all files in memory, or none of them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                if keep:
                    while file.read(BLOCK):
                        pass
                else:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touched(nbytes: int) -> None:
    """Let the next allocation find pages that a virtual machine's host has given us already."""
    np.empty(nbytes, np.uint8)[::4096] = 1


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds that an act takes, and those of all processor cores in it."""
    start, cores = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - cores


def in_turns(
    rounds: int, acts: dict[str, Callable[[], object]], before: Callable[[str], object]
) -> dict[str, tuple[float, float]]:
    """Medians of the seconds of each act, measured in turns; the first round does not count."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for turn in range(rounds + 1):
        for name, act in list(acts.items())[:: 1 if turn % 2 else -1]:
            before(name)
            took = timed(act)
            if turn:
                seconds[name].append(took)
    medians = {name: zip(*each, strict=True) for name, each in seconds.items()}
    return {name: (median(wall), median(cores)) for name, (wall, cores) in medians.items()}


def show(title: str, seconds: dict[str, tuple[float, float]], nbytes: int) -> None:
    ours = seconds["pfx"][0]
    print(title)
    for name, (took, cores) in seconds.items():
        ratio = "" if name == "pfx" else f"   pfx is {took / ours:.2f} x as fast"
        rate = f"{nbytes / took / 1e9:6.2f} GB/s"
        print(f"  {name:<20}{1e3 * took:8.0f} ms {rate} {cores:6.2f} s of processor{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    state = state_of(options.mib)
    leaves = pfx.tree.leaves(state)
    flat = np.concatenate([leaf.view(-1).view(torch.uint8).numpy() for leaf in leaves])
    nbytes = len(flat)
    print(f"{nbytes / 2**30:.2f} GiB in {len(leaves)} tensors")
    like = pfx.tree.map(lambda leaf: pfx.ShapeDtype(tuple(leaf.shape)), state)

    def dcp_save() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)

    def dcp_load() -> None:
        target = pfx.tree.map(torch.empty_like, state)
        with contextlib.redirect_stderr(io.StringIO()):
            dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)

    def ready(name: str) -> None:
        for each in ("dcp", "plain", "own"):
            if each in name or (each == "own" and name == "pfx"):
                shutil.rmtree(folder / each, ignore_errors=True)
        (folder / "plain").mkdir(exist_ok=True)

    def fresh(keep: bool, _: str) -> None:  # noqa: FBT001
        cached(folder, keep=keep)
        touched(nbytes + nbytes // 4)

    try:
        saves = {
            "plain write": lambda: plain_write(folder / "plain/x", flat),
            "pfx": lambda: checkpoint.save(folder / "own", 1, state),
            "dcp, torch": dcp_save,
        }
        show("save", in_turns(options.rounds, saves, ready), nbytes)
        loads = {
            "plain read": lambda: plain_read(folder / "plain/x"),
            "pfx": lambda: checkpoint.restore(folder / "own", like=like),
            "dcp, torch": dcp_load,
        }
        for title, keep in (("restore, files in memory", True), ("restore, files on disk", False)):
            show(title, in_turns(options.rounds, loads, functools.partial(fresh, keep)), nbytes)
        stalls(folder, state, options.rounds)
    finally:
        shutil.rmtree(folder)


def stalls(folder: Path, state: dict[str, dict[str, torch.Tensor]], rounds: int) -> None:
    """How long save_async keeps its caller, against a copy into memory that is there already."""
    leaves = pfx.tree.leaves(state)
    room = [torch.empty_like(leaf) for leaf in leaves]
    copies, stalled = [], []
    for turn in range(rounds + 1):
        copy, _ = timed(lambda: [to.copy_(leaf) for to, leaf in zip(room, leaves, strict=True)])
        start = time.perf_counter()
        handle = checkpoint.save_async(folder / "async", 1, state)
        stall = time.perf_counter() - start
        handle.wait()
        if turn:
            copies.append(copy)
            stalled.append(stall)
    copy, stall = median(copies), median(stalled)
    print("asynchronous save")
    print(f"  copy in memory              {1e3 * copy:8.0f} ms")
    print(f"  the caller waits            {1e3 * stall:8.0f} ms   {stall / copy:.2f} of the copy")


if __name__ == "__main__":
    main()
