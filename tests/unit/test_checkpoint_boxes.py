"""The arithmetic of pieces: cutting, tiling, and reading a box out of consecutive bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from pfx.checkpoint import boxes, reading
from pfx.checkpoint.boxes import Box, boxes_of, cut, extents, intersection, tiles, whole, within
from pfx.checkpoint.checksum import ROW, Checksum, checksum
from pfx.checkpoint.manifest import Head, Leaf, Manifest, Piece
from pfx.checkpoint.reading import Shards, Wanted, read
from pfx.checkpoint.values import DTYPES, dtype_text

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = (sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
            for n in shape)  # fmt: skip
    return tuple((start, stop) for start, stop in ends)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@hypothesis.given(SHAPES, st.integers(1, 16), st.integers(1, 9), st.integers(0, 6), st.data())
def test_a_box_is_cut_into_small_pieces_that_tile_it(
    shape: tuple[int, ...], itemsize: int, parts: int, largest: int, data: st.DataObject
) -> None:
    box = data.draw(box_in(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "LARGEST", max(itemsize, 2**largest))
        patch.setattr(boxes, "SMALLEST", 2 * itemsize)
        pieces = cut(box, itemsize, parts)
    assert sorted(i for piece in pieces for i in elements(piece)) == elements(box)
    assert all(boxes.volume(piece) * itemsize <= max(itemsize, 2**largest) for piece in pieces)
    assert tiles([within(piece, box) for piece in pieces], extents(box))


@hypothesis.given(SHAPES, st.data())
def test_tiles_says_what_counting_says(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Pieces that tile, and the same with one moved, doubled or left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "LARGEST", data.draw(st.integers(1, 8)))
        found = cut(whole(shape), 1)
    other = data.draw(box_in(shape))
    change = data.draw(st.sampled_from(["none", "swap", "add", "drop"]))
    if change != "none":
        found = found[data.draw(st.integers(0, 1)) :] if change != "add" else found
        found += [other] if change != "drop" else []
    counts = Counter(i for box in found for i in elements(box))
    once = dict.fromkeys(elements(whole(shape)), 1)
    assert tiles(found, shape) == (counts == once)


def test_tiles_refuses_boxes_outside_and_empty_ones() -> None:
    assert not tiles([((0, 3),)], (2,)) and not tiles([((-1, 2),)], (2,))
    assert not tiles([((0, 0),), ((0, 2),)], (2,)) and not tiles([((2, 0),)], (2,))
    assert tiles([], (0, 3)) and not tiles([((0, 0), (0, 3))], (0, 3))
    assert tiles([()], ()) and not tiles([], ()) and not tiles([(), ()], ())
    deep = [tuple((i, i + 1) for i in index) for index in itertools.product((0, 1), repeat=17)]
    assert not tiles(deep[:2], (2,) * 17)  # more dims than a tiling is checked along


def test_rows_in_any_order_are_runs() -> None:
    assert boxes_of([(4, 5, 0, 2)]) == [
        (((4, 6),), ((0, 2),)), (((0, 1),), ((2, 3),)), (((2, 3),), ((3, 4),))]  # fmt: skip
    assert boxes_of([]) == [((), ())]
    assert boxes_of([()]) == []


def manifest_for(x: torch.Tensor, pieces: list[Box], folder: Path) -> tuple[Manifest, Leaf]:
    """A file with the pieces of a tensor in order, one after the other."""
    stored, found, at = b"", [], 8
    for box in pieces:
        part = x[tuple(slice(*ends) for ends in box)].contiguous()
        data = part.reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append(Piece("00000.bin", at, len(data), checksum(data), box))
        stored, at = stored + data, at + len(data)
    (folder / "00000.bin").write_bytes(b"\xff" * 8 + stored)
    leaf = Leaf((), "tensor", dtype_text(x.dtype), tuple(x.shape), (), tuple(found))
    return Manifest(Head(0, "n", 0, files={"00000.bin": at}), (leaf,)), leaf


@hypothesis.given(
    SHAPES,
    st.sampled_from([torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.complex128]),
    st.sampled_from([0, 5, 4096]),
    st.data(),
)
def test_any_box_is_read_out_of_any_pieces(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gap: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    x = (torch.arange(math.prod(shape)) % 251).reshape(shape).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "LARGEST", data.draw(st.integers(1, 64)))
        patch.setattr(reading, "_GAP", gap)
        manifest, leaf = manifest_for(x, cut(whole(shape), x.itemsize), folder)
        wanted = data.draw(box_in(shape))
        room = torch.zeros([n + 1 for n in extents(wanted)], dtype=dtype)
        contiguous = data.draw(st.booleans())
        out = room[tuple(slice(n) for n in extents(wanted))]
        out = out.clone() if contiguous else out
        with Shards(folder, manifest) as shards:
            read(shards, [Wanted(leaf, wanted, out)])
    assert torch.equal(out, x[tuple(slice(*ends) for ends in wanted)])
    if not gap:  # not a byte more than is wanted
        assert shards.bytes_read == boxes.volume(wanted) * x.itemsize


def test_far_stretches_are_read_one_by_one(tmp_path: Path) -> None:
    """A column block of a matrix with long rows: its bytes and no others."""
    x = torch.randn(16, 4096)
    manifest, leaf = manifest_for(x, [whole(x.shape)], tmp_path)
    out = torch.empty(16, 1024)
    with Shards(tmp_path, manifest) as shards:
        read(shards, [Wanted(leaf, ((0, 16), (1024, 2048)), out)])
    assert torch.equal(out, x[:, 1024:2048]) and shards.bytes_read == out.nbytes


@hypothesis.given(st.binary(max_size=3 * ROW), st.integers(0, 3))
def test_a_checksum_does_not_depend_on_how_it_is_fed(data: bytes, rows: int) -> None:
    fed = Checksum()
    stretch = max(rows * ROW, ROW)
    for start in range(0, len(data), stretch):
        fed.add(np.frombuffer(data[start : start + stretch], np.uint8))
    assert fed.digest() == checksum(data)


@hypothesis.given(st.integers(0, 3 * ROW), st.data())
def test_a_checksum_sees_each_bit_and_where_it_is(length: int, data: st.DataObject) -> None:
    kept = np.random.default_rng(length).integers(0, 256, length + 1, np.uint8)
    changed = kept.copy()
    changed[data.draw(st.integers(0, length))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(kept)
    assert checksum(kept[:-1].copy()) != checksum(kept)  # even if it ends in a zero


def test_a_checksum_sees_blocks_that_have_changed_places() -> None:
    kept = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    for size in (512, 4096, 16384):
        blocks = kept.reshape(-1, size).copy()
        blocks[[0, 1]] = blocks[[1, 0]]
        assert checksum(blocks.reshape(-1)) != checksum(kept)


def test_every_dtype_of_torch_has_a_name_and_a_size_that_is_copied() -> None:
    assert {"float8_e4m3fn", "bfloat16", "uint64", "bool", "complex64"} <= DTYPES.keys()
    assert intersection(((0, 2),), ((2, 3),)) is None
