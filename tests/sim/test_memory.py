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
    "dp tp": {"dp": 2, "tp": 2},
    "sequence": {"tp": 4, "sequence_parallel": True},
    "zero 1": {"dp": 4, "zero": 1},
    "zero 2": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "microbatches": 3},
    "microbatches": {"dp": 2, "microbatches": 4},
}
plans = pytest.mark.parametrize("name", PLANS)


def on_device_0(tree: Any) -> int:
    """The bytes of the storages in which device 0 holds a tree of arrays."""
    shards = [array.shards[0] for array in pfx.tree.leaves(tree)]
    assert all(not any(shard.coordinate.values()) for shard in shards)
    return sum(shard.data.untyped_storage().nbytes() for shard in shards)


@plans
def test_states_are_as_large_as_the_program_says(name: str) -> None:
    case = Case("llama", LLAMA, PLANS[name], "adamw", torch.float32)
    train = case.train()
    said = train.lower(case.batch(0)).memory().arguments
    state = train.init(pfx.random.key(0))
    for _ in range(2):
        assert on_device_0(state.params) == said["parameters"]
        assert on_device_0(state.opt_state) == said["optimizer state"]
        state, _ = train.step(state, case.batch(0))


def test_what_each_stage_of_zero_splits() -> None:
    """Every dim here divides, so stage by stage a quarter of what it splits remains."""
    said = {}
    for zero in range(4):
        case = Case("llama", LLAMA, {"dp": 4, "zero": zero}, "adamw", torch.float32)
        said[zero] = case.train().lower(case.batch(0)).memory().arguments
    scalars = said[0]["optimizer state"] - 2 * said[0]["parameters"]
    assert 0 < scalars < 64
    for zero in range(4):
        state = said[zero]["optimizer state"] - scalars
        assert state == (said[0]["optimizer state"] - scalars) // (4 if zero >= 1 else 1)
        assert said[zero]["parameters"] == said[0]["parameters"] // (4 if zero >= 3 else 1)


@plans
@pytest.mark.parametrize("activations", ["few", "many"])
def test_the_peak_is_what_the_program_says(name: str, activations: str, measure: Any) -> None:
    rows, seq = {"few": (2, 8), "many": (6, 32)}[activations]
    family, sizes = ("llama", LLAMA) if activations == "many" else ("gpt", GPT)
    sizes = {**sizes, "max_seq_len": seq}
    case = Case(family, sizes, PLANS[name], "adamw", torch.float32, rows=rows, seq=seq)
    program, tensors = step_of(case)
    memory = program.memory()
    assert sum(memory.at_peak.values()) == memory.peak
    assert measure(program, tensors).peak == pytest.approx(memory.peak, rel=0.1)


def test_zero_3_holds_one_layer_at_a_time(measure: Any) -> None:
    """What is gathered, and so the peak beyond the state, does not grow with the layers."""

    def beyond_state(num_layers: int, **plan: Any) -> int:
        sizes = {**LLAMA, "num_layers": num_layers, "mlp_dim": 512}
        case = Case("llama", sizes, {"dp": 4, **plan}, "sgd", torch.float32, seq=2)
        program, tensors = step_of(case)
        return measure(program, tensors).peak - sum(program.memory().arguments.values())

    layer = 4 * (3 * 32 * 512 + 2 * 32 * 32 + 2 * 16 * 32)
    grown = beyond_state(12, zero=3) - beyond_state(4, zero=3)
    # The new parameters' updates, a quarter on each device; whole, they would be four times as much.
    assert grown < 8 * layer * 0.6


def init_program(case: Case) -> Program:
    """The program that draws the parameters where they will stay."""
    train = case.train()
    draw = pfx.jit(case.init, mesh=train.mesh, out_specs=train.state_specs.params)
    return draw.lower(pfx.random.key(0))


def test_init_never_holds_a_whole_parameter(measure: Any) -> None:
    """One table dominates the model: each device draws its own eighth of it, and nothing larger."""
    sizes = {**LLAMA, "num_layers": 1, "vocab_size": 8192, "tied": True}
    case = Case("llama", sizes, {"dp": 2, "tp": 4, "zero": 3}, "sgd", torch.float32)
    program = init_program(case)
    ledger = measure(program, [pfx.random.key(0)])
    table = 8192 * 32 * 4
    assert ledger.largest < table // 3  # a shard, or its random bits in 64-bit integers
    assert ledger.peak == pytest.approx(program.memory().peak, rel=0.1)
    assert ledger.peak < table
    whole = Case("llama", sizes, {"dp": 8}, "sgd", torch.float32)
    assert measure(init_program(whole), [pfx.random.key(0)]).largest >= table


def test_the_ledger_forgets() -> None:
    ledger = Ledger()
    x = torch.ones(8)
    ledger.enter(x)
    view, copy = x[:4], x.clone()
    ledger.enter(view)
    ledger.enter(copy)
    assert (ledger.total, ledger.peak, ledger.largest) == (64, 64, 32)
    del x
    assert ledger.total == 64
    del view, copy
    assert ledger.total == 0
