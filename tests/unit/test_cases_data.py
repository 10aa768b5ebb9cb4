"""Inputs that other data pipelines got wrong, each with the right answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pfx.data import (
    Batches,
    ByteTokenizer,
    DataError,
    Documents,
    IndexedDataset,
    IndexedWriter,
    Packed,
    Windows,
    dtype_for,
    preprocess,
)


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


# Splits: keras-team/keras PR #23202, metatensor/metatrain#290, ludwig-ai/ludwig#2368


def documents(folder: Path, count: int, length: int = 4) -> Documents:
    with IndexedWriter(folder / "d", np.uint16) as writer:
        lengths = np.full(count, length)
        writer.add_documents(np.arange(count * length) % 60_000, lengths)
    return Documents.open(folder / "d")


@pytest.mark.parametrize(
    ("count", "fractions", "sizes"),
    [
        (10, "95,5,0", [10, 0, 0]),
        (10, "0.7,0,0.3", [7, 0, 3]),
        (10, "1,1,1", [4, 3, 3]),
        (1, "98,1,1", [1, 0, 0]),
        (1501, "0.8,0.1,0.1", [1201, 150, 150]),
    ],
)
def test_splits_that_round_to_zero(
    tmp_path: Path, count: int, fractions: str, sizes: list[int]
) -> None:
    parts = documents(tmp_path, count).split(fractions)
    assert [len(part) for part in parts] == sizes
    covered = [d for part in parts for d in range(part.first, part.last)]
    assert covered == list(range(count))
    for part in parts:
        if not len(part):
            with pytest.raises(DataError, match=rf'part \d of "{fractions}" .* has no document'):
                Windows(part, 2)


# Resuming in an epoch: huggingface/accelerate#2016 and #1451, verl-project/verl#7401,
# wyim-pgl/transgenic#59, Red-Hat-AI-Innovation-Team/mini_trainer PR #79, allenai/open-instruct PR #681


@pytest.mark.parametrize("stop", [7, 5, 10, 0, 15])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 4)])
def test_resume_within_an_epoch(tmp_path: Path, stop: int, ranks: tuple[int, int]) -> None:
    """20 rows, batches of 4, 3 epochs; 7 batches is in the second epoch, 5 at the first one's end."""
    store = documents(tmp_path, 20, 5)

    def run(first: int, last: int, count: int) -> list[tuple[int, int]]:
        """Each rank with its own objects reads its rows; (step, first token) in the global order."""
        seen = []
        for step in range(first, last):
            for rank in range(count):
                batches = Batches(Packed(store, 4), 4, seed=1)
                rows = slice(rank * 4 // count, (rank + 1) * 4 // count)
                seen += [(step, t) for t in batches(step, rows=rows)["tokens"][:, 0].tolist()]
        return seen

    batches = Batches(Packed(store, 4), 4, seed=1)
    assert batches.size == 20
    uninterrupted = run(0, 15, 1)
    assert run(0, stop, ranks[0]) + run(stop, 15, ranks[1]) == uninterrupted
    for epoch in range(3):
        here = [token for step, token in uninterrupted if step // 5 == epoch]
        assert sorted(here) == list(range(0, 100, 5)), "each row once"
    assert len({tuple(uninterrupted[i : i + 20]) for i in (0, 20, 40)}) == 3
    assert batches.position(7) == (1, 8)
    assert batches.position(5) == (1, 0)
