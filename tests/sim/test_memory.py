"""What a device holds, measured on a simulated run, is what the program said before it ran.

Device 0 owns the first of a value's parts. A ledger is told of each as it is made, counts the bytes
of distinct storages, and lets go of them when Python does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
from pfx.compiler.ir import Reshard
from pfx.compiler.program import Program
from pfx.runtime import SimulatedRuntime, simulated
from pfx.runtime.simulated import Simulated
from tests.common import Case

LLAMA = {"num_layers": 6, "embed_dim": 32, "mlp_dim": 96, "head_dim": 8, "vocab_size": 128}
GPT = {"num_layers": 6, "embed_dim": 32, "mlp_dim": 128, "vocab_size": 128}


class Ledger:
    """The bytes of distinct storages that known tensors refer to, now and at most."""

    def __init__(self) -> None:
        self.names: Counter[int] = Counter()
        self.known: set[int] = set()
        self.total = self.peak = self.largest = 0

    def enter(self, tensor: torch.Tensor) -> None:
        """Count a tensor until it dies."""
        if id(tensor) in self.known:
            return
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self.known.add(id(tensor))
        self.names[key] += 1
        if self.names[key] == 1:
            self.total += size
            self.peak = max(self.peak, self.total)
            self.largest = max(self.largest, size)
        weakref.finalize(tensor, self.leave, id(tensor), key, size)

    def leave(self, identity: int, key: int, size: int) -> None:
        """Forget a dead tensor, and its storage with the last."""
        self.known.discard(identity)
        self.names[key] -= 1
        if self.names[key] == 0:
            self.total -= size


def metered(ledger: Ledger) -> type[Simulated]:
    """A simulated runtime that tells the ledger what device 0 makes."""

    class Metered(Simulated):
        def prepare(self, instr: Any) -> Callable[[list[Any]], list[Any]]:
            run = super().prepare(instr)
            # Here all devices' shards are views of one sum; on a device its shard is all there is.
            owns = not (isinstance(instr, Reshard) and instr.move.kind == "reduce_scatter")

            def watched(ins: list[Any]) -> list[Any]:
                outs = run(ins)
                if not owns:
                    outs = [[part.clone() for part in parts] for parts in outs]
                for value, parts in zip(instr.outs, outs, strict=True):
                    if value is not None and value.number not in self.program.streams:
                        ledger.enter(parts[0])
                return outs

            return watched

    return Metered


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[Program, list[torch.Tensor]], Ledger]:
    """Run a program on global tensors and return the ledger of device 0."""

    def run(program: Program, tensors: list[torch.Tensor]) -> Ledger:
        ledger, stack = Ledger(), simulated._stack_of

        def stacked(part: torch.Tensor, length: int) -> torch.Tensor:
            out = stack(part, length)
            if id(part) in ledger.known:
                ledger.enter(out)
            return out

        monkeypatch.setattr(simulated, "_stack_of", stacked)
        runtime = SimulatedRuntime(program.mesh)
        inputs: list[Any] = []
        for value, tensor in zip(program.inputs, tensors, strict=True):
            inputs.append([part.clone() for part in runtime.split(tensor, value.layout)])
            ledger.enter(inputs[-1][0])
        held = [
            parts
            for value, parts in zip(program.inputs, inputs, strict=True)
            if value.number not in program.donated
        ]
        outs = metered(ledger)(program)(inputs)
        assert ledger.total >= sum(parts[0].nbytes for parts in outs)
        del held
        return ledger

    return run


def step_of(case: Case) -> tuple[Program, list[torch.Tensor]]:
    """The program of a training step, and global inputs for it."""
    train = case.train()
    batch = case.batch(0)
    state = pfx.device_get(train.init(pfx.random.key(0)))
    return train.lower(batch), pfx.tree.leaves((state, batch))


PLANS = {
    "one device": {},
    "dp": {"dp": 4},
    "tp": {"tp": 2},
    "dp tp": {"dp": 2, "tp": 2},
    "sequence": {"tp": 4, "sequence_parallel": True},
    "zero 1": {"dp": 4, "zero": 1},
    "zero 2": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"dp": 4, "zero": 3},
    "zero 3 tp": {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "microbatches": 3},
    "microbatches": {"dp": 2, "microbatches": 4},
}
