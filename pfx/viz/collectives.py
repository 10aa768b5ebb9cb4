"""`collectives`: the bill of a step's communication, as a table or as bars by axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pfx.compiler.bill import busiest
from pfx.compiler.program import Collective, Program
from pfx.viz import figure as fig
from pfx.viz.bars import stacked_bars
from pfx.viz.units import Programs, bytes_text, named_programs, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPS = {
    "all_gather": fig.LIGHT[0],
    "reduce_scatter": fig.LIGHT[1],
    "all_reduce": fig.LIGHT[2],
    "all_to_all": fig.LIGHT[3],
    "permute": fig.LIGHT[4],
    "send": fig.LIGHT[5],
}
Key = tuple[str, str]  # op, axes


@dataclass
class _Sum:
    """How many collectives and bytes: of all devices (None), and of single ones in a pipeline."""

    counts: Counter[int | None] = field(default_factory=Counter)
    sizes: Counter[int | None] = field(default_factory=Counter)

    def add(self, c: Collective) -> None:
        self.counts[c.device] += c.count
        self.sizes[c.device] += c.count * c.bytes

    @property
    def busiest(self) -> tuple[int, int]:
        """The number and the bytes, each of the device where it is largest."""
        return busiest(self.counts), busiest(self.sizes)


def collectives_text(programs: Programs) -> str:
    """List what a step communicates.

    One program gets a line for each collective with what it moves and why; equal lines are added.
    Several programs get a column each: how often an operation runs along an axis, and its bytes.
    Bytes are the payload on one device: the part that is reduced, or the whole that a gather
    delivers. Loops are multiplied out. Where the stages of a pipeline differ, each number is that of
    the device for which it is largest.

    Args:
        programs: a `Program`, or a list of (name, program) to compare.

    Raises:
        TypeError: it is neither.

    >>> import torch
    >>> from pfx.api import jit
    >>> from pfx.mesh import make_mesh
    >>> from pfx.spec import P
    >>> x, w = torch.ones(8, 16), torch.ones(16, 4)
    >>> specs = {"contraction": (P(None, "tp"), P("tp")), "rows": (P("tp"), P())}
    >>> steps = {k: jit(torch.matmul, mesh=make_mesh(tp=2), in_specs=s) for k, s in specs.items()}
    >>> print(collectives_text([(name, step.lower(x, w)) for name, step in steps.items()]))
                       contraction  rows
    all_reduce     tp    1 · 128 B     –
    """
    pairs = named_programs(programs, "viz.collectives_text")
    if isinstance(programs, Program):
        return _details(programs)
    keys = dict.fromkeys(_key(c) for _, program in pairs for c in program.collectives())
    columns = [_sums(program) for _, program in pairs]
    rows = [["", "", *(name for name, _ in pairs)]]
    for op, axes in sorted(keys, key=_order):
        cells = [_cell(column.get((op, axes))) for column in columns]
        rows.append([op, axes, *cells])
    if len(rows) == 1:
        return "no collectives"
    return table(rows, "<<" + ">" * len(pairs))


def _cell(entry: tuple[int, int] | None) -> str:
    return "–" if entry is None else f"{entry[0]} · {bytes_text(entry[1])}"


def _key(collective: Collective) -> Key:
    return collective.op, ",".join(collective.axes)


def _order(key: Key) -> tuple[int, Key]:
    names = list(OPS)
    return names.index(key[0]) if key[0] in names else len(names), key


def _sums(program: Program) -> dict[Key, tuple[int, int]]:
    """Number and bytes of the collectives by operation and axes."""
    found: dict[Key, _Sum] = {}
    for c in program.collectives():
        found.setdefault(_key(c), _Sum()).add(c)
    return {key: total.busiest for key, total in found.items()}


def _details(program: Program) -> str:
    lines: dict[tuple[str, ...], _Sum] = {}
    for c in program.collectives():
        why = ", ".join(filter(None, (c.reason, c.source)))
        what = f"{c.dtype}[{', '.join(map(str, c.shape))}]"
        lines.setdefault((*_key(c), what, why), _Sum()).add(c)
    if not lines:
        return "no collectives"
    rows = [["op", "axis", "count", "bytes", "each", "why"]]
    for (op, axes, what, why), total in lines.items():
        count, size = total.busiest
        rows.append([op, axes, str(count), bytes_text(size), what, why])
    return "\n".join([table(rows, "<<>><<"), _total(program)])


def _total(program: Program) -> str:
    total, messages = _Sum(), Counter[int | None]()
    for c in program.collectives():
        total.add(c)
    buckets = {c.bucket: c for c in program.collectives()}
    for c in buckets.values():
        messages[c.device] += c.count
    (count, size), sent = total.busiest, busiest(messages)
    text = f"{sent} message" + ("s" if sent > 1 else "")
    return f"{_calls(count)} in {text}, {bytes_text(size)} a step and device"


def _calls(count: int) -> str:
    return f"{count} collective" + ("s" if count > 1 else "")


def collectives(programs: Programs) -> Figure:
    """Draw the bytes that a step communicates: one bar a program and axis, cut by operation.

    Where the stages of a pipeline differ, the bytes of an operation are those of the device that
    has most.

    Args:
        programs: a `Program`, or a list of (name, program) to compare.

    Returns:
        A `matplotlib.figure.Figure` with one axes.

    Raises:
        TypeError: it is neither.
        ImportError: matplotlib is not installed.

    >>> import torch
    >>> from pfx.api import jit
    >>> from pfx.mesh import make_mesh
    >>> from pfx.spec import P
    >>> step = jit(torch.matmul, mesh=make_mesh(tp=2), in_specs=(P(None, "tp"), P("tp")))
    >>> figure = collectives(step.lower(torch.ones(8, 16), torch.ones(16, 4)))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['128', '128 B, 1 collective']
    """
    pairs = named_programs(programs, "viz.collectives")
    bars = [bar for name, program in pairs for bar in _bars(name, _sums(program))]
    return stacked_bars(
        "viz.collectives", "bytes that a step communicates, on one device", bars, OPS
    )


def _bars(name: str, sums: dict[Key, tuple[int, int]]) -> list[tuple[str, dict[str, int], str]]:
    """One bar for each group of axes: its label, bytes by operation, and the text at its end."""
    if not sums:
        return [(name, {}, "none")]
    bars = []
    for axes in dict.fromkeys(axes for _, axes in sums):
        parts: Sequence[tuple[str, int, int]] = [
            (op, *sums[op, axes])
            for op in [*OPS, *(o for o, _ in sums if o not in OPS)]
            if (op, axes) in sums
        ]
        total, count = sum(size for _, _, size in parts), sum(n for _, n, _ in parts)
        label = f"{name} · {axes}" if name else axes
        bars.append(
            (label, {op: size for op, _, size in parts}, f"{bytes_text(total)}, {_calls(count)}")
        )
    return bars
