"""Peak bytes per device, read off a program by liveness.

The walk does what a runtime does: a result is allocated, a view is not, a value is freed after its
last reader. Arguments that were not donated stay alive, since the caller still holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pfx.compiler.in_place import taken
from pfx.compiler.ir import (
    Block,
    Compute,
    Instr,
    LoopInstr,
    PipelineInstr,
    Reshard,
    Value,
    is_view,
    last_uses,
)
from pfx.mesh import Mesh


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: at the peak, by role, and the state that goes in.

    Attributes:
        peak: the most bytes alive at once.
        at_peak: those bytes by role: parameters, optimizer state, inputs, gradients, gathered
            copies, activations.
        arguments: bytes of the program's inputs by role.
    """

    peak: int
    at_peak: dict[str, int]
    arguments: dict[str, int]

    def __str__(self) -> str:
        rows = sorted(self.at_peak.items(), key=lambda item: -item[1])
        lines = [f"{name:<18} {size:>14,} B" for name, size in rows if size]
        return "\n".join([*lines, f"{'peak per device':<18} {self.peak:>14,} B"])


@dataclass(eq=False)
class _Storage:
    """A piece of memory and how many names refer to it."""

    size: int
    role: str
    names: int = 0


@dataclass
class _Heap:
    """The bytes alive now, and a picture of the moment when they were most."""

    live: Counter[str] = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)

    def hold(self, storage: _Storage) -> _Storage:
        storage.names += 1
        if storage.names == 1:
            self.total += storage.size
            self.live[storage.role] += storage.size
            if self.total > self.peak:
                self.peak, self.at_peak = self.total, dict(self.live)
        return storage

    def drop(self, storage: _Storage) -> None:
        storage.names -= 1
        if storage.names == 0:
            self.total -= storage.size
            self.live[storage.role] -= storage.size


def memory_of(program: Block) -> Memory:
    """Walk a program and return its memory per device, where stages differ that of the fullest."""
    pipelines = [instr for instr in program.instrs if isinstance(instr, PipelineInstr)]
    counts = [program.mesh.shape[instr.made.axis] for instr in pipelines]
    found = [_on_device(program, device) for device in range(max(counts, default=1))]
    return max(found, key=lambda memory: memory.peak)


def _on_device(program: Block, device: int) -> Memory:
    """The memory of the devices at one place along a pipeline's axis."""
    heap = _Heap()
    arguments: Counter[str] = Counter()
    env: dict[int, _Storage] = {}
    names = program.names or [""] * len(program.inputs)
    for value, name in zip(program.inputs, names, strict=True):
        role = role_of_path(name)
        storage = _Storage(value.local_bytes(program.mesh), role)
        arguments[role] += storage.size
        env[value.number] = heap.hold(storage)
        if value.number not in program.donated:
            heap.hold(storage)  # the caller's own reference
    _walk(program.instrs, program.outputs, env, heap, program.mesh, device)
    return Memory(heap.peak, {k: v for k, v in heap.at_peak.items() if v}, dict(arguments))


def role_of_path(path: str) -> str:
    """The role of a program's input, by where it lies in a train state."""
    if "params" in path:
        return "parameters"
    return "optimizer state" if "opt_state" in path else "inputs"


def _walk(
    instrs: Sequence[Instr],
    outputs: Sequence[Value],
    env: dict[int, _Storage],
    heap: _Heap,
    mesh: Mesh,
    device: int = 0,
) -> None:
    for instr, dead in zip(instrs, last_uses(instrs, outputs), strict=True):
        if isinstance(instr, LoopInstr):
            _loop(instr, env, heap, mesh)
        elif isinstance(instr, PipelineInstr):
            _pipeline(instr, env, heap, mesh, device)
        else:
            for out in instr.outs:
                if out is not None:
                    env[out.number] = heap.hold(_made(instr, out, env, mesh))
        for number in dead:
            if number in env:
                heap.drop(env.pop(number))


def _made(instr: Compute | Reshard, out: Value, env: dict[int, _Storage], mesh: Mesh) -> _Storage:
    """The storage of a result: the operand's own for a view, new otherwise."""
    if isinstance(instr, Reshard):
        views = instr.move.kind in ("slice", "cast") or instr.move.moves_nothing(mesh)
        if views:
            return env[instr.ins[instr.outs.index(out)].number]
        role = "gathered copies" if instr.move.kind == "all_gather" else out.role or "activations"
        return _Storage(out.local_bytes(mesh), role)
    operand = taken(instr, out)
    if operand is not None:
        return env[operand.number]
    if is_view(instr.target) and instr.ins:
        return env[instr.ins[0].number]
    return _Storage(out.local_bytes(mesh), out.role or "activations")


def _loop(instr: LoopInstr, env: dict[int, _Storage], heap: _Heap, mesh: Mesh) -> None:
    """Two iterations stand for all: the first starts from the operands, the second from itself."""
    c, body = instr.num_carry, instr.body
    carry = [heap.hold(env[v.number]) for v in instr.ins[:c]]
    rest = [env[v.number] for v in instr.ins[c:]]
    ys: list[_Storage] = []
    for _ in range(min(instr.length, 2)):
        inner = {v.number: s for v, s in zip(body.inputs[:c], carry, strict=True)}
        inner |= {v.number: heap.hold(s) for v, s in zip(body.inputs[c:], rest, strict=True)}
        _walk(body.instrs, body.outputs, inner, heap, mesh)
        if not ys:
            ys = [_Storage(v.local_bytes(mesh), v.role or "activations") for v in instr.outs[c:]]
            for storage in ys:
                heap.hold(storage)
        carry = [heap.hold(inner[v.number]) for v in body.outputs[:c]]
        _drop_all(inner.values(), heap)
    if not instr.length:
        ys = [heap.hold(_Storage(0, "activations")) for _ in instr.outs[c:]]
    for value, storage in zip(instr.outs, [*carry, *ys], strict=True):
        env[value.number] = storage


def _pipeline(
    instr: PipelineInstr, env: dict[int, _Storage], heap: _Heap, mesh: Mesh, device: int
) -> None:
    """One device's actions in order: what a microbatch leaves stays until its last phase has run."""
    assert instr.schedule is not None
    numbers = [value.number for value in instr.body.inputs]
    operands = {n: env[v.number] for n, v in zip(numbers, instr.ins, strict=True)}
    left: dict[tuple[int, int], dict[int, _Storage]] = {}
    sums: dict[int, _Storage] = {}

    def total(i: int) -> _Storage:
        if i not in sums:
            value = instr.outs[i]
            sums[i] = heap.hold(_Storage(value.local_bytes(mesh), value.role or "activations"))
        return sums[i]

    for action in instr.schedule.devices[device]:
        stage = instr.stages[action.stage]
        phase = stage.phases[action.kind]
        inner = left.pop((action.stage, action.microbatch), {})
        came = stage.receives.get({"I": "B", "W": ""}.get(action.kind, action.kind), ())
        for value in came:
            inner[value.number] = heap.hold(_Storage(value.local_bytes(mesh), "activations"))
        later = stage.needed_after(action.kind)
        kept = {number: heap.hold(s) for number, s in inner.items() if number in later}
        adds = {v.number: total(i) for i, v in phase.adds}
        reads = {v.number for v in phase.block.inputs}
        _drop_all((s for number, s in inner.items() if number not in reads), heap)
        inner = {number: s for number, s in inner.items() if number in reads}
        inner |= {n: heap.hold((adds | operands)[n]) for n in reads - set(inner)}
        _walk(phase.block.instrs, phase.block.outputs, inner, heap, mesh)
        for i, _ in phase.makes:
            total(i)
        kept |= {
            v.number: heap.hold(inner[v.number])
            for v in phase.block.outputs
            if v.number in later and v.number not in kept
        }
        _drop_all(inner.values(), heap)
        if kept:
            left[action.stage, action.microbatch] = kept
    for i, value in enumerate(instr.outs):
        # Elsewhere than at home an addend is zeros that take no memory.
        env[value.number] = sums[i] if i in sums else heap.hold(_Storage(0, value.role))


def _drop_all(storages: Iterable[_Storage], heap: _Heap) -> None:
    for storage in list(storages):
        heap.drop(storage)
