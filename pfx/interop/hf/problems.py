"""The error of weights that do not fit, and the short way to list many names in one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from pfx.errors import PfxError

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")  # none of a file name, 00001


class WeightsError(PfxError, ValueError):
    """Weight files, a config.json and a model that do not fit together, or cannot be read."""


def collapsed(names: Iterable[str]) -> list[str]:
    """List names of which many differ by one number only.

    >>> collapsed(["layers.0.w", "layers.1.w", "layers.3.w", "norm"])
    ['layers.[0-1,3].w', 'norm']
    """
    groups: dict[tuple[str, str], list[int]] = {}
    alone = []
    for name in names:
        before, number, after = _first_number(name)
        if number:
            groups.setdefault((before, after), []).append(int(number))
        else:
            alone.append(name)
    some = [
        f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in sorted(groups.items())
    ]
    return sorted(some + alone)


def _first_number(name: str) -> tuple[str, str, str]:
    before, *rest = _NUMBER.split(name, maxsplit=1)
    return (before, rest[0], rest[1]) if rest else (name, "", "")


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    texts = []
    # Numbers in a row have the same distance from their place in the list.
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        texts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return f"[{','.join(texts)}]"
