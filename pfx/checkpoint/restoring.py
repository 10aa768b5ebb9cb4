"""`restore`: a step onto any mesh, each process reading what it holds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pfx import tree
from pfx.array import Array, ShapeDtype
from pfx.checkpoint.boxes import boxes_of, whole
from pfx.checkpoint.directory import Place, manifest_of, name_of, place_of
from pfx.checkpoint.manifest import Leaf, Manifest
from pfx.checkpoint.matching import by_path, form_of, matched
from pfx.checkpoint.reading import PieceId, Shards, Wanted, check, read, room_for
from pfx.checkpoint.saving import wait_for_pending
from pfx.checkpoint.snapshot import mesh_of
from pfx.checkpoint.values import DTYPES, TENSOR_KINDS, decode
from pfx.errors import CheckpointError, message
from pfx.mesh import Mesh
from pfx.runtime import runtime_of
from pfx.runtime.process_world import World, together, world_of
from pfx.spec import (
    Layout,
    distinct_coordinates,
    layout_of,
    local_shape,
    local_slices,
    replicated,
    spec_leaves,
)


def restore(
    directory: str | Path,
    step: int | None = None,
    *,
    like: Any = None,
    mesh: Mesh | None = None,
    specs: Any = None,
    cast: bool = False,
    partial: bool = False,
    world: World | None = None,
) -> Any:
    """Restore a step, onto any mesh, whatever mesh it was saved on.

    Each process reads only the bytes that it holds. Leaves are matched by their path, strictly:
    one that is missing, unexpected, or of another shape or dtype is an error. All that is read is
    checked: where processes read a piece only in parts, one of them reads it once more, whole.

    Args:
        directory: of all steps.
        step: None: the one that `latest` says; every rank gets the same.
        like: a tree of the form to restore: ShapeDtype, tensors, Arrays, numpy arrays, and Python
            values of the right type; values do not matter. None: a dict of all leaves by path.
        mesh: where the tensors of `like` become Arrays. None: they are plain tensors, and Arrays
            lie where those of `like` do.
        specs: a tree of `P` (or a prefix) for `like`; None replicates.
        cast: convert to the dtypes of `like` where others were saved.
        partial: leave unread what is saved and not asked for.
        world: the processes that restore together; None: those of the mesh.

    Raises:
        CheckpointError: on every rank: there is no such step, it is damaged, or it does not hold
            what is asked for, with a line for each leaf.

    >>> import tempfile, pfx
    >>> from pfx import P, ShapeDtype
    >>> from pfx.checkpoint import save
    >>> with tempfile.TemporaryDirectory() as run:
    ...     path = save(run, 1, {"w": torch.arange(4.0)})
    ...     restore(run, like={"w": ShapeDtype((4,))}, mesh=pfx.make_mesh(dp=2), specs=P("dp"))
    {'w': Array(f32[4/dp] on dp=2)}
    """
    path = Path(directory).resolve()
    wait_for_pending(path)
    if world is None:
        world = world_of(mesh_of(like) if mesh is None else mesh)
    place = _decided(path, step, world)
    with together(world, "restore:", CheckpointError):
        found, partly = _restored(place, like, mesh, specs, world.rank, cast=cast, partial=partial)
    if world.size > 1:
        each = world.exchange([list(piece) for piece in partly], "what a restore read in part")
        unchecked = sorted({(file, offset) for pieces in each for file, offset in pieces})
        with together(world, "restore:", CheckpointError):
            _check(place, unchecked[world.rank :: world.size])
    return found


def _decided(directory: Path, step: int | None, world: World) -> Place:
    """The step that rank 0 takes; every other rank must see the same one there."""
    mine: list[Any] = []
    with together(world, "restore:", CheckpointError):
        if world.rank == 0:
            place = place_of(directory, step)
            mine = [place.step, place.again, manifest_of(place).head.nonce]
    number, again, nonce = world.exchange(mine, "the step to restore")[0]
    place = Place(number, again, directory / name_of(number, again))
    with together(world, "restore:", CheckpointError):
        if world.rank and manifest_of(place).head.nonce != nonce:
            what = "is another one than rank 0 sees."
            fix = "give every rank the same directory, on a file system that all share"
            raise CheckpointError(message(str(place.path), what, fix=fix))
    return place


def _restored(
    place: Place, like: Any, mesh: Mesh | None, specs: Any, rank: int, *, cast: bool, partial: bool
) -> tuple[Any, list[PieceId]]:
    """The tree, and the pieces of which only a part was read."""
    manifest = manifest_of(place)
    if like is None:
        plans = [_plan(leaf, None, "") for leaf in manifest.leaves]
        values, partly = _values(place, manifest, plans)
        return by_path(manifest.leaves, values), partly
    pairs, treedef = tree.flatten_with_path(like, is_leaf=_is_none)
    forms = [
        (path, form_of(leaf, f"restore: like{tree.path_string(path)}")) for path, leaf in pairs
    ]
    where = f"restore: {place.path}"
    leaves = matched(forms, manifest.leaves, where, cast=cast, partial=partial)
    homes = _homes(like, pairs, mesh, specs, rank)
    plans = [
        _plan(leaf, home, form.kind, form.dtype)
        for leaf, home, (_, form) in zip(leaves, homes, forms, strict=True)
    ]
    values, partly = _values(place, manifest, plans)
    return tree.unflatten(treedef, values), partly


@dataclass(frozen=True)
class _Home:
    """Where an Array is to lie; `coordinate` is this process's, None where all devices are here."""

    mesh: Mesh
    layout: Layout
    coordinate: Mapping[str, int] | None


def _homes(
    like: Any, pairs: Sequence[Any], mesh: Mesh | None, specs: Any, rank: int
) -> list[_Home | None]:
    """The home of each leaf that becomes an Array."""
    if mesh is None and specs is not None:
        fix = "give the mesh whose axes they name: mesh=plan.mesh()"
        raise CheckpointError(message("restore: specs", "are given without a mesh.", fix=fix))
    given = iter(spec_leaves(specs, like, "restore: specs", "like"))
    found: list[_Home | None] = []
    for path, leaf in pairs:
        spec = None if leaf is None else next(given)
        where = f"restore: like{tree.path_string(path)}"
        if mesh is None and isinstance(leaf, Array):
            found.append(_Home(leaf.mesh, leaf.layout.whole(), leaf.coordinate))
        elif mesh is None or not isinstance(leaf, (Array, ShapeDtype, torch.Tensor)):
            found.append(None)
        else:
            layout = layout_of(spec, leaf.shape, mesh, where).whole()
            found.append(_Home(mesh, layout, _coordinate(mesh, rank)))
    return found


def _coordinate(mesh: Mesh, rank: int) -> Mapping[str, int] | None:
    if mesh.kind == "process":
        return mesh.coordinate(rank)
    return runtime_of(mesh).coordinate  # an abstract mesh has none, and says so


@dataclass(frozen=True)
class _Plan:
    """What is read for one leaf, and what it becomes then."""

    wanted: Sequence[Wanted]
    value: Callable[[], Any]


def _plan(leaf: Leaf, home: _Home | None, kind: str, dtype: torch.dtype | None = None) -> _Plan:
    if leaf.kind not in TENSOR_KINDS:
        return _Plan((), lambda: decode(leaf.kind, leaf.value))
    saved = DTYPES[leaf.dtype]
    cast = lambda part: part if dtype is None else part.to(dtype)
    if home is None:
        out = room_for(leaf.shape, saved)
        as_numpy = (kind or leaf.kind) == "numpy"
        value = lambda: cast(out).numpy() if as_numpy else cast(out)
        return _Plan([Wanted(leaf, whole(leaf.shape), out)], value)
    wanted, parts = _parts(leaf, home, saved)
    array = lambda: Array(
        leaf.shape,
        dtype or saved,
        home.mesh,
        home.layout,
        tuple(_placed(home.mesh, cast(part)) for part in parts),
        home.coordinate,
    )
    return _Plan(wanted, array)


def _parts(leaf: Leaf, home: _Home, dtype: torch.dtype) -> tuple[list[Wanted], list[torch.Tensor]]:
    """The parts of an Array that this process holds, and what is read into them."""
    mesh, layout = home.mesh, home.layout
    places = distinct_coordinates(layout, mesh) if home.coordinate is None else [home.coordinate]
    wanted, parts = [], []
    for place in places:
        index = local_slices(leaf.shape, layout, mesh, place)
        part = room_for(local_shape(leaf.shape, layout, mesh), dtype)
        if not all(isinstance(held, slice) for held in index):
            part.zero_()  # the padding of rows that an axis deals
        parts.append(part)
        for there, here in boxes_of(index):
            out = part
            for dim, (start, stop) in enumerate(here):
                out = out.narrow(dim, start, stop - start)
            wanted.append(Wanted(leaf, there, out))
    return wanted, parts


def _placed(mesh: Mesh, part: torch.Tensor) -> torch.Tensor:
    """A part on this process's device."""
    if mesh.device == "cpu":
        return part
    return runtime_of(mesh).split(part, replicated(part.ndim))[0]


def _values(
    place: Place, manifest: Manifest, plans: Sequence[_Plan]
) -> tuple[list[Any], list[PieceId]]:
    with Shards(place.path, manifest) as shards:
        partly = read(shards, [wanted for plan in plans for wanted in plan.wanted])
    return [plan.value() for plan in plans], partly


def _check(place: Place, pieces: Sequence[PieceId]) -> None:
    manifest = manifest_of(place)
    with Shards(place.path, manifest) as shards:
        check(shards, manifest, pieces)


def _is_none(node: Any) -> bool:
    return node is None
