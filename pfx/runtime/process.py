"""The runtime of a process mesh: one process a device, started by torchrun.

Every process runs the same script. What ranks would wait for each other for is agreed on first (see
`pfx.runtime.fingerprint`), so that a missing or different rank is an error that names it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pfx.compiler.deals import emit_move
from pfx.compiler.ir import Instr, Value
from pfx.compiler.program import Program
from pfx.compiler.reshard import plan_moves
from pfx.errors import MeshError, message
from pfx.mesh import Mesh
from pfx.runtime import device, process_start
from pfx.runtime.executor import Executor
from pfx.runtime.fingerprint import agree
from pfx.runtime.process_channels import channels_of
from pfx.runtime.process_group import group_of
from pfx.runtime.process_spans import shared_spans
from pfx.runtime.timed import Record, Spans, as_it_was
from pfx.schedules import Timeline
from pfx.spec import Layout, part_of, replicated

Parts = list[torch.Tensor]


class ProcessRuntime:
    """This process's device of a mesh: every value is a list of one part.

    Args:
        mesh: its devices are the ranks, row-major.
        timeout: seconds that ranks wait for each other; None for PFX_TIMEOUT, or else 60 at a
            meeting and 600 in a collective.

    Raises:
        MeshError: when no launcher started this process, or as many processes as the mesh has
            devices do not run.
    """

    def __init__(self, mesh: Mesh, *, timeout: float | None = None) -> None:
        self.mesh, self.wanted = mesh, timeout
        self.ranks = process_start.ranks(mesh)
        self.timeout = process_start.seconds(timeout, process_start.MEETING)
        self.patience = process_start.seconds(timeout, process_start.COLLECTIVE)
        self.coordinate: Mapping[str, int] | None = self.ranks.coordinate(mesh)

    def prepare(
        self,
        program: Program,
        *,
        check: bool = False,
        deterministic: bool = False,
        seed: int | None = None,
        record: Record | None = None,
    ) -> Callable[[list[Any]], list[Any]]:
        """Make a program callable on lists of one part each.

        The first call compares the program with that of every other rank, and makes the groups.

        Raises:
            MeshError: for check=True, which needs the other devices' copies.
        """
        if seed is not None:
            raise MeshError(
                message(
                    f"process mesh {self.mesh}:",
                    "seed= draws an order of one process's actions; here each has its own.",
                    fix='drop seed=, or make_mesh(..., kind="simulated")',
                )
            )
        if check:
            raise MeshError(
                message(
                    f"process mesh {self.mesh}:",
                    "check=True needs every device's copy.",
                    fix='drop check=True, or make_mesh(..., kind="simulated")',
                )
            )
        return _Prepared(self, program, record, deterministic=deterministic)

    def timeline(self, program: Program, spans: Spans) -> Timeline:
        """What each device along the pipeline's axis did when; every rank calls it and gets all."""
        instr, patience = program.pipeline(), self.patience
        store = process_start.start(self.mesh, self.ranks, self.timeout, patience)
        here = self.ranks.coordinate(self.mesh)
        everyone = shared_spans(store, self.mesh, instr.made.axis, here, spans, patience)
        return as_it_was(instr, everyone)

    def split(self, tensor: torch.Tensor, layout: Layout) -> Parts:
        """This process's part of a global tensor, which is the same on every rank."""
        device.select(self.mesh.device, self.ranks.local)
        tensor = tensor.detach()
        if self.mesh.count(layout.axes) > 1:
            here = self.ranks.coordinate(self.mesh)
            tensor = part_of(tensor, layout, self.mesh, here).clone()
        return [tensor.to(self.mesh.device)]

    def join(
        self, shape: Sequence[int], dtype: Any, layout: Layout, parts: Sequence[Any]
    ) -> torch.Tensor:
        """The global tensor; every rank calls it and gets it."""
        if self.mesh.count(layout.axes) == 1:
            return parts[0].clone()  # the array's own memory may be donated, and overwritten, later
        ((whole,),) = _gathering(self.mesh, tuple(shape), dtype, layout, self.wanted)([[*parts]])
        return whole


class _Prepared:
    """A program that agrees with the other ranks on its first call, and then runs."""

    def __init__(
        self,
        runtime: ProcessRuntime,
        program: Program,
        record: Record | None = None,
        *,
        deterministic: bool,
    ) -> None:
        self.runtime, self.program, self.deterministic = runtime, program, deterministic
        self.record = record
        self.executor: Executor | None = None

    def __call__(self, inputs: list[Parts]) -> list[Parts]:
        """Run on lists of one part each; empties them, so that parts can be freed."""
        if self.executor is None:
            self.executor = self.start()
        parts = [value.pop() for value in inputs]
        inputs.clear()
        return [[part] for part in self.executor(parts)]

    def start(self) -> Executor:
        """Agree on the program, then make its groups."""
        runtime, mesh = self.runtime, self.runtime.mesh
        store = process_start.start(mesh, runtime.ranks, runtime.timeout, runtime.patience)
        plans = [str(instr.schedule) for instr in self.program.pipelines()]
        shown = (
            f"mesh {mesh}{mesh.deals or ''}",
            f"deterministic {self.deterministic}{', timed' if self.record else ''}",
            self.program.text(),
            *plans,
        )
        ranks, where = runtime.ranks, f"process mesh {mesh}:"
        agree(
            store,
            "program",
            "\n".join(shown),
            rank=ranks.rank,
            size=ranks.size,
            timeout=runtime.timeout,
            where=where,
        )
        here, wait = runtime.ranks.coordinate(mesh), runtime.patience
        group = lambda axes, groups: group_of(mesh, axes, here, mesh.device, wait, groups)
        channels = lambda axis, pairs: channels_of(mesh, axis, here, wait, pairs)
        return Executor(
            self.program,
            here,
            group,
            deterministic=self.deterministic,
            channels=channels,
            record=self.record,
        )


@functools.lru_cache(maxsize=1024)
def _gathering(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, timeout: float | None
) -> Callable[[list[Any]], list[Any]]:
    """A program that gathers a value on every rank."""
    value = Value(0, shape, dtype, layout)
    now = value
    instrs: list[Instr] = []
    numbers = itertools.count(1)
    for move in plan_moves(layout, replicated(len(shape))):
        instrs += emit_move(now, move, mesh, numbers.__next__, reason="device_get")
        (after,) = instrs[-1].outs
        assert after is not None
        now = after
    program = Program(mesh, [value], [now], instrs)
    return ProcessRuntime(mesh, timeout=timeout).prepare(program)
