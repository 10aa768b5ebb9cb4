"""Start N processes once and let each run a list of checks, as torchrun would or with torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a launcher sets; none of it may leak from the test run into the processes, or between them.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PFX_TIMEOUT")


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables by which torchrun tells a process who it is."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip


def run_checks(
    checks: Sequence[str], out: Path, *, size: int, torchrun: bool, limit: float = 240.0
) -> list[str]:
    """Run checks (functions of `checks.py`) in `size` processes; returns what failed, one text each.

    Args:
        out: an empty folder for the ranks' reports.
        torchrun: start them with torch's own launcher, not by hand.
        limit: seconds after which all are killed and what they did not report has failed.
    """
    script = [str(ROOT / "tests/dist/checks.py"), str(out), *checks]
    leaks = lambda key: key in LAUNCHED or key.startswith("PYTEST")
    base = {key: text for key, text in os.environ.items() if not leaks(key)}
    base |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PFX_TIMEOUT": "100"}
    module = ["-m", "torch.distributed.run", "--nproc-per-node", str(size),
              "--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # fmt: skip
    if torchrun:
        commands = [([sys.executable, *module, *script], base)]
    else:
        port = free_port()
        one = [sys.executable, "-W", "error", *script]
        commands = [(one, base | environment(rank, size, port)) for rank in range(size)]
    jobs = [
        subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command, env in commands
    ]
    end, printed = time.monotonic() + limit, []
    for job in jobs:
        try:
            printed.append(job.communicate(timeout=max(1.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            printed.append(job.communicate()[0] + f"\nkilled after {limit} s")
    return _failures(checks, out, size, "\n".join(printed))


def _failures(checks: Sequence[str], out: Path, size: int, printed: str) -> list[str]:
    """What each rank did not report as passed, with its traceback or else what was printed."""
    failures = []
    for rank in range(size):
        path = out / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        reports = dict(json.loads(line) for line in lines)
        for check in checks:
            if reports.get(check) != "passed":
                text = reports.get(check, f"never finished; printed:\n{printed[-4000:]}")
                failures.append(f"rank {rank}, {check}: {text}")
    return failures
