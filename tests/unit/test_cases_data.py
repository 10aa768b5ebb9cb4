"""Inputs that other data pipelines got wrong, each with the right answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pfx.data import ByteTokenizer, DataError, IndexedDataset, IndexedWriter, dtype_for, preprocess


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["", "ab", ""], ["ab"]),  # NVIDIA/Megatron-LM#62
        (["", "", ""], []),
        ([" ", "\t\n"], [" ", "\t\n"]),
    ],
)
def test_records_without_a_token_are_left_out(
    tmp_path: Path, texts: list[str], kept: list[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts)
    summary = preprocess([path], ByteTokenizer(), tmp_path / "out")
    dataset = IndexedDataset.open(tmp_path / "out")
    assert summary.documents == dataset.num_documents == len(dataset) == len(kept)
    assert summary.empty == len(texts) - len(kept)
    documents = [dataset.document(i).tolist() for i in range(len(kept))]
    assert documents == [[*text.encode(), 256] for text in kept]


@pytest.mark.parametrize(
    ("vocab_size", "ids", "code"),
    [(65536, [0, 65535], 8), (65537, [65536], 4)],  # Megatron-LM PR #604, LLM-Shearing#65
)
def test_ids_at_the_16_bit_boundary(
    tmp_path: Path, vocab_size: int, ids: list[int], code: int
) -> None:
    with IndexedWriter(tmp_path / "d", dtype_for(vocab_size)) as writer:
        writer.add_document(ids)
    assert (tmp_path / "d.idx").read_bytes()[17] == code
    assert IndexedDataset.open(tmp_path / "d")[0].tolist() == ids


def test_an_id_of_17_bits_is_not_wrapped(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="token id 65536 does not fit in uint16"),
        IndexedWriter(tmp_path / "d", np.uint16) as writer,
    ):
        writer.add_document([65536])


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """datalad/datalad#3523, wbolster/jsonlines#53 and #68: a mark, two separators, two line ends."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + '{"text":"a\u2028b"}'.encode()
        + b"\r\n\r\n"
        + '{"text":"c\u0085d"}'.encode()
    )
    summary = preprocess([path], ByteTokenizer(), tmp_path / "out")
    dataset = IndexedDataset.open(tmp_path / "out")
    assert summary.bad_count == 0
    texts = [ByteTokenizer().decode(dataset.document(i)) for i in range(dataset.num_documents)]
    assert texts == ["a\u2028b", "c\u0085d"]
