"""The `.bin` and `.idx` format: byte for byte, and what is said of damaged files."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import DataError, IndexedDataset, IndexedWriter, dtype_for
from pfx.data.indexed import DTYPE_CODES, HEADER, MAGIC

# Two documents, [[1, 2], [3]] and [[65535]], in uint16, written out by hand.
BIN = bytes.fromhex("0100 0200 0300 ffff")
IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, two zeros
    "0100000000000000"  # version
    "08"  # uint16
    "0300000000000000"  # sequences
    "0300000000000000"  # documents + 1
    "02000000 01000000 01000000"  # lengths
    "0000000000000000 0400000000000000 0600000000000000"  # byte offsets
    "0000000000000000 0200000000000000 0300000000000000"  # documents
)


def by_hand(folder: Path, *, bin_bytes: bytes = BIN, idx_bytes: bytes = IDX) -> str:
    (folder / "d.bin").write_bytes(bin_bytes)
    (folder / "d.idx").write_bytes(idx_bytes)
    return str(folder / "d")


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2], [3])
        writer.add_document([65535])
    assert (tmp_path / "d.bin").read_bytes() == BIN
    assert (tmp_path / "d.idx").read_bytes() == IDX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_reads_the_bytes_of_the_format(tmp_path: Path) -> None:
    dataset = IndexedDataset.open(by_hand(tmp_path))
    assert dataset.dtype == np.uint16
    assert [list(dataset[i]) for i in range(len(dataset))] == [[1, 2], [3], [65535]]
    assert dataset.num_documents == 2
    assert [list(dataset.document(i)) for i in range(2)] == [[1, 2, 3], [65535]]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=4), max_size=3), max_size=6)


@given(DOCUMENTS, st.sampled_from(sorted(DTYPE_CODES)))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list, code: int) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "d"
    with IndexedWriter(prefix, DTYPE_CODES[code]) as writer:
        for document in documents:
            writer.add_document(*document)
    dataset = IndexedDataset.open(prefix)
    assert dataset.dtype == DTYPE_CODES[code]
    sequences = [sequence for document in documents for sequence in document]
    assert [list(dataset[i]) for i in range(len(dataset))] == sequences
    joined = [list(itertools.chain(*document)) for document in documents]
    assert [list(dataset.document(i)) for i in range(dataset.num_documents)] == joined
    # Megatron's reader: one buffer at offset 34, no alignment.
    data = Path(f"{prefix}.idx").read_bytes()
    n, m = len(sequences), len(documents) + 1
    assert HEADER.unpack_from(data) == (MAGIC, 1, code, n, m)
    assert list(np.frombuffer(data, "<i4", n, 34)) == [len(s) for s in sequences]
    assert np.frombuffer(data, "<i8", m, 34 + 12 * n)[-1] == n


@given(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=5), max_size=20))
def test_documents_added_together_are_documents_added_alone(
    tmp_path_factory: pytest.TempPathFactory, documents: list
) -> None:
    folder = tmp_path_factory.mktemp("indexed")
    with IndexedWriter(folder / "one", np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    with IndexedWriter(folder / "all", np.uint16) as writer:
        for cut in (documents[:3], documents[3:]):
            tokens = np.array(list(itertools.chain(*cut)), np.int64)
            writer.add_documents(tokens, np.array([len(d) for d in cut], np.int64))
    for suffix in (".bin", ".idx"):
        one, all_ = (folder / f"{name}{suffix}" for name in ("one", "all"))
        assert one.read_bytes() == all_.read_bytes()


def changed(position: int, value: bytes) -> bytes:
    return IDX[:position] + value + IDX[position + len(value) :]


@pytest.mark.parametrize(
    ("idx", "text"),
    [
        (IDX[:20], "it has 20 bytes; the header alone has 34"),
        (changed(0, b"MMAPIDX"), "it begins with b'MMAPIDX"),
        (changed(9, b"\2"), "its version is 2; version 1 can be read"),
        (changed(17, b"\0"), "its dtype code is 0; known are 1 to 8"),
        (changed(18, b"\xff" * 8), "18446744073709551615 sequences"),
        (changed(26, b"\0" * 8), "no entry for the end of the documents"),
        (IDX[:-1], "need 94 bytes; it has 93"),
        (IDX + b"\0", "need 94 bytes; it has 95"),
        (changed(38, b"\xff" * 4), "the length of sequence 1 is -1"),
        (changed(54, b"\5"), "sequence 1 is at byte 5, not at 4 where the one before it ends"),
        (changed(70, b"\1"), "its documents are the sequences from 1 up to 3, not from 0 up to 3"),
        (changed(86, b"\2"), "from 0 up to 2, not from 0 up to 3"),
        (changed(78, b"\7"), "document 1 ends before it begins"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, idx: bytes, text: str) -> None:
    prefix = by_hand(tmp_path, idx_bytes=idx)
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        IndexedDataset.open(prefix)
    assert str(tmp_path / "d.idx") in str(caught.value)


@pytest.mark.parametrize("data", [BIN[:-1], BIN + b"\0", b""])
def test_tokens_of_another_size_are_named(tmp_path: Path, data: bytes) -> None:
    prefix = by_hand(tmp_path, bin_bytes=data)
    with pytest.raises(DataError, match=rf"(?s)d\.bin is damaged.*it has {len(data)} bytes; .* 8"):
        IndexedDataset.open(prefix)


@given(st.data())
def test_no_index_of_other_bytes_is_read_as_something_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A changed byte of the index is found, or it moved only where documents begin."""
    position = data.draw(st.integers(0, len(IDX) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != IDX[position]))
    folder = tmp_path_factory.mktemp("indexed")
    prefix = by_hand(folder, idx_bytes=changed(position, bytes([byte])))
    try:
        dataset = IndexedDataset.open(prefix)
    except DataError as error:
        assert str(folder / "d.") in str(error)
    else:
        at_dtype = position == 17 and byte == 3  # int16, of the same size
        at_document = 78 <= position < 86
        assert at_dtype or at_document
        assert sum(len(dataset.document(i)) for i in range(2)) == 4


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.idx cannot be read: No such file"):
        IndexedDataset.open(tmp_path / "d")
    by_hand(tmp_path)
    (tmp_path / "d.bin").unlink()
    with pytest.raises(DataError, match=r"d\.bin cannot be read: No such file"):
        IndexedDataset.open(tmp_path / "d")


def test_ids_that_do_not_fit_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    for token in (65536, -1):
        with (
            pytest.raises(DataError, match=f"token id {token} does not fit in uint16"),
            IndexedWriter(tmp_path / "d", np.uint16) as writer,
        ):
            writer.add_document([1])
            writer.add_document([token])
        assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    with pytest.raises(
        DataError, match=r"exists\.\n  fix: choose another prefix, or overwrite=True"
    ):
        IndexedWriter(prefix, np.uint16)
    with IndexedWriter(prefix, np.uint8, overwrite=True) as writer:
        assert (tmp_path / "d.idx").read_bytes() == IDX
        writer.add_document([7])
    assert list(IndexedDataset.open(prefix).tokens) == [7]


def test_an_old_index_is_never_beside_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    prefix = by_hand(tmp_path)

    def broken(source: Path, target: Path) -> None:
        raise OSError("power cut")

    writer = IndexedWriter(prefix, np.uint16, overwrite=True)
    writer.add_document([7])
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="power cut"):
        writer.finish()
    with pytest.raises(DataError, match="cannot be read"):
        IndexedDataset.open(prefix)
    monkeypatch.undo()
    writer.discard()


def test_two_runs_do_not_write_the_same_files(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2])
        with pytest.raises(DataError, match="is being written by another run"):
            IndexedWriter(tmp_path / "d", np.uint16)
    assert list(IndexedDataset.open(tmp_path / "d").tokens) == [1, 2]


def test_a_dtype_that_has_no_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dtype uint64 cannot be stored; one of uint8, int8"):
        IndexedWriter(tmp_path / "d", np.uint64)


def test_dtype_of_a_vocabulary() -> None:
    sizes = (1, 257, 65535, 65536, 65537, 2**31)
    assert [dtype_for(n).name for n in sizes] == ["uint16"] * 4 + ["int32"] * 2
