"""How parameters are called and laid out in the files of another library, as data.

A `Table` is a tree like the parameters whose leaves are lines such as
``"model.layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed"``: the name of a tensor in the
files and its dims, in the logical names by which a model describes its own parameters. Both layouts
being named, the transposition between them, the stack over layers and the parts of fused tensors follow.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pfx import tree
from pfx.errors import message
from pfx.interop.hf.problems import WeightsError

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_PART = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Entry:
    """One line of a table: a name with places for the dims that are stacked here, and the dims.

    >>> Entry.parse("h.{layers}.gate_up.weight: (0/2 mlp) embed")
    Entry(name='h.{layers}.gate_up.weight', dims=(('0/2', 'mlp'), ('embed',)))
    """

    name: str
    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, line: str) -> Entry:
        """Read ``NAME: DIMS``; ``(a b)`` is one dim, the product of two, and ``k/n`` part k of n."""
        name, found, dims = line.partition(": ")
        groups = [tuple((group or one).split()) for group, one in _GROUP.findall(dims)]
        assert found and groups, f"{line!r} is not 'NAME: DIMS'"
        return cls(name, tuple(groups))

    @property
    def flat(self) -> tuple[str, ...]:
        """The dims and parts without their grouping."""
        return tuple(itertools.chain.from_iterable(self.dims))

    @property
    def part(self) -> tuple[int, int]:
        """Which part this is of how many: (0, 1) of a tensor that is not fused."""
        return next(filter(None, map(part_of_token, self.flat)), (0, 1))


def part_of_token(token: str) -> tuple[int, int] | None:
    """The numbers of a part, ``"1/2"``; None for the name of a dim."""
    found = _PART.fullmatch(token)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Leaf:
    """A parameter: where it is in the tree, its dims and shape, and its entry."""

    path: tree.Path
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    entry: Entry

    @cached_property
    def stacked(self) -> tuple[str, ...]:
        """The dims, here, along which the files have tensors of their own."""
        return tuple(dim for dim in self.dims if f"{{{dim}}}" in self.entry.name)

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """The dims of one of those tensors, in the order that they have here."""
        return tuple(dim for dim in self.dims if dim not in self.stacked)


@dataclass(frozen=True)
class Piece:
    """One position along the stacked dims of a leaf: what one tensor of the files holds of it."""

    leaf: Leaf
    position: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the tensor in the files."""
        places = dict(zip(self.leaf.stacked, self.position, strict=True))
        return self.leaf.entry.name.format(**places)


@dataclass(frozen=True)
class Table:
    """Names and layouts of all parameters of one model.

    Args:
        entries: a tree like the parameters, of lines ``"NAME: DIMS"``.
        axes: a tree like the parameters, of their own dims: ``"layers embed heads head_dim"``.
        sizes: the size of each dim here.
        stored: of a dim that is longer here than in the files, its size there. What is beyond is
            padding: zeros when it is read, dropped when it is written.
        prefix: of the names, which the files may lack altogether.
        aliases: other names for a tensor: of two that are there, the values must be equal.
        ignored: regular expressions of names that hold no parameter.

    >>> table = Table(
    ...     {"w": "h.{layers}.w: mlp embed"}, {"w": "layers embed mlp"},
    ...     {"layers": 2, "embed": 3, "mlp": 4})
    >>> table.shapes
    {'h.0.w': (4, 3), 'h.1.w': (4, 3)}
    """

    entries: Any
    axes: Any
    sizes: Mapping[str, int]
    stored: Mapping[str, int] = field(default_factory=dict)
    prefix: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def __post_init__(self) -> None:
        for leaf in self.leaves:
            dims = sorted(token for token in leaf.entry.flat if part_of_token(token) is None)
            where = f"{tree.path_string(leaf.path)}: {leaf.entry}"
            assert dims == sorted(leaf.inner), f"{where} has not the dims {leaf.inner}"
            assert sum(part_of_token(token) is not None for token in leaf.entry.flat) < 2, where

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every parameter, in the order of the tree."""
        pairs, treedef = tree.flatten_with_path(self.axes)
        lines = tree.match(treedef, self.entries, [path for path, _ in pairs])
        return tuple(
            Leaf(
                path,
                tuple(dims.split()),
                tuple(self.sizes[dim] for dim in dims.split()),
                Entry.parse(line),
            )
            for (path, dims), line in zip(pairs, lines, strict=True)
        )

    def structure(self) -> tree.TreeDef:
        """The structure of the tree of parameters."""
        return tree.structure(self.axes)

    def size(self, token: str) -> int:
        """The size, in the files, of a dim; the number of parts of a part."""
        part = part_of_token(token)
        return part[1] if part else self.stored.get(token, self.sizes[token])

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        return tuple(math.prod(map(self.size, group)) for group in entry.dims)

    def pieces(self) -> Iterator[Piece]:
        """Every piece, those of a layer together."""
        each = [
            (position, number, leaf)
            for number, leaf in enumerate(self.leaves)
            for position in itertools.product(*(range(self.size(dim)) for dim in leaf.stacked))
        ]
        return (Piece(leaf, position) for position, _, leaf in sorted(each, key=lambda e: e[:2]))

    @cached_property
    def tensors(self) -> dict[str, list[Piece]]:
        """Every tensor of the files, with the pieces it holds in their order.

        Raises:
            WeightsError: two parameters have one name, or parts of a fused tensor are missing.
        """
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces():
            found.setdefault(piece.name, []).append(piece)
        for name, pieces in found.items():
            pieces.sort(key=lambda piece: piece.leaf.entry.part)
            parts = [piece.leaf.entry.part for piece in pieces]
            if parts != [(k, parts[0][1]) for k in range(parts[0][1])]:
                paths = ", ".join(tree.path_string(piece.leaf.path) for piece in pieces)
                what = "is not made of all its parts, each once."
                raise WeightsError(message(f"table: {name}", what, f"parameters: {paths}"))
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every tensor of the files."""
        return {name: self.shape(pieces[0].leaf.entry) for name, pieces in self.tensors.items()}
