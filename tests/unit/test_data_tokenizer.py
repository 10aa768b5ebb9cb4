"""Tokenizers: bytes, files of the `tokenizers` package, and a BPE trained here."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import ByteTokenizer, DataError, FileTokenizer, load_tokenizer, preprocess, train_bpe
from pfx.data.indexed import IndexedDataset

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SENTENCES = ["the cat sat on the mat", "the other cat sat too", "naïve cats: 🐈\u2028 \u0085", ""]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"text": sentence}) for sentence in SENTENCES * 20]
    path.write_text("\n".join([*lines, "{bad", '{"text": 1}']))
    return path


@pytest.fixture(scope="module")
def bpe(corpus: Path) -> FileTokenizer:
    return train_bpe([corpus], 280, corpus.parent / "new" / "tokenizer.json")


@given(TEXT)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text


@given(TEXT)
def test_every_text_round_trips_through_a_trained_bpe(bpe: FileTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert len(ids) <= len(text.encode())
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_a_trained_bpe(bpe: FileTokenizer, corpus: Path) -> None:
    assert bpe.vocab_size == 280
    assert bpe.eod_id == 0
    assert len(bpe.encode("the cat")) < len("the cat") // 2, "frequent words became tokens"
    again = train_bpe([corpus], 280, corpus.parent / "again.json")
    assert Path(again.path).read_bytes() == Path(bpe.path).read_bytes()


def test_a_file_tokenizer_is_the_packages_own(bpe: FileTokenizer) -> None:
    own = tokenizers.Tokenizer.from_file(bpe.path)
    for sentence in SENTENCES:
        assert bpe.encode(sentence).tolist() == own.encode(sentence, add_special_tokens=False).ids
    batch = bpe.encode_batch(SENTENCES)
    assert [ids.tolist() for ids in batch] == [bpe.encode(s).tolist() for s in SENTENCES]


def test_preprocess_stores_what_the_package_gives(
    bpe: FileTokenizer, corpus: Path, tmp_path: Path
) -> None:
    summary = preprocess([corpus], bpe, tmp_path / "out", workers=1)
    own = tokenizers.Tokenizer.from_file(bpe.path)
    dataset = IndexedDataset.open(tmp_path / "out")
    sentences = [sentence for sentence in SENTENCES if sentence] * 20
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    assert documents == [[*own.encode(s, add_special_tokens=False).ids, 0] for s in sentences]
    assert (summary.empty, summary.bad_count) == (20, 2)


def edited(bpe: FileTokenizer, path: Path, **changes: object) -> str:
    content = json.loads(Path(bpe.path).read_text())
    path.write_text(json.dumps({**content, **changes}))
    return str(path)


def test_padding_and_truncation_kept_in_a_file_do_not_apply(
    bpe: FileTokenizer, tmp_path: Path
) -> None:
    own = tokenizers.Tokenizer.from_file(bpe.path)
    own.enable_truncation(3)
    own.enable_padding(length=8)
    own.save(str(tmp_path / "cut.json"))
    cut = load_tokenizer(tmp_path / "cut.json")
    assert cut.encode(SENTENCES[0]).tolist() == bpe.encode(SENTENCES[0]).tolist()


def test_special_tokens_of_a_template_are_not_added(bpe: FileTokenizer, tmp_path: Path) -> None:
    own = tokenizers.Tokenizer.from_file(bpe.path)
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    own.save(str(tmp_path / "bos.json"))
    assert (
        load_tokenizer(tmp_path / "bos.json").encode("the").tolist() == bpe.encode("the").tolist()
    )


def test_the_vocabulary_ends_after_the_largest_id(bpe: FileTokenizer, tmp_path: Path) -> None:
    added = {"id": 999, "content": "</s>", "single_word": False, "lstrip": False}
    added |= {"rstrip": False, "normalized": False, "special": True}
    content = json.loads(Path(bpe.path).read_text())
    path = edited(bpe, tmp_path / "gap.json", added_tokens=[*content["added_tokens"], added])
    size = load_tokenizer(path).vocab_size
    assert size == tokenizers.Tokenizer.from_file(path).token_to_id("</s>") + 1
    assert load_tokenizer(path, eod="</s>").eod_id == size - 1
    assert load_tokenizer(path).eod_id == 0


def test_load_tokenizer(bpe: FileTokenizer, tmp_path: Path) -> None:
    assert load_tokenizer("bytes") == ByteTokenizer()
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(Path(bpe.path).read_bytes())
    loaded = load_tokenizer(folder)
    assert loaded.vocab_size == 280
    again = pickle.loads(pickle.dumps(loaded))
    assert again == loaded
    assert again.encode("the cat").tolist() == bpe.encode("the cat").tolist()


def test_what_is_no_tokenizer(bpe: FileTokenizer, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is no tokenizer: "):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r'byte is no file\.\n  fix: give "bytes" or the path'):
        load_tokenizer("byte")
    with pytest.raises(DataError, match="eod is given by the bytes tokenizer, 256"):
        load_tokenizer("bytes", eod="x")
    with pytest.raises(DataError, match=r'has no token "</s>"\.\n  fix: eod=\'<|endoftext|>\''):
        load_tokenizer(bpe.path, eod="</s>")


def test_what_cannot_be_trained(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab_size is 256; 256 bytes and .* take 257"):
        train_bpe([corpus], 256, tmp_path / "t.json")
    with pytest.raises(DataError, match='hold no text under "body"'):
        train_bpe([corpus], 300, tmp_path / "t.json", key="body")
    assert list(tmp_path.iterdir()) == []
