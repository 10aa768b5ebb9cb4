"""How this process joins the others: what the launcher said, and the first meeting of all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pfx.errors import MeshError, RuntimeMismatchError, message
from pfx.mesh import Mesh
from pfx.runtime import device
from pfx.runtime.fingerprint import agree, late

MEETING = 60.0  # seconds that ranks wait for each other, unless PFX_TIMEOUT says otherwise
COLLECTIVE = 600.0  # seconds that one collective may take, likewise


@dataclass(frozen=True)
class Ranks:
    """This process's number among all, how many they are, and its number on this host."""

    rank: int
    size: int
    local: int

    def coordinate(self, mesh: Mesh) -> dict[str, int]:
        """This process's place on a mesh."""
        return mesh.coordinate(self.rank)


def ranks(mesh: Mesh) -> Ranks:
    """Read what the launcher, or an earlier init_process_group, said.

    Raises:
        MeshError: when neither did, or their number is not the mesh's size.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    joined = running()
    if joined is not None:
        found = joined
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        found = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local)
    else:
        raise MeshError(
            message(
                f"process mesh {mesh}:",
                "nothing started its processes.",
                "RANK and WORLD_SIZE are not set.",
                fix=f"torchrun --nproc-per-node {mesh.size} script.py, "
                'or make_mesh(..., kind="simulated")',
            )
        )
    if found.size != mesh.size:
        product = " * ".join(str(size) for _, size in mesh.axes) or "no axes"
        raise MeshError(
            message(
                f"process mesh {mesh}:",
                f"has {mesh.size} devices, but {found.size} processes run.",
                f"{product} = {mesh.size}; WORLD_SIZE={found.size}.",
                fix=f"torchrun --nproc-per-node {mesh.size} script.py, "
                f"or axes whose sizes multiply to {found.size}",
            )
        )
    return found


def running() -> Ranks | None:
    """This process's ranks where it has joined the others already."""
    if not dist.is_initialized():
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(dist.get_rank(), dist.get_world_size(), local)


def shared_store() -> Any:
    """The store that all processes share, once they have joined."""
    return dist.distributed_c10d._get_default_store()


def seconds(wanted: float | None, default: float) -> float:
    """The seconds asked for, else those of PFX_TIMEOUT, else the default.

    Raises:
        MeshError: when PFX_TIMEOUT is not a number above 0.
    """
    text = os.environ.get("PFX_TIMEOUT", str(default)) if wanted is None else str(wanted)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise MeshError(
            message("process mesh:", f"a timeout of {text!r} seconds.", fix="PFX_TIMEOUT=60")
        )
    return value


def start(mesh: Mesh, ranks: Ranks, meeting: float, collective: float) -> Any:
    """Join the other processes, unless that is done; returns the store that all share.

    Raises:
        RuntimeMismatchError: naming the ranks that do not come in time.
    """
    if not dist.is_initialized():
        backend = device.backend_of(mesh.device)
        device.select(mesh.device, ranks.local)
        store = _rendezvous(mesh, ranks, meeting)
        agree(
            store,
            "start",
            f"torch {torch.__version__}",
            rank=ranks.rank,
            size=ranks.size,
            timeout=meeting,
            where=f"process mesh {mesh}:",
        )
        dist.init_process_group(
            backend,
            store=PrefixStore("pfx", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=collective),
        )
    return shared_store()


def _rendezvous(mesh: Mesh, ranks: Ranks, meeting: float) -> Any:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; torchrun holds it, or else rank 0."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = ranks.rank == 0 and not agent
    where = f"process mesh {mesh}:"
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=serves,
            timeout=timedelta(seconds=meeting),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if serves or agent:
            what = "rank 0 cannot serve" if serves else f"rank {ranks.rank} cannot reach torchrun"
            raise MeshError(
                message(
                    where,
                    f"{what} at {host}:{port}.",
                    str(error).splitlines()[0],
                    fix="another MASTER_PORT, or a MASTER_ADDR of the host that rank 0 runs on",
                )
            ) from error
        raise RuntimeMismatchError(
            f"{where} {late([0], ranks.size, f'{host}:{port}', meeting)}"
        ) from error
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
