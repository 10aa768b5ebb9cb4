"""Data files, inputs and templates that are not what they should be: an error, and nothing else."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from pfx import cli
from pfx.data import (
    CHATML,
    Batches,
    ByteTokenizer,
    ChatTemplate,
    DataError,
    Documents,
    IndexedDataset,
    IndexedWriter,
    Windows,
    indexed_writer,
    load_chat_template,
    preprocess,
    train_bpe,
)
from pfx.data.chat import ChatEncoder, encode_chat
from pfx.data.chat_template import TemplateFailure
from pfx.data.documents import split_sizes
from pfx.data.indexed import HEADER, MAGIC

EDGES = st.sampled_from([0, 1, 2, 3, -1, 2**63 - 1, -(2**63), 2**62, -(2**62)])


@hypothesis.given(st.lists(EDGES, max_size=4))
def test_document_indices_go_up_whatever_their_differences_overflow_to(tmp_path_factory, inner):
    prefix = tmp_path_factory.mktemp("data") / "a"
    entries = [0, *inner, 2]
    np.arange(4, dtype="<u2").tofile(f"{prefix}.bin")
    parts = [(np.array([2, 2]), "<i4"), (np.array([0, 4]), "<i8"), (np.array(entries), "<i8")]
    index = HEADER.pack(MAGIC, 1, 8, 2, len(entries))
    index += b"".join(array.astype(dtype).tobytes() for array, dtype in parts)
    Path(f"{prefix}.idx").write_bytes(index)
    if entries == sorted(entries):
        assert IndexedDataset.open(prefix).num_documents == len(entries) - 1
    else:
        with pytest.raises(DataError, match="ends before it begins"):
            IndexedDataset.open(prefix)


def test_numbers_that_are_no_integers_are_neither_written_nor_read_as_tokens(tmp_path: Path):
    with (
        pytest.raises(DataError, match="are float64, and would be cut to uint16"),
        IndexedWriter(tmp_path / "a", np.uint16) as writer,
    ):
        writer.add_document([1.5])
    with IndexedWriter(tmp_path / "b", np.float32) as writer:
        writer.add_document([1.5, 2.0], [])
    assert IndexedDataset.open(tmp_path / "b").document(0).tolist() == [1.5, 2.0]
    with pytest.raises(DataError, match="holds float32; token ids are integers"):
        Documents.open(tmp_path / "b")


def test_a_pipe_is_not_taken_for_an_empty_file(tmp_path: Path):
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "hello"}\n')
    os.close(writing)
    with pytest.raises(DataError, match="is no ordinary file"):
        preprocess([f"/dev/fd/{reading}"], ByteTokenizer(), tmp_path / "a")
    os.close(reading)


@hypothesis.given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(0, 10**6))
def test_any_numbers_divide_documents(shares, count):
    hypothesis.assume(sum(shares) > 0)
    exact = [Fraction(str(share)) for share in shares]
    hypothesis.assume(sum(exact) > 0)
    sizes = split_sizes(count, shares)
    assert sum(sizes) == count
    assert all(abs(n - count * x / sum(exact)) < 1 for n, x in zip(sizes, exact, strict=True))


def test_a_writer_that_comes_as_another_ends_does_not_cut_its_file(tmp_path: Path, monkeypatch):
    """It has opened the provisional file, which gets its last name before the lock is free."""
    first = IndexedWriter(tmp_path / "a", np.uint16)
    first.add_document([1, 2, 3])

    def late(file: Any, how: int, lock: Any = indexed_writer.fcntl.flock) -> None:
        first.finish()
        lock(file, how)

    monkeypatch.setattr(indexed_writer.fcntl, "flock", late)
    with pytest.raises(DataError, match="is being written by another run"):
        IndexedWriter(tmp_path / "a", np.uint16)
    assert IndexedDataset.open(tmp_path / "a").document(0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("step", [10**9, 10**12, 10**15])
def test_a_step_far_beyond_has_a_batch(tmp_path: Path, step: int):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(list(range(20)))
    make = lambda: Batches(Windows(Documents.open(tmp_path / "a"), 2), 7)
    assert (make()(step)["tokens"] == make()(step)["tokens"]).all()
    assert (make()(step)["tokens"] != make()(step + 1)["tokens"]).any()


def conversation(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **content}]}


@pytest.mark.parametrize("kind", ["bytes", "file"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"content": "\ud800"}, "half of a surrogate pair"),
        ({"content": [{"type": "text", "text": "x"}]}, "the content of a message is no text"),
        ({"content": None, "tool_calls": [1]}, "the content of a message is no text"),
        ({"content": 5}, "the content of a message is no text"),
    ],
)
def test_odd_messages_are_bad_lines(tmp_path: Path, kind, content, reason):
    tokenizer: Any = ByteTokenizer()
    if kind == "file":
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello hello"}))
        tokenizer = train_bpe([tmp_path / "a.jsonl"], 300, tmp_path / "tokenizer.json")
    encoder = ChatEncoder(tokenizer, ChatTemplate(CHATML), "messages")
    good, bad = encoder.encode([conversation({"content": "yes"}), conversation(content)])
    assert not isinstance(good, str) and isinstance(bad, str) and reason in bad


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% generation %}A{% generation %}B{% endgeneration %}C{% endgeneration %}", "another"),
        ("{% for m in messages %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}", "left"),
        ("{% filter upper %}{% generation %}a{% endgeneration %}{% endfilter %}", "a filter"),
    ],
)  # fmt: skip
def test_marks_that_do_not_pair_leave_nothing_of_themselves_in_the_text(source, reason):
    with pytest.raises(TemplateFailure, match=reason):
        ChatTemplate(source).render([{"role": "user"}])


def test_an_empty_turn_teaches_no_token_around_it(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abab abab"}))
    tokenizer = train_bpe([tmp_path / "a.jsonl"], 300, tmp_path / "tokenizer.json")
    template = ChatTemplate("ab{% generation %}{% endgeneration %}ab")
    tokens, mask = encode_chat([], tokenizer, template)
    assert len(tokens) < 4 and not mask.any()


def test_a_list_of_templates_with_odd_names(tmp_path: Path):
    listed = [{"name": [1], "template": "x"}, 5, {"name": "default", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert load_chat_template(tmp_path).text([]) == "y"


def test_a_file_that_would_become_a_loss_mask_is_not_removed_unasked(tmp_path: Path):
    with IndexedWriter(tmp_path / "a_mask", np.uint8) as writer:
        writer.add_document([1, 0])
    (tmp_path / "a.jsonl").write_text('{"text": "hi"}')
    with pytest.raises(DataError, match="would be taken for the loss mask"):
        preprocess([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "a")
    assert IndexedDataset.open(tmp_path / "a_mask").document(0).tolist() == [1, 0]
    preprocess([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "a", overwrite=True)
    assert Documents.open(tmp_path / "a").mask is None


def test_a_command_that_writes_no_document_does_not_end_well(tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "hi"}')
    command = ["preprocess", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--output"]
    assert cli.main([*command, str(tmp_path / "a")]) == 1
    assert 'no key "text"; it has "body"' in capsys.readouterr().out
    assert cli.main([*command, str(tmp_path / "b"), "--key", "body"]) == 0
    assert cli.main([*command, str(tmp_path / "c"), "--workers", "0"]) == 2
    assert "--workers 0: no number of processes" in capsys.readouterr().err
