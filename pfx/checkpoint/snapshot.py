"""What of a tree this process writes, and where in its file.

A shard is cut into pieces by global index. What several processes hold is written once, each of
them taking its turn among the pieces: which are whose follows from the layout alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pfx import tree
from pfx.array import Array
from pfx.checkpoint.boxes import Box, boxes_of, cut, volume, whole, within
from pfx.checkpoint.manifest import ALIGNMENT, Leaf
from pfx.checkpoint.values import dtype_text, encode, plain_tensor, python_kind
from pfx.errors import CheckpointError, message
from pfx.mesh import Mesh
from pfx.runtime.process_world import World
from pfx.runtime.resharding import resharded


@dataclass(frozen=True)
class Source:
    """A piece to be written: of which leaf, which box, where it goes, and its elements.

    Attributes:
        nbytes: without the padding up to the next piece.
        data: None once the elements have been copied to their place.
    """

    leaf: int
    box: Box
    offset: int
    nbytes: int
    data: torch.Tensor | None


@dataclass
class Contents:
    """A tree as leaves without their pieces, and the pieces that this process writes.

    Attributes:
        size: the bytes of this process's file.
    """

    leaves: list[Leaf] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    size: int = 0
    mesh: Mapping[str, int] = field(default_factory=dict)

    def without_data(self) -> Contents:
        """The same without any reference to a tensor."""
        return replace(self, sources=[replace(source, data=None) for source in self.sources])

    def lines(self) -> list[str]:
        """One line for each leaf that is the same on every rank."""
        return [f"{tree.path_string(leaf.path)}: {leaf.text()} {leaf.value or ''}"
                for leaf in self.leaves]  # fmt: skip


def digest(lines: list[str]) -> bytes:
    """A hash of lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).digest()


def mesh_of(value: Any) -> Mesh | None:
    """The mesh of the first Array of a tree; one of processes before a simulated one."""
    meshes = [leaf.mesh for leaf in tree.leaves(value) if isinstance(leaf, Array)]
    return min(meshes, key=lambda mesh: mesh.kind != "process", default=None)


def contents_of(value: Any, world: World) -> Contents:
    """List what is in a tree and what of it this process writes; nothing is copied.

    Raises:
        CheckpointError: a leaf cannot be saved, naming its path.
    """
    pairs, _ = tree.flatten_with_path(value, is_leaf=lambda node: node is None)
    mesh = mesh_of(value)
    found = Contents(mesh=dict(mesh.shape) if mesh else {})
    for number, (path, leaf) in enumerate(pairs):
        kind = python_kind(leaf)
        if kind is not None:
            found.leaves.append(Leaf(path, kind, value=encode(kind, leaf)))
            continue
        where = f"save: {tree.path_string(path) or 'the tree'}"
        record, parts = _tensor(path, leaf, world, where)
        found.leaves.append(record)
        for box, data in _own(parts, number):
            nbytes = data.numel() * data.itemsize
            found.sources.append(Source(number, box, found.size, nbytes, data))
            found.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if len({leaf.path for leaf in found.leaves}) < len(found.leaves):
        what = "has two leaves with one path: keys of a dict that print alike."
        raise CheckpointError(message("save: the tree", what))
    return found


@dataclass(frozen=True)
class _Part:
    """A box that this process holds, with its elements; it is copy `copy` of `copies`."""

    box: Box
    data: torch.Tensor
    copy: int
    copies: int


def _tensor(path: tree.Path, leaf: Any, world: World, where: str) -> tuple[Leaf, list[_Part]]:
    if isinstance(leaf, Array):
        if not leaf.parts:
            raise CheckpointError(
                message(
                    where, "was donated to a step: it is gone.", fix="save what the step returned"
                )
            )
        leaf = resharded(leaf, leaf.layout.whole())  # sums that the devices still owe are added up
        spec = tuple(tuple(axes) for axes in leaf.layout.dims)
        record = Leaf(path, "array", dtype_text(leaf.dtype), tuple(leaf.shape), spec)
        return record, list(_parts(leaf, world))
    kind = "tensor" if isinstance(leaf, torch.Tensor) else "numpy"
    data = plain_tensor(leaf, where)
    shape = tuple(data.shape)
    record = Leaf(path, kind, dtype_text(data.dtype), shape)
    return record, [_Part(whole(shape), data, world.rank, world.size)]


def _parts(array: Array, world: World) -> Iterator[_Part]:
    """The boxes of an array that this process holds."""
    mesh, copy, copies = array.mesh, world.rank, world.size
    if array.coordinate is not None:
        others = tuple(axis for axis in mesh.axis_names if axis not in array.layout.axes)
        copy, copies = mesh.index(array.coordinate, others), mesh.count(others)
    for shard in array.shards:
        for there, here in boxes_of(shard.index):
            yield _Part(there, _narrowed(shard.data, here), copy, copies)


def _own(parts: list[_Part], number: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """The pieces that are this process's to write; `number` lets small leaves take turns."""
    for part in parts:
        if not volume(part.box):
            continue
        for turn, box in enumerate(cut(part.box, part.data.itemsize, part.copies)):
            if (turn + number) % part.copies == part.copy:
                yield box, _narrowed(part.data, within(box, part.box))


def _narrowed(data: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, stop) in enumerate(box):
        data = data.narrow(dim, start, stop - start)
    return data.detach()
