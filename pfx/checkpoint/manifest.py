"""The manifest of a step: what its tree is, and in which bytes of which file each piece of it lies.

A manifest is read as if a stranger had written it: every size and place in it is checked before
anything is allocated or read by it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pfx.checkpoint.boxes import Box, extents, tiles
from pfx.checkpoint.checksum import checksum
from pfx.checkpoint.values import DTYPES, PYTHON_KINDS, TENSOR_KINDS, decode, pack, unpack
from pfx.errors import CheckpointError, message
from pfx.spec import dtype_name

FORMAT = "pfx checkpoint"
VERSION = 1
ALIGNMENT = 4096  # of each piece in its file
SHARD = re.compile(r"\d{5,}\.bin")
_HEAD = {
    "nonce": (str,),
    "saved": (int,),
    "tier": (str,),
    "metric": (float, type(None)),
    "higher": (bool,),
}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor as consecutive bytes, row-major."""

    file: str
    offset: int
    length: int
    checksum: bytes
    box: Box


@dataclass(frozen=True)
class Leaf:
    """One leaf: a Python value, or a tensor as pieces that tile it.

    Attributes:
        kind: "array", "tensor", "numpy", "int", "float", "bool", "str", "bytes" or "none".
        spec: the mesh axes of each dim, as it was saved; nothing depends on it.
        value: a Python value.
    """

    path: tuple[str, ...]
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()
    pieces: tuple[Piece, ...] = ()
    value: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of a tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype else 0

    def text(self) -> str:
        """``f32[8/dp, 4]``, or the kind of a Python value."""
        if self.kind not in TENSOR_KINDS:
            return self.kind
        axes = self.spec or ((),) * len(self.shape)
        dims = ("/".join((str(n), *names)) for n, names in zip(self.shape, axes, strict=True))
        return f"{dtype_name(DTYPES[self.dtype])}[{', '.join(dims)}]"


@dataclass(frozen=True)
class Head:
    """What is asked of a step without reading its tree.

    Attributes:
        nonce: of the attempt that saved it.
        saved: when, in nanoseconds since 1970.
        metric: what "best" goes by; `higher`: whether more is better.
        files: the size of each shard file in bytes.
    """

    step: int
    nonce: str
    saved: int
    tier: str = "regular"
    metric: float | None = None
    higher: bool = False
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all shard files."""
        return sum(self.files.values())


@dataclass(frozen=True)
class Manifest:
    """All that is known of a step; `mesh` has the axes that it was saved on."""

    head: Head
    leaves: tuple[Leaf, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)
    metadata: Any = None


class Broken(ValueError):
    """What is wrong with a manifest, for an error that names its file."""


def sealed(head: Any, body: Any) -> bytes:
    """Two values as one msgpack map, which says what it is and holds their checksum."""
    first, second = pack(head), pack(body)
    found = {"format": FORMAT, "version": VERSION, "checksum": checksum(first + second)}
    return pack({**found, "head": first, "body": second})


def opened(data: bytes) -> tuple[bytes, bytes]:
    """The two values of `sealed`, still packed.

    Raises:
        Broken: it is something else, of a later version, or not as it was written.
    """
    try:
        found = unpack(data)
    except ValueError as error:
        raise Broken(f"is cut off or damaged ({error}).") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise Broken("is no manifest of a checkpoint.")
    if found.get("version") != VERSION:
        raise Broken(f"has version {found.get('version')!r}; this pfx reads version {VERSION}.")
    first, second = found.get("head"), found.get("body")
    if not isinstance(first, bytes) or not isinstance(second, bytes):
        raise Broken("is damaged.")
    if checksum(first + second) != found.get("checksum"):
        raise Broken("is damaged: its checksum differs.")
    return first, second


def write_manifest(manifest: Manifest) -> bytes:
    """A manifest as bytes."""
    head = manifest.head
    files = sorted(head.files)
    numbers = {name: number for number, name in enumerate(files)}
    sizes = [[name, head.files[name]] for name in files]
    first = {**vars(head), "files": sizes}
    leaves = [_packed_leaf(leaf, numbers) for leaf in manifest.leaves]
    body = {"leaves": leaves, "mesh": dict(manifest.mesh), "metadata": manifest.metadata}
    return sealed(first, body)


def read_head(data: bytes, where: str) -> Head:
    """The head of a manifest.

    Raises:
        CheckpointError: naming `where`, the file.
    """
    return _read(where, lambda: _head(unpack(opened(data)[0])))


def read_manifest(data: bytes, where: str) -> Manifest:
    """A whole manifest, in which everything fits.

    Raises:
        CheckpointError: naming `where`, the file.
    """

    def read() -> Manifest:
        first, second = opened(data)
        head, body = _head(unpack(first)), unpack(second)
        files = sorted(head.files)
        leaves = tuple(_leaf(each, files) for each in body["leaves"])
        _check_places(leaves, head.files)
        if len({leaf.path for leaf in leaves}) < len(leaves):
            raise Broken("has a leaf twice.")
        return Manifest(head, leaves, dict(body["mesh"]), body["metadata"])

    return _read(where, read)


def _read(where: str, read: Any) -> Any:
    try:
        return read()
    except Broken as error:
        raise CheckpointError(message(where, str(error))) from None
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(message(where, "is not a manifest that pfx wrote.", what)) from error


def _head(found: Any) -> Head:
    files = {name: _size(size) for name, size in found.pop("files")}
    for name in files:
        if not isinstance(name, str) or not SHARD.fullmatch(name):
            raise Broken(f"names the file {name!r}, which is no shard.")
    head = Head(**found, files=files)
    for name, kinds in _HEAD.items():
        if type(getattr(head, name)) not in kinds:
            raise Broken(f"has {getattr(head, name)!r} for its {name}.")
    _size(head.step)
    _size(head.saved)
    return head


def _packed_leaf(leaf: Leaf, numbers: Mapping[str, int]) -> Any:
    if leaf.kind not in TENSOR_KINDS:
        return [leaf.path, leaf.kind, leaf.value]
    pieces = [packed_piece(piece, numbers[piece.file]) for piece in leaf.pieces]
    return [leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.spec, pieces]


def packed_piece(piece: Piece, file: int) -> list[Any]:
    """A piece as plain data."""
    return [file, piece.offset, piece.length, piece.checksum, piece.box]


def piece_of(found: Any, files: Sequence[str]) -> Piece:
    """A piece from plain data."""
    file, offset, length, sums, box = found
    if type(file) is not int or not 0 <= file < len(files) or not isinstance(sums, bytes):
        raise Broken("has a piece in no file.")
    ends = tuple((_size(start), _size(stop)) for start, stop in box)
    return Piece(str(files[file]), _size(offset), _size(length), sums, ends)


def _leaf(found: Any, files: Sequence[str]) -> Leaf:
    path, kind = tuple(found[0]), found[1]
    if not all(isinstance(key, str) for key in path):
        raise Broken(f"has a leaf whose path is {path!r}.")
    if kind in PYTHON_KINDS:
        if not isinstance(found[2], bytes):  # of a number, bytes() would make so many zeros
            raise Broken(f"{''.join(path)}: a {kind} that is no bytes.")
        decode(kind, found[2])
        return Leaf(path, kind, value=found[2])
    _, _, dtype, shape, spec, pieces = found
    if kind not in TENSOR_KINDS or dtype not in DTYPES:
        raise Broken(f"{''.join(path)}: this torch has no {kind} of dtype {dtype!r}.")
    shape = tuple(_size(n) for n in shape)
    if not math.prod(shape):  # no piece tells its size, and its strides must fit all the same
        _size(math.prod(max(n, 1) for n in shape))
    spec = tuple(tuple(str(axis) for axis in axes) for axes in spec)
    leaf = Leaf(path, kind, dtype, shape, spec)
    if spec and len(spec) != len(shape):
        raise Broken(f"{''.join(path)}: a spec of {len(spec)} dims for the shape {shape}.")
    return replace(leaf, pieces=tuple(_checked(leaf, piece_of(each, files)) for each in pieces))


def _checked(leaf: Leaf, piece: Piece) -> Piece:
    wanted = math.prod(extents(piece.box)) * DTYPES[leaf.dtype].itemsize
    if len(piece.box) != len(leaf.shape) or piece.length != wanted:
        raise Broken(f"{''.join(leaf.path)}: a piece of {piece.length} bytes for {piece.box}.")
    return piece


def _check_places(leaves: Sequence[Leaf], files: Mapping[str, int]) -> None:
    """Raise unless pieces tile their leaves, and no byte of a file belongs to two of them."""
    for leaf in leaves:
        if leaf.kind in TENSOR_KINDS and not tiles([p.box for p in leaf.pieces], leaf.shape):
            raise Broken(f"{''.join(leaf.path)}: its pieces do not make up the shape {leaf.shape}.")
    places = sorted((p.file, p.offset, p.offset + p.length) for leaf in leaves for p in leaf.pieces)
    end: tuple[str, int] = ("", 0)
    for file, start, stop in places:
        if (file == end[0] and start < end[1]) or stop > files[file]:
            raise Broken(f"puts a piece at bytes {start} to {stop} of {file}, where none fits.")
        end = file, stop


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Broken(f"has {value!r} where a size belongs.")
    return value
