"""Parameters to safetensors files that other libraries load, one file's worth of memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pfx import tree
from pfx.api import device_get
from pfx.array import Array
from pfx.errors import message
from pfx.interop.hf.config import CONFIG
from pfx.interop.hf.files import DTYPES, INDEX, SINGLE, safe_open
from pfx.interop.hf.problems import WeightsError
from pfx.interop.hf.rows import row
from pfx.interop.hf.table import Leaf, Piece, Table, part_of_token
from pfx.interop.hf.together import together
from pfx.interop.hf.tokenizer import copy_tokenizer
from pfx.mesh import Mesh

GIGABYTE = 2**30


def save_params(
    directory: str | os.PathLike[str],
    params: Any,
    table: Table,
    *,
    config: Mapping[str, Any],
    max_shard_bytes: int = 5 * GIGABYTE,
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> None:
    """Write config.json and safetensors files into a new directory, which appears when complete.

    Law: `load_params` of it returns the same parameters, bit for bit, with zeros as padding. On a
    process mesh every rank calls it, and the first one writes.

    Args:
        directory: must not exist, or be empty.
        params: a tree of Arrays or tensors, as the table describes it.
        config: what config.json says.
        max_shard_bytes: of one file; a tensor that is larger has a file of its own. About as much
            memory is used.
        dtype: what to cast to; None: what the parameters have.
        tokenizer: a directory whose tokenizer files are copied.

    Raises:
        WeightsError: the directory has something in it, or the parameters are not the table's.
    """
    safe_open()
    where, target = f"save({os.fspath(directory)!r}):", Path(directory)
    values = _checked(where, params, table, dtype)
    mesh, writes = _who(values)
    partial = target.parent / f".{target.name}.partial"
    with together(where, mesh):
        if writes:
            _make_empty(where, target, partial)
    plan = _plan(table, values, dtype, max_shard_bytes)
    # Each tensor is gathered by all: an error of the one that writes is raised after the last.
    with together(where, mesh):
        errors = [*_written(plan, values, table, partial, dtype=dtype, writes=writes)]
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
            raise errors[0]
        if writes:
            if tokenizer is not None:
                copy_tokenizer(tokenizer, partial)
            _finish(plan, config, partial, target)


@dataclass(frozen=True)
class _File:
    """A file to be written: its name and its tensors, with the pieces of each."""

    name: str
    tensors: Mapping[str, Sequence[Piece]]
    size: int


def _checked(
    where: str, params: Any, table: Table, dtype: torch.dtype | None
) -> dict[tree.Path, Any]:
    """The parameters by path, once they are those of the table."""
    leaves = tree.match(table.structure(), params, [leaf.path for leaf in table.leaves])
    problems = []
    for leaf, value in zip(table.leaves, leaves, strict=True):
        name = f"params{tree.path_string(leaf.path)}"
        if not isinstance(value, (Array, torch.Tensor)):
            problems.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif tuple(value.shape) != leaf.shape:
            problems.append(
                f"{name} has shape {list(value.shape)}; the model's: {list(leaf.shape)}"
            )
        elif isinstance(value, Array) and value.layout.partial:
            problems.append(f"{name} is an unreduced sum over {', '.join(value.layout.partial)}")
        elif (dtype or value.dtype) not in DTYPES.values():
            problems.append(f"{name} is {dtype or value.dtype}; only floats are written")
    if problems:
        raise WeightsError(message(where, "the parameters are not the model's.", *problems))
    return {leaf.path: value for leaf, value in zip(table.leaves, leaves, strict=True)}


def _who(values: Mapping[tree.Path, Any]) -> tuple[Mesh | None, bool]:
    """The mesh of the parameters, and whether it is this process that writes."""
    arrays = [value for value in values.values() if isinstance(value, Array)]
    if not arrays:
        return None, True
    mesh, coordinate = arrays[0].mesh, arrays[0].coordinate
    return mesh, coordinate is None or mesh.index(coordinate) == 0


def _make_empty(where: str, target: Path, partial: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "there is something already."
        raise WeightsError(message(where, what, fix="a directory that is new or empty"))
    if partial.exists():  # what an interrupted save left
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _plan(
    table: Table, values: Mapping[tree.Path, Any], dtype: torch.dtype | None, most: int
) -> list[_File]:
    """Fill files in order; each begins when a tensor would not fit the one before."""
    groups: list[dict[str, Sequence[Piece]]] = [{}]
    sizes = [0]
    for name, pieces in table.tensors.items():
        first = pieces[0].leaf
        itemsize = (dtype or values[first.path].dtype).itemsize
        size = math.prod(table.shape(first.entry)) * itemsize
        if groups[-1] and sizes[-1] + size > most:
            groups.append({})
            sizes.append(0)
        groups[-1][name] = pieces
        sizes[-1] += size
    count = len(groups)
    names = [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    names = names if count > 1 else [SINGLE]
    return [_File(*each) for each in zip(names, groups, sizes, strict=True)]


def _written(
    plan: Sequence[_File],
    values: Mapping[tree.Path, Any],
    table: Table,
    partial: Path,
    *,
    dtype: torch.dtype | None,
    writes: bool,
) -> Iterator[Exception]:
    """Gather and write each file; yields what went wrong, after which nothing is written."""
    from safetensors.torch import save_file

    for file in plan:
        tensors = {}
        for name, pieces in file.tensors.items():
            gathered = [_gathered(piece, values[piece.leaf.path]) for piece in pieces]
            if writes:
                tensors[name] = _as_stored(pieces, gathered, table, dtype)
        if not writes:
            continue
        try:
            save_file(tensors, partial / file.name, metadata={"format": "pt"})
        except Exception as error:
            writes = False
            yield WeightsError(message(f"{partial / file.name}:", "cannot be written.", str(error)))


def _gathered(piece: Piece, value: Any) -> torch.Tensor:
    """The global value at the piece's position, its dims as the parameter has them."""
    leaf = piece.leaf
    at = [leaf.dims.index(dim) for dim in leaf.stacked]
    if not at:
        return device_get(value) if isinstance(value, Array) else value.detach()
    assert at == list(range(len(at))), f"{leaf.dims}: what is stacked comes first"
    out = row(value, piece.position[0])
    for number in piece.position[1:]:
        out = out[number]
    return out


def _as_stored(
    pieces: Sequence[Piece], gathered: Sequence[torch.Tensor], table: Table, dtype: Any
) -> torch.Tensor:
    """Parts put together in the layout of the files."""
    parts = [_arranged(p.leaf, x, table) for p, x in zip(pieces, gathered, strict=True)]
    entry = pieces[0].leaf.entry
    tokens = entry.flat
    fused = next((i for i, token in enumerate(tokens) if part_of_token(token)), 0)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, fused)
    whole = whole.to("cpu", dtype or whole.dtype)
    return whole.reshape(table.shape(entry)).contiguous()


def _arranged(leaf: Leaf, value: torch.Tensor, table: Table) -> torch.Tensor:
    """A parameter without its padding, a dim for each token of its entry."""
    for dim, name in enumerate(leaf.inner):
        value = value.narrow(dim, 0, table.size(name))
    kept = [token for token in leaf.entry.flat if part_of_token(token) is None]
    value = value.permute([leaf.inner.index(token) for token in kept])
    for i, token in enumerate(leaf.entry.flat):
        value = value.unsqueeze(i) if part_of_token(token) else value
    return value


def _finish(plan: Sequence[_File], config: Mapping[str, Any], partial: Path, target: Path) -> None:
    """Write config.json and the index, and give the directory its name."""
    _write_json(partial / CONFIG, config)
    if len(plan) > 1:
        where = {name: file.name for file in plan for name in file.tensors}
        total = sum(file.size for file in plan)
        _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    mode = (partial / CONFIG).stat().st_mode
    for path in partial.iterdir():
        path.chmod(mode)  # safetensors keeps its files to their owner, whatever the umask says
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.replace(target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
