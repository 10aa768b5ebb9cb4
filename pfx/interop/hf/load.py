"""Parameters from safetensors files: each process reads the slices that it keeps, and no others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pfx import tree
from pfx.array import Array, ShapeDtype
from pfx.errors import message
from pfx.interop.hf.check import Source, sources
from pfx.interop.hf.files import DTYPES, stored_tensors
from pfx.interop.hf.problems import WeightsError
from pfx.interop.hf.runs import Runs, count, held, product
from pfx.interop.hf.table import Leaf, Piece, Table, part_of_token
from pfx.interop.hf.together import together
from pfx.mesh import Mesh
from pfx.runtime import runtime_of
from pfx.spec import (
    Layout,
    distinct_coordinates,
    layout_of,
    local_shape,
    local_slices,
    replicated,
    spec_leaves,
)

Index = Sequence[slice | tuple[int, ...]]


def load_params(
    directory: str | os.PathLike[str],
    table: Table,
    *,
    mesh: Mesh | None = None,
    specs: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Read the parameters of a model from the safetensors files of a directory.

    Names, shapes and dtypes are checked before anything is allocated. On a process mesh every rank
    calls it.

    Args:
        directory: has ``model.safetensors``, or several files and their index.
        table: names and layouts.
        mesh: where to put them; None: whole tensors on the CPU.
        specs: a pytree of `P`, or a prefix of one; None replicates.
        dtype: what to cast to; None: what the files have.

    Returns:
        A tree of `Array`, or of tensors without a mesh.

    Raises:
        WeightsError: the files cannot be read, or are not those of this model.
        ShardingError: a spec does not fit its parameter.
    """
    where = f"load({os.fspath(directory)!r}):"
    with together(where, mesh), stored_tensors(Path(directory)) as stored:
        reader = Reader(where, table, sources(where, table, stored, dtype), dtype)
        layouts = _layouts(where, table, mesh, specs)
        values = [
            reader.whole(leaf) if mesh is None else reader.array(leaf, mesh, layout)
            for leaf, layout in zip(table.leaves, layouts, strict=True)
        ]
    return tree.unflatten(table.structure(), values)


def _layouts(where: str, table: Table, mesh: Mesh | None, specs: Any) -> list[Any]:
    if mesh is None:
        return [None] * len(table.leaves)
    shapes = tree.unflatten(table.structure(), [ShapeDtype(leaf.shape) for leaf in table.leaves])
    leaves = spec_leaves(specs, shapes, f"{where} specs", "params")
    return [
        layout_of(spec, leaf.shape, mesh, f"{where} params{tree.path_string(leaf.path)}")
        for spec, leaf in zip(leaves, table.leaves, strict=True)
    ]


@dataclass(frozen=True)
class Reader:
    """Reads parts of parameters."""

    where: str
    table: Table
    sources: Mapping[str, Source]
    dtype: torch.dtype | None

    def whole(self, leaf: Leaf) -> torch.Tensor:
        """A whole parameter."""
        index = [slice(0, size) for size in leaf.shape]
        return self.part(leaf, index, leaf.shape, torch.device("cpu"))

    def array(self, leaf: Leaf, mesh: Mesh, layout: Layout) -> Array:
        """A parameter on a mesh: the parts of this process's devices."""
        runtime = runtime_of(mesh)
        (like,) = runtime.split(torch.empty(0), replicated(1))  # on the device of this process
        shape = local_shape(leaf.shape, layout, mesh)
        here = runtime.coordinate
        places = distinct_coordinates(layout, mesh) if here is None else [here]
        parts = []
        for place in places:
            part = self.part(
                leaf, local_slices(leaf.shape, layout, mesh, place), shape, like.device
            )
            first = all(place[axis] == 0 for axis in layout.partial)
            parts.append(part if first else torch.zeros_like(part))
        return Array(leaf.shape, parts[0].dtype, mesh, layout, tuple(parts), here)

    def part(
        self, leaf: Leaf, index: Index, shape: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """The part of a parameter at an index; padding is zero."""
        runs = {
            dim: held(along, self.table.size(dim))
            for dim, along in zip(leaf.dims, index, strict=True)
        }
        full = all(count(runs[dim]) == size for dim, size in zip(leaf.dims, shape, strict=True))
        make = torch.empty if full else torch.zeros
        out = make(tuple(shape), dtype=self.dtype_of(leaf), device=device)
        inner = [slice(0, count(runs[dim])) for dim in leaf.inner]
        for local, piece in _held_pieces(leaf, runs):
            here: list[Any] = [slice(None)] * len(shape)
            for dim, number in zip(leaf.stacked, local, strict=True):
                here[leaf.dims.index(dim)] = number
            out[tuple(here)][tuple(inner)].copy_(self.tensor(piece, runs))
        return out

    def dtype_of(self, leaf: Leaf) -> torch.dtype:
        """The dtype that a parameter gets."""
        name = Piece(leaf, (0,) * len(leaf.stacked)).name
        return self.dtype or DTYPES[self.sources[name].stored.dtype]

    def tensor(self, piece: Piece, runs: Mapping[str, Runs]) -> torch.Tensor:
        """The held part of one tensor of the files, its dims as the parameter has them."""
        tokens = piece.leaf.entry.flat
        along = [self.runs_of(token, runs) for token in tokens]
        cuts = iter(zip(along, map(self.table.size, tokens), strict=True))
        groups = [product([next(cuts) for _ in group]) for group in piece.leaf.entry.dims]
        blocks = self.read(piece.name, groups)
        split = blocks.reshape([count(found) for found in along])
        kept = [token for token in tokens if part_of_token(token) is None]
        split = split.reshape([count(runs[token]) for token in kept])  # a part is one of its dim
        return split.permute([kept.index(dim) for dim in piece.leaf.inner])

    def runs_of(self, token: str, runs: Mapping[str, Runs]) -> Runs:
        """The runs along a dim, or along the parts of a fused tensor."""
        part = part_of_token(token)
        return [(part[0], 1)] if part else runs[token]

    def read(self, name: str, groups: Sequence[Runs]) -> torch.Tensor:
        """Read all rows that runs along each dim name."""
        source = self.sources[name]
        value = _read(source.stored, groups)
        if source.twin is not None:
            other = _read(source.twin, groups)
            if not torch.equal(value.view(torch.uint8), other.view(torch.uint8)):
                raise WeightsError(
                    message(
                        f"{self.where} {name}",
                        "is there under two names, with different values.",
                        "config.json says that they are one parameter",
                        fix="the config.json of these files, or remove one of the two tensors",
                    )
                )
        return value


def _held_pieces(leaf: Leaf, runs: Mapping[str, Runs]) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Each piece that a part has something of, with its position in the part."""
    rows = [
        list(enumerate(row for first, n in runs[dim] for row in range(first, first + n)))
        for dim in leaf.stacked
    ]
    if all(count(runs[dim]) for dim in leaf.inner):
        for chosen in itertools.product(*rows):
            yield tuple(local for local, _ in chosen), Piece(leaf, tuple(row for _, row in chosen))


def _read(stored: Any, groups: Sequence[Runs]) -> torch.Tensor:
    """The blocks where runs meet, put together; a single one stays a view of the file."""
    if all(len(found) == 1 for found in groups):
        return stored.read([slice(first, first + n) for ((first, n),) in groups])
    dim = next(dim for dim, found in enumerate(groups) if len(found) > 1)
    each = [[*groups[:dim], [run], *groups[dim + 1 :]] for run in groups[dim]]
    return torch.cat([_read(stored, one) for one in each], dim)
