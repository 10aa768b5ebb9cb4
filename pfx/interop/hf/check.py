"""What a table wants against what the files have, before anything is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pfx import tree
from pfx.errors import message
from pfx.interop.hf.files import DTYPES, Stored
from pfx.interop.hf.problems import WeightsError, collapsed
from pfx.interop.hf.table import Table


@dataclass(frozen=True)
class Source:
    """Where a tensor of a table is read from, and its other name in the files if it has two."""

    stored: Stored
    twin: Stored | None = None


def sources(
    where: str, table: Table, stored: Mapping[str, Stored], dtype: torch.dtype | None
) -> dict[str, Source]:
    """Find every tensor of a table.

    Args:
        where: what errors say comes first.
        dtype: what is read is cast to it; None: each parameter has the dtype that it has there.

    Raises:
        WeightsError: tensors are missing, unexpected, of another shape or of a dtype that cannot be
            read or differs between the layers of a parameter. All of them are named.
    """
    _check_counts(where, table, stored)
    names = _Names(table, stored)
    found = {name: source for name in table.tensors if (source := names.source(name)) is not None}
    known = {name for wanted in table.tensors for name in names.all(wanted)}
    ignored = [re.compile(pattern) for pattern in table.ignored]
    extra = [
        name
        for name in stored
        if name not in known and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    missing = [name for name in table.tensors if name not in found]
    problems = [f"missing: {names.described(name)}" for name in collapsed(missing)]
    problems += [f"unexpected: {name}" for name in collapsed(extra)]
    problems += _forms(table, found)
    problems += _mixed(table, found) if dtype is None else []
    if problems:
        fix = "the model's own config.json; a head that is the embedding: tie_word_embeddings"
        raise WeightsError(message(where, "does not hold this model.", *problems, fix=fix))
    return found


@dataclass(frozen=True)
class _Names:
    """The names that the files use for those of a table."""

    table: Table
    stored: Mapping[str, Stored]

    def actual(self, name: str) -> str:
        """The name without the prefix, where no name in the files has it."""
        prefix = self.table.prefix
        if prefix and not any(known.startswith(prefix) for known in self.stored):
            return name.removeprefix(prefix)
        return name

    def all(self, name: str) -> list[str]:
        """The name and its aliases."""
        others = [alias for alias, of in self.table.aliases.items() if of == name]
        return [self.actual(each) for each in (name, *others)]

    def described(self, name: str) -> str:
        """A name with its aliases."""
        return " or ".join(self.all(name))

    def source(self, name: str) -> Source | None:
        """Where a tensor is read from."""
        found = [self.stored[each] for each in self.all(name) if each in self.stored]
        return Source(*found[:2]) if found else None


def _check_counts(where: str, table: Table, stored: Mapping[str, Any]) -> None:
    """Refuse a config with more layers than there are tensors, before their names are made."""
    for leaf in table.leaves:
        count = math.prod(map(table.size, leaf.stacked))
        if count > max(len(stored), 1):
            sizes = ", ".join(f"{table.size(dim):,} {dim}" for dim in leaf.stacked)
            why = f"{tree.path_string(leaf.path)} has {sizes}; the files have {len(stored)} tensors"
            fix = "the model's own config.json"
            raise WeightsError(message(where, "does not hold this model.", why, fix=fix))


def _forms(table: Table, found: Mapping[str, Source]) -> list[str]:
    """Shapes that are not those of the model, dtypes that are no floats, twins of two forms."""
    problems = []
    for name, source in found.items():
        stored, wanted = source.stored, table.shape(table.tensors[name][0].leaf.entry)
        if stored.shape != wanted:
            problems.append(f"{name} has shape {list(stored.shape)}; the model's: {list(wanted)}")
        if stored.dtype not in DTYPES:
            readable = ", ".join(DTYPES)
            problems.append(f"{name} is {stored.dtype}; only {readable} are read")
        twin = source.twin
        if twin and (twin.shape, twin.dtype) != (stored.shape, stored.dtype):
            problems.append(
                f"{name} is there under two names, as {stored.dtype} {list(stored.shape)} and as "
                f"{twin.dtype} {list(twin.shape)}"
            )
    return problems


def _mixed(table: Table, found: Mapping[str, Source]) -> list[str]:
    """Parameters whose layers have different dtypes."""
    dtypes: dict[tree.Path, set[str]] = {}
    for name, source in found.items():
        for piece in table.tensors[name]:
            dtypes.setdefault(piece.leaf.path, set()).add(source.stored.dtype)
    return [
        f"{tree.path_string(path)} is {' and '.join(sorted(found))} by layer; cast with dtype="
        for path, found in dtypes.items()
        if len(found) > 1
    ]
