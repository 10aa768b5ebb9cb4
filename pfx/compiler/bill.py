"""The communication bill of a program: one `Collective` a line, or summed up by reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        place = f"  {self.source}" if self.source else ""
        what = f"{self.dtype}{list(self.shape)}"
        left = f"{self.op:<14} {','.join(self.axes):<8} {what:<24} {self.bytes:>12,} B{times}"
        return f"{left}  {self.reason}{place}"


@dataclass
class _Row:
    """Collectives of one kind for one reason."""

    tensors: int = 0
    calls: int = 0
    bytes: int = 0


def bill_of(collectives: Sequence[Collective]) -> str:
    """Sum up collectives by op, axes, reason and line, the heaviest first, with a total per axis.

    `calls` counts messages: collectives that share a bucket in one iteration are one call.
    """
    rows: dict[tuple[str, ...], _Row] = {}
    totals: dict[str, int] = {}
    counted: set[tuple[tuple[str, ...], int]] = set()
    for item in collectives:
        axes = ",".join(item.axes)
        key = (item.op, axes, item.reason, item.source)
        row = rows.setdefault(key, _Row())
        row.tensors += 1
        row.bytes += item.bytes * item.count
        if (key, item.bucket) not in counted:
            counted.add((key, item.bucket))
            row.calls += item.count
        totals[axes] = totals.get(axes, 0) + item.bytes * item.count
    lines = [f"{'op':<15}{'axes':<8}{'tensors':>8}{'calls':>7}{'bytes a step':>16}  why"]
    for (op, axes, reason, source), row in sorted(rows.items(), key=lambda kv: -kv[1].bytes):
        why = f"{reason}  {source}".rstrip()
        lines.append(f"{op:<15}{axes:<8}{row.tensors:>8}{row.calls:>7}{row.bytes:>16,}  {why}")
    lines += [f"{'total':<15}{axes:<8}{'':>15}{size:>16,}" for axes, size in totals.items()]
    return "\n".join(lines)
