"""Programs by name, bytes as text, and tables in plain characters: what the tables share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfx.compiler.program import Program
from pfx.errors import message

Programs = Program | Sequence[tuple[str, Program]]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """Write a number of bytes with three digits and a binary unit.

    >>> bytes_text(1000), bytes_text(8192), bytes_text(130e9)
    ('1000 B', '8 KiB', '121 GiB')
    """
    scale = unit_scale(count)
    return f"{number_text(count / 1024**scale)} {UNITS[scale]}"


def number_text(number: float) -> str:
    """Write a number with three digits, or as many as it has before the point.

    >>> number_text(0.125), number_text(37.456), number_text(1023.4)
    ('0.125', '37.5', '1023')
    """
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def unit_scale(count: float) -> int:
    """The power of 1024 in whose unit a number of bytes is read best."""
    scale = 0
    while count >= 1024 ** (scale + 1) * 0.9995 and scale < len(UNITS) - 1:
        scale += 1
    return scale


def named_programs(programs: Programs, where: str) -> list[tuple[str, Program]]:
    """Read one program, or a list of (name, program).

    Raises:
        TypeError: when it is neither, or the list is empty.
    """
    if isinstance(programs, Program):
        return [("", programs)]
    pairs: list[Any] = list(programs) if isinstance(programs, Sequence) else []
    fine = all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[1], Program) for p in pairs)
    if not pairs or not fine:
        raise TypeError(
            message(
                f"{where}:",
                "needs a Program, or a list of (name, Program).",
                f"got: {programs!r:.60}",
                fix=f'{where}([("my step", step.lower(*args))])',
            )
        )
    return [(str(name), program) for name, program in pairs]


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Line up rows of cells in columns; `align` has one < or > for each.

    >>> print(table([["op", "bytes"], ["all_gather", "8 B"]], "<>"))
    op          bytes
    all_gather    8 B
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
