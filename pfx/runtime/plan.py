"""When a value dies, and the step that runs one instruction and forgets what died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pfx.compiler.program import Program


def frees(program: Program) -> list[tuple[int, ...]]:
    """For each instruction, the numbers of the values nobody reads after it."""
    alive = {value.number for value in program.outputs}
    dead: list[tuple[int, ...]] = []
    for instr in reversed(program.instrs):
        read = {value.number for value in instr.ins}
        made = {value.number for value in instr.outs if value is not None}
        dead.append(tuple((read | made) - alive))
        alive |= read
    return dead[::-1]


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
