"""JSONL to tokens: what is a line, what is bad, and that workers change nothing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import ByteTokenizer, DataError, IndexedDataset, preprocess, progress_bar
from pfx.data.jsonl import chunks, read_chunk

BYTES = ByteTokenizer()
LINE = st.one_of(
    st.text(max_size=8).map(lambda text: json.dumps({"text": text}).encode()),
    st.text(max_size=8).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
    st.sampled_from(
        [b"", b"  ", b"{", b"[1]", b'{"text": 1}', b'{"body": ""}', b"\xff\xfe", b"\r"]
    ),
)
FILE = st.tuples(st.lists(LINE, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.booleans())


def content(file: tuple) -> bytes:
    lines, end, final = file
    return end.join(lines) + (end if final and lines else b"")


def texts(prefix: Path | str) -> list[str]:
    dataset = IndexedDataset.open(prefix)
    documents = [dataset.document(i) for i in range(dataset.num_documents)]
    assert all(document[-1] == 256 for document in documents)
    return [BYTES.decode(document) for document in documents]


def expected(files: list[bytes]) -> tuple[list[str], list[tuple[int, int]], int]:
    """Documents, (file, line) of the bad lines, and empty records, one record at a time."""
    good, bad, empty = [], [], 0
    for index, data in enumerate(files):
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode())["text"]
                assert isinstance(text, str)
                text.encode()
            except (ValueError, KeyError, TypeError, AssertionError):
                bad.append((index, number))
                continue
            good += [text] if text else []
            empty += not text
    return good, bad, empty


@given(st.lists(FILE, min_size=1, max_size=3), st.integers(1, 64))
def test_any_cut_gives_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, files: list, size: int
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    paths = [folder / f"{i}.jsonl" for i in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(content(file))
    good, bad, empty = expected([content(file) for file in files])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfx.data.jsonl.CHUNK_BYTES", size)
        patch.setattr(chunks, "__kwdefaults__", {"size": size})
        patch.setattr("pfx.data.jsonl._SEARCH_BYTES", 3)
        summary = preprocess(paths, BYTES, folder / "out", workers=1)
    assert texts(folder / "out") == good
    assert [(line.file, line.line) for line in summary.bad] == [
        (str(paths[index]), number) for index, number in bad
    ]
    assert (summary.documents, summary.bad_count, summary.empty) == (len(good), len(bad), empty)
    assert summary.tokens == sum(len(text.encode()) + 1 for text in good)


@given(FILE, st.integers(1, 40))
def test_chunks_partition_the_file_at_line_ends(
    tmp_path_factory: pytest.TempPathFactory, file: tuple, size: int
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    data = content(file)
    path.write_bytes(data)
    cut = list(chunks([path], size=size))
    assert b"".join(data[c.offset : c.offset + c.size] for c in cut) == data
    assert all(data[: c.offset].endswith(b"\n") for c in cut[1:])
    for chunk in cut:
        for line in read_chunk(chunk)[0]:
            assert data[line.offset : line.offset + len(line.data)] == line.data


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "no JSON: Expecting property name enclosed in double quotes at character 1"),
        (b'{"text": "\xff"}', "no UTF-8 at byte 10 of the line"),
        (b'["text"]', "a list and not an object"),
        (b'{"body": "x"}', 'no key "text"; it has "body"'),
        (b"{}", 'no key "text"; it has none'),
        (b'{"text": null}', '"text" is a NoneType and not a string'),
        (b'{"text": "\\ud800"}', '"text" holds half of a surrogate pair'),
        (b"[" * 100_000, "no JSON that can be read"),
        (b'{"text": ' + b"9" * 5000 + b"}", "no JSON that can be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "too"}\n')
    summary = preprocess([path], BYTES, tmp_path / "out", workers=1)
    assert texts(tmp_path / "out") == ["fine", "too"]
    assert str(summary.bad[0]).startswith(f"{path}:3: {reason}")
    assert "1 bad lines were left out:\n  " in str(summary)
    with pytest.raises(DataError, match=re.escape(f"{path}:3: {reason}")):
        preprocess([path], BYTES, tmp_path / "stop", workers=1, on_bad="stop")
    assert not list(tmp_path.glob("stop*"))


def test_what_cannot_be_preprocessed(tmp_path: Path) -> None:
    class Endless(ByteTokenizer):
        eod_id = None  # type: ignore[assignment]

    with pytest.raises(DataError, match=r"are none\.\n  fix: give at least one JSONL file"):
        preprocess([], BYTES, tmp_path / "out")
    with pytest.raises(DataError, match=r"missing\.jsonl cannot be read: No such file"):
        preprocess([tmp_path / "missing.jsonl"], BYTES, tmp_path / "out")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        preprocess([tmp_path], BYTES, tmp_path / "out")
    with pytest.raises(DataError, match="has no end-of-document token"):
        preprocess([tmp_path], Endless(), tmp_path / "out")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}')
    with pytest.raises(ValueError, match="on_bad='skip' is neither"):
        preprocess([path], BYTES, tmp_path / "out", on_bad="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers=0 is no number of processes"):
        preprocess([path], BYTES, tmp_path / "out", workers=0)
    preprocess([path], BYTES, tmp_path / "out")
    with pytest.raises(DataError, match="exists"):
        preprocess([path], BYTES, tmp_path / "out")
    assert preprocess([path], Endless(), tmp_path / "bare", append_eod=False).tokens == 1


def test_options(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "xy", "text": 1}\n{"body": ""}\n')
    seen: list[tuple[int, int]] = []
    summary = preprocess(
        [path, path], BYTES, tmp_path / "new" / "out", key="body", append_eod=False,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    dataset = IndexedDataset.open(tmp_path / "new" / "out")
    assert list(dataset.tokens) == [120, 121] * 2
    assert summary.empty == 2
    size = path.stat().st_size
    assert seen == [(size, 2 * size), (2 * size, 2 * size)]
    assert f"2 documents, 4 tokens from {2 * size} bytes in " in str(summary)
    assert "2 empty records were left out" in str(summary)


def big_file(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    words = ["alpha", "be", "gamma ray", "δ", "\u2028"]
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            text = " ".join(rng.choice(words, rng.integers(1, 60)))
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if i % 1000 == 7:
                file.write("{bad\n")
    return path


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "__kwdefaults__", {"size": 1 << 15})
    path = big_file(tmp_path / "a.jsonl", 6_000)
    assert path.stat().st_size > 20 << 15, "more chunks than can wait"
    one = preprocess([path], BYTES, tmp_path / "one", workers=1)
    two = preprocess([path], BYTES, tmp_path / "two", workers=2)
    assert one.bad == two.bad
    assert one.bad_count == 6
    assert one.bad[1].line == 1010, "1008 good lines, a bad one, ..."
    for suffix in (".bin", ".idx"):
        a, b = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
        assert a == b


def peak_bytes(path: Path, prefix: Path) -> int:
    tracemalloc.start()
    preprocess([path], BYTES, prefix, workers=1, overwrite=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "__kwdefaults__", {"size": 1 << 16})
    small = big_file(tmp_path / "small.jsonl", 2_000)
    large = tmp_path / "large.jsonl"
    large.write_bytes(small.read_bytes() * 6)
    assert small.stat().st_size > 4 << 16, "several chunks already"
    peak_bytes(small, tmp_path / "out")
    few, many = (peak_bytes(path, tmp_path / "out") for path in (small, large))
    assert many < 1.2 * few


class Deadly(ByteTokenizer):
    """Ends the process that unpickles it, as the system does to one that takes too much memory."""

    def __reduce__(self) -> tuple:
        return os._exit, (1,)


def test_a_worker_that_dies_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = big_file(tmp_path / "a.jsonl", 10)
    with pytest.raises(DataError, match=r"a worker process, at byte 0 of .*a\.jsonl, died: killed"):
        preprocess([path], Deadly(), tmp_path / "out", workers=2)
    assert list(tmp_path.glob("out*")) == []


def test_the_progress_bar_counts_bytes(tmp_path: Path) -> None:
    rich = pytest.importorskip("rich.console")
    path = big_file(tmp_path / "a.jsonl", 50)
    screen = io.StringIO()
    with progress_bar("reading", console=rich.Console(file=screen, width=100)) as progress:
        preprocess([path], BYTES, tmp_path / "out", progress=progress)
    size = f"{path.stat().st_size / 1024:.1f}"
    assert "reading" in screen.getvalue()
    assert f"{size}/{size} KiB" in screen.getvalue()


KILLED = """
import sys
from pfx.data import ByteTokenizer, preprocess
def progress(done, total):
    print(done, flush=True)
    import time
    time.sleep(60)
preprocess([sys.argv[1]], ByteTokenizer(), sys.argv[2], workers=1, progress=progress, overwrite=True)
"""


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    path = big_file(tmp_path / "a.jsonl", 200)
    prefix = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(path), str(prefix)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert [p.name for p in tmp_path.glob("out*")] == ["out.bin.incomplete"]
    preprocess([path], BYTES, prefix)
    assert len(texts(prefix)) == 200
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.bin", "out.idx"]
