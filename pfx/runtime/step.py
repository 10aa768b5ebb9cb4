"""The step that runs one instruction and forgets the values that died with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """One prepared instruction: reads `ins`, writes `outs` (-1: nothing), drops `dead`."""

    run: Callable[[list[Any]], list[Any]]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    dead: tuple[int, ...]

    def __call__(self, env: dict[int, Any]) -> None:
        results = self.run([env[i] for i in self.ins])
        for number, result in zip(self.outs, results, strict=True):
            if number >= 0:
                env[number] = result
        for number in self.dead:
            env.pop(number, None)
