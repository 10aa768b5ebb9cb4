"""Who makes a value of a block, for passes that recognize a few calls and put one in their place."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pfx.compiler.ir import Block, Compute, Instr, Value


class Makers:
    """Who makes and who reads each value of a block, as it was when this was made."""

    def __init__(self, block: Block) -> None:
        self.makers: dict[int, Instr] = {}
        self.reads = Counter(v.number for instr in block.instrs for v in instr.ins)
        self.outputs = {v.number for v in block.outputs}
        for instr in block.instrs:
            self.makers |= {out.number: instr for out in instr.outs if out is not None}

    def call(
        self, value: Any, target: Any, *, alone: bool = True, reads: int = 1
    ) -> Compute | None:
        """The call of an op that makes a value, which (if alone) only so many others read."""
        if not isinstance(value, Value):
            return None
        maker = self.makers.get(value.number)
        once = self.reads[value.number] == reads and value.number not in self.outputs
        found = isinstance(maker, Compute) and maker.target is target and (once or not alone)
        return maker if found else None  # type: ignore[return-value]
