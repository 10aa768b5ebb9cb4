"""Two nodes on this machine: network namespaces with a wire between them that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.dist.launch import LAUNCHED, ROOT


def ip(*words: str) -> None:
    """Run ``ip``; raises with what it printed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why this machine cannot have two nodes; nothing if it can."""
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        with two_nodes():
            pass
    except OSError as error:
        return f"no network namespaces: {error}"
    return ""


@dataclass(frozen=True)
class Node:
    """A namespace with its own host name, at one end of the wire."""

    name: str
    space: str
    wire: str
    address: str

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        """Run a command there."""
        base = {k: v for k, v in os.environ.items() if k not in LAUNCHED and "PYTEST" not in k}
        base |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": self.wire, **variables}
        there = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c"]
        script = f'hostname {self.name} && exec "$@"'
        return subprocess.Popen(
            [*there, script, "sh", *command], env=base, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wired(self, state: str) -> None:
        """Set its end of the wire "up" or "down"."""
        ip("-n", self.space, "link", "set", self.wire, state)

    def end_all(self) -> None:
        """Kill every process that is there."""
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that see each other and nothing else."""
    tag = f"{os.getpid() % 100000}"
    nodes = [
        Node(f"node-{end}", f"pfx{tag}{end}", f"pfx{tag}{end}", f"10.77.0.{number}")
        for number, end in ((1, "a"), (2, "b"))
    ]
    try:
        for node in nodes:
            ip("netns", "add", node.space)
        first, second = nodes
        ip("link", "add", first.wire, "netns", first.space, "type", "veth",
           "peer", "name", second.wire, "netns", second.space)  # fmt: skip
        for node in nodes:
            ip("-n", node.space, "addr", "add", f"{node.address}/24", "dev", node.wire)
            ip("-n", node.space, "link", "set", "lo", "up")
            node.wired("up")
        yield first, second
    finally:
        for node in nodes:
            node.end_all()
            subprocess.run(["ip", "netns", "del", node.space], capture_output=True)


def torchrun(
    node: Node, host: Node, port: int, script: list[str], **variables: str
) -> subprocess.Popen[str]:
    """Start one node's part of a job of two nodes with a process each."""
    conf = f"is_host={str(node is host).lower()},read_timeout=15,join_timeout=60,close_timeout=5"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host.address}:{port}", "--rdzv-id", "job",
        "--rdzv-conf", conf, "--local-addr", node.address, "--max-restarts", "0", *script,
    ]  # fmt: skip
    return node.start(command, OMP_NUM_THREADS="1", **variables)
