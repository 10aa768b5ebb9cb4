"""The communication bill of a program: one `Collective` a line, or summed up by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pfx.spec import Axes


@dataclass(frozen=True)
class Collective:
    """One line of the communication bill.

    `bytes` is the payload on one device: the part reduced, or the whole that a gather delivers;
    `count` how often it runs in a step, loops multiplied out.
    """

    op: str
    axes: Axes
    dtype: str
    bytes: int
    count: int
    shape: tuple[int, ...]
    source: str
    reason: str
    bucket: int = 0  # collectives of one bucket travel as one message
    device: int | None = None  # of a pipeline: the only device along its axis that runs this

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        place = f"  {self.source}" if self.source else ""
        what = f"{self.dtype}{list(self.shape)}"
        left = f"{self.op:<14} {','.join(self.axes):<8} {what:<24} {self.bytes:>12,} B{times}"
        return f"{left}  {self.reason}{place}"


@dataclass
class _Row:
    """Collectives of one kind for one reason: what all devices run, and what each runs alone."""

    tensors: Counter[int | None] = field(default_factory=Counter)
    calls: Counter[int | None] = field(default_factory=Counter)
    bytes: Counter[int | None] = field(default_factory=Counter)


def busiest(counts: Counter[int | None]) -> int:
    """The count of the device that has most, from those of single devices and of all (None)."""
    return counts[None] + max((n for device, n in counts.items() if device is not None), default=0)


def bill_of(collectives: Sequence[Collective]) -> str:
    """Sum up collectives by op, axes, reason and line, the heaviest first, with a total per axis.

    `calls` counts messages: collectives that share a bucket in one iteration are one call. Where the
    stages of a pipeline differ, each number is that of the device for which it is largest.
    """
    rows: dict[tuple[str, ...], _Row] = {}
    totals: dict[str, Counter[int | None]] = {}
    counted: set[tuple[tuple[str, ...], int]] = set()
    for item in collectives:
        axes = ",".join(item.axes)
        key = (item.op, axes, item.reason, item.source)
        row = rows.setdefault(key, _Row())
        row.tensors[item.device] += 1
        row.bytes[item.device] += item.bytes * item.count
        if (key, item.bucket) not in counted:
            counted.add((key, item.bucket))
            row.calls[item.device] += item.count
        totals.setdefault(axes, Counter())[item.device] += item.bytes * item.count
    lines = [f"{'op':<15}{'axes':<8}{'tensors':>8}{'calls':>7}{'bytes a step':>16}  why"]
    for (op, axes, reason, source), row in sorted(
        rows.items(), key=lambda kv: -busiest(kv[1].bytes)
    ):
        why = f"{reason}  {source}".rstrip()
        tensors, calls, size = map(busiest, (row.tensors, row.calls, row.bytes))
        lines.append(f"{op:<15}{axes:<8}{tensors:>8}{calls:>7}{size:>16,}  {why}")
    for axes, sizes in totals.items():
        lines.append(f"{'total':<15}{axes:<8}{'':>15}{busiest(sizes):>16,}")
    return "\n".join(lines)
