"""Where a run's numbers go: a line a step, ``metrics.jsonl``, TensorBoard. Rank 0 alone has sinks."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pfx.errors import message
from pfx.recipe.overrides import ConfigError

Numbers = Mapping[str, float]


class Sink(Protocol):
    """Takes the numbers of steps, and what else happens."""

    def step(self, step: int, numbers: Numbers) -> None:
        """The numbers of one training step."""
        ...

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        """Something else: "resume", "evaluate", "checkpoint", "incident", "stop", "note"."""
        ...

    def close(self) -> None:
        """Write what is still in memory."""
        ...


def line(step: int, total: int, numbers: Numbers) -> str:
    """Return one aligned line; what there is no number for is left out.

    >>> line(7, 100, {"loss": 2.5, "grad_norm": 0.31, "lr": 3e-4, "tokens/s": 1234.0})
    'step   7/100  loss   2.500000  grad norm    0.3100  lr 3.00e-04      1,234 tokens/s'
    """
    width = len(str(total))
    parts = [f"step {step:>{width}}/{total}"]
    parts += [show(float(numbers[name])) for name, show in COLUMNS.items() if name in numbers]
    return "  ".join(parts)


COLUMNS: Mapping[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {x:10.6f}",
    "grad_norm": lambda x: f"grad norm {x:9.4f}",
    "lr": lambda x: f"lr {x:.2e}",
    "loss_scale": lambda x: f"loss scale {x:7.0f}",
    "tokens/s": lambda x: f"{x:>9,.0f} tokens/s",
    "mfu": lambda x: f"MFU {x:6.1%}",
    "memory": lambda x: f"{x / 2**30:6.2f} GiB",
    "skipped": lambda x: f"skipped {x:.0f}",
}


def event_line(name: str, step: int, what: Mapping[str, Any]) -> str:
    """Return one line for something that is not a step.

    >>> event_line("evaluate", 40, {"loss": 3.25, "batches": 8})
    'evaluate at step 40: loss 3.25, batches 8'
    """
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in what.items())
    return f"{name} at step {step}: {shown}" if what else f"{name} at step {step}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else str(value)


class Lines:
    """A line for every so-manyth step, and for every event."""

    def __init__(self, show: Callable[[str], Any], total: int, every: int) -> None:
        self.show, self.total, self.every = show, total, every

    def step(self, step: int, numbers: Numbers) -> None:
        """Show the step, if it is its turn."""
        if step % self.every == 0 or step in (1, self.total):
            self.show(line(step, self.total, numbers))

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        """Show the event."""
        self.show(event_line(name, step, what))

    def close(self) -> None:
        """Nothing is in memory."""


class JsonLines:
    """A file with a JSON object a line; a run that goes on appends.

    Steps after a resume may be there twice: the later line counts. Numbers that are not finite,
    which JSON does not have, are strings.

    Raises:
        ConfigError: another run is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            fix = "wait for it, or another directory: --set directory=runs/another"
            what = "is being written by another run."
            raise ConfigError(message(f"{path}:", what, fix=fix)) from None
        except OSError:
            pass  # a file system without locks
        if _torn(path):  # killed while it wrote
            self.file.write("\n")

    def _write(self, record: Mapping[str, Any]) -> None:
        self.file.write(json.dumps({name: _json(value) for name, value in record.items()}) + "\n")
        self.file.flush()

    def step(self, step: int, numbers: Numbers) -> None:
        """Append the numbers, to the last bit."""
        self._write({"step": step, "time": round(time.time(), 3), **numbers})

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        """Append the event under its name."""
        self._write({"event": name, "step": step, "time": round(time.time(), 3), **what})

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return (
        value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
    )


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the numbers of every step of a ``metrics.jsonl``; of a repeated step, the last ones."""
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            continue  # torn by a kill
        if isinstance(record, dict) and "event" not in record and "step" in record:
            steps[record["step"]] = record
    return steps


class TensorBoard:
    """TensorBoard's event files, in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            fix = "pip install 'pfx[tensorboard]', or log.tensorboard=False"
            raise ConfigError(message("log.tensorboard:", str(error), fix=fix)) from None
        self.writer = SummaryWriter(str(folder))

    def step(self, step: int, numbers: Numbers) -> None:
        """Add a point to the curve of each number."""
        for name, value in numbers.items():
            self.writer.add_scalar(f"train/{name}", value, step)

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        """Add numbers to curves, and other things as text."""
        for key, value in what.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{name}/{key}", value, step)
            else:
                self.writer.add_text(f"{name}/{key}", str(value), step)

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()


class Several:
    """Each of some sinks; none at all is a sink too."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks: Sequence[Sink] = sinks

    def step(self, step: int, numbers: Numbers) -> None:
        """Tell all."""
        for sink in self.sinks:
            sink.step(step, numbers)

    def event(self, name: str, step: int, what: Mapping[str, Any]) -> None:
        """Tell all."""
        for sink in self.sinks:
            sink.event(name, step, what)

    def close(self) -> None:
        """Close all."""
        for sink in self.sinks:
            sink.close()
