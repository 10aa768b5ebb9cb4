"""Runtimes: what runs a program. `runtime_of` picks the one a mesh asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pfx.array import assemble
from pfx.compiler.program import Program
from pfx.errors import MeshError, message
from pfx.mesh import Mesh
from pfx.runtime.simulated import Simulated
from pfx.runtime.timed import Record, Spans, as_if_parallel
from pfx.schedules import Timeline
from pfx.spec import Layout, distinct_coordinates, part_of

Parts = list[torch.Tensor]


class Runtime(Protocol):
    """How a mesh holds values and runs programs."""

    coordinate: Mapping[str, int] | None

    def prepare(
        self,
        program: Program,
        *,
        check: bool,
        deterministic: bool,
        seed: int | None = None,
        record: Record | None = None,
    ) -> Callable[[list[Any]], list[Any]]:
        """Make a program callable on the parts of its inputs.

        Args:
            record: is told when each action of a pipeline started and ended, in seconds.
        """
        ...

    def timeline(self, program: Program, spans: Spans) -> Timeline:
        """The measured run of a program's pipeline, from what `record` was told."""
        ...

    def split(self, tensor: torch.Tensor, layout: Layout) -> Sequence[torch.Tensor]:
        """The parts of a global tensor that this process holds."""
        ...

    def join(
        self, shape: Sequence[int], dtype: Any, layout: Layout, parts: Sequence[Any]
    ) -> torch.Tensor:
        """The global tensor; on a process mesh every rank must call it."""
        ...


class SimulatedRuntime:
    """All devices in this process."""

    coordinate: Mapping[str, int] | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(
        self,
        program: Program,
        *,
        check: bool = False,
        deterministic: bool = False,
        seed: int | None = None,
        record: Record | None = None,
    ) -> Callable[[list[Any]], list[Any]]:
        """Make a program callable; the order of sums is always fixed here."""
        if not check:
            return Simulated(program, seed=seed, record=record)
        return _checked(program, seed, record)

    def timeline(self, program: Program, spans: Spans) -> Timeline:
        """The actions as devices of their own would run them; here they ran one by one."""
        return as_if_parallel(program.pipeline(), spans)

    def split(self, tensor: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """The distinct parts, as tensors of their own."""
        tensor = tensor.detach().to(self.mesh.device)
        places = list(distinct_coordinates(layout, self.mesh))
        if len(places) == 1:
            return [tensor]
        return [part_of(tensor, layout, self.mesh, place).clone() for place in places]

    def join(
        self, shape: Sequence[int], dtype: Any, layout: Layout, parts: Sequence[Any]
    ) -> torch.Tensor:
        """Put the parts together."""
        return assemble(tuple(shape), dtype, layout, self.mesh, tuple(parts))


def _checked(
    program: Program, seed: int | None, record: Record | None
) -> Callable[[list[Any]], list[Any]]:
    """Run every device's copy, assert equal copies, and return the distinct ones."""
    run = Simulated(program, check=True, seed=seed, record=record)

    def checked(inputs: list[Any]) -> list[Any]:
        copies = [
            run.spread(value, parts) for value, parts in zip(program.inputs, inputs, strict=True)
        ]
        inputs.clear()
        outs = run(copies)
        return [
            run.gather(value, parts) for value, parts in zip(program.outputs, outs, strict=True)
        ]

    return checked


def runtime_of(mesh: Mesh) -> Runtime:
    """The runtime of a mesh's kind.

    Raises:
        MeshError: for an abstract mesh, which holds no data.
    """
    if mesh.kind == "simulated":
        return SimulatedRuntime(mesh)
    if mesh.kind == "process":
        from pfx.runtime.process import ProcessRuntime

        return ProcessRuntime(mesh)
    raise MeshError(
        message(
            f"mesh {mesh}",
            "is abstract: it holds no data and runs nothing.",
            fix="use step.lower(...) to read the program, or a simulated mesh to run it",
        )
    )
