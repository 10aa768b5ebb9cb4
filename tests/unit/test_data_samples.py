"""Windows, packed rows and blends: every token where it belongs, each row once an epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import Blend, DataError, Documents, IndexedWriter, Packed, Windows
from pfx.data.best_fit import best_fit
from pfx.data.blend import interleave, period_counts
from pfx.data.documents import split_sizes
from pfx.data.samples import IGNORED_LABEL

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


def stored(folder: Path, lengths: list[int], *, mask: list[int] | None = None) -> Documents:
    """Documents of the tokens 1, 2, 3, ..., all different, so that a token says where it is from."""
    tokens = np.arange(1, sum(lengths) + 1)
    with IndexedWriter(folder / "d", np.uint16) as writer:
        writer.add_documents(tokens, np.array(lengths, np.int64))
    if mask is not None:
        with IndexedWriter(folder / "d_mask", np.uint8) as writer:
            writer.add_documents(np.array(mask), np.array(lengths, np.int64))
    return Documents.open(folder / "d")


def document_of(lengths: list[int]) -> dict[int, int]:
    """The document of each token."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return {token: int(document) for token, document in enumerate(documents, 1)}


def numbers_of(samples: Any, epoch: int) -> np.ndarray:
    return np.arange(samples.size) + epoch * samples.size


# Windows


@given(LENGTHS, st.integers(1, 6), st.integers(0, 2**63), st.integers(0, 3), st.booleans())
def test_windows_cut_one_sequence_of_all_documents(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    seed: int,
    epoch: int,
    shuffle: bool,
) -> None:
    documents = stored(tmp_path_factory.mktemp("d"), lengths)
    total = sum(lengths)
    if total <= seq_len:
        with pytest.raises(DataError, match=r"needs? |has no document"):
            Windows(documents, seq_len)
        return
    windows = Windows(documents, seq_len, shuffle=shuffle)
    assert windows.size == (total - 1) // seq_len
    numbers = numbers_of(windows, epoch)
    rows, ids = windows.read(seed, numbers), windows.ids(seed, numbers)
    assert sorted(i.sample for i in ids) == list(range(windows.size)), "each row once an epoch"
    assert {i.epoch for i in ids} == {epoch}
    # Joined in the order of the sequence, rows are whole documents one after the other.
    in_order = np.argsort([i.sample for i in ids])
    sequence = rows.tokens[in_order].reshape(-1).tolist()
    last = int(rows.labels[in_order[-1], -1])
    of = document_of(lengths)
    pieces: list[list[int]] = []
    for token in [*sequence, last]:
        if pieces and of[pieces[-1][-1]] == of[token]:
            assert token == pieces[-1][-1] + 1
            pieces[-1].append(token)
        else:
            pieces.append([token])
    starts = np.cumsum(lengths) - lengths
    for piece in pieces[:-1]:
        assert piece[0] - 1 == starts[of[piece[0]]], "a document begins at its first token"
        assert len(piece) == lengths[of[piece[0]]], "and is whole unless it is the last"
    assert len({of[piece[0]] for piece in pieces}) == len(pieces)
    assert rows.labels[in_order].reshape(-1).tolist() == [*sequence[1:], last]
    for tokens, labels, segments, crosses, i in zip(*rows, ids, strict=True):
        found = [of[token] for token in tokens.tolist()]
        numbered = {document: n for n, document in enumerate(dict.fromkeys(found))}
        assert segments.tolist() == [numbered[document] for document in found]
        after = [of[label] for label in labels.tolist()]
        assert crosses.tolist() == [a != b for a, b in zip(found, after, strict=True)]
        assert i.documents == tuple(dict.fromkeys([*found, after[-1]]))
    if not shuffle:
        assert sequence == list(range(1, len(sequence) + 1))
        assert [i.sample for i in ids] == list(range(windows.size))


def test_each_epoch_has_its_own_order(tmp_path: Path) -> None:
    windows = Windows(stored(tmp_path, [7] * 30), 4)
    orders = [
        windows.read(seed, numbers_of(windows, epoch)).tokens.tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    again = Windows(windows.documents, 4).read(0, numbers_of(windows, 1)).tokens.tolist()
    assert again == orders[1], "whatever was read before"


# Packed


def naive_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Item by item, the textbook way."""
    left: list[int] = []
    bins = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = [b for b, space in enumerate(left) if space >= sizes[item]]
        if not fits:
            left.append(capacity)
            fits = [len(left) - 1]
        bins[item] = min(fits, key=lambda b: left[b])
        left[bins[item]] -= sizes[item]
    return bins


@given(st.integers(1, 20).flatmap(lambda c: st.tuples(
    st.lists(st.integers(1, c), min_size=1, max_size=60), st.just(c))))  # fmt: skip
def test_best_fit_is_best_fit(case: tuple[list[int], int]) -> None:
    sizes, capacity = case

    def content(bins: list[int]) -> Counter:
        by_bin: dict[int, list[int]] = {}
        for size, at in zip(sizes, bins, strict=True):
            by_bin.setdefault(at, []).append(size)
        assert sorted(by_bin) == list(range(len(by_bin)))
        return Counter(tuple(sorted(group)) for group in by_bin.values())

    found = content(best_fit(np.array(sizes), capacity).tolist())
    assert found == content(naive_best_fit(sizes, capacity))
    assert all(sum(group) <= capacity for group in found)


def test_a_million_documents_are_packed_at_once() -> None:
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(1 / 300, 1_000_000), 2048)
    bins = best_fit(sizes, 2048)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= 2048
    assert filled.mean() > 0.999 * 2048


@given(LENGTHS, st.integers(1, 6), st.integers(0, 99), st.integers(0, 2), st.booleans())
def test_packed_rows_hold_every_prediction_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    seed: int,
    epoch: int,
    shuffle: bool,
) -> None:
    documents = stored(tmp_path_factory.mktemp("d"), lengths)
    if max(lengths) < 2:
        with pytest.raises(DataError, match="has no document of two tokens"):
            Packed(documents, seq_len)
        return
    packed = Packed(documents, seq_len, pad_id=9999, shuffle=shuffle)
    numbers = numbers_of(packed, epoch)
    rows, ids = packed.read(seed, numbers), packed.ids(seed, numbers)
    of = document_of(lengths)
    counted = rows.labels != IGNORED_LABEL
    firsts = {1 + int(start) for start in np.cumsum(lengths) - lengths}
    every = Counter(token for token in of if token not in firsts)
    assert Counter(rows.labels[counted].tolist()) == every, (
        "each token but a document's first, once"
    )
    assert (rows.labels[counted] == rows.tokens[counted] + 1).all()
    assert (rows.tokens[~counted] == 9999).all(), "all else is padding"
    assert not rows.crosses.any()
    assert sorted(i.sample for i in ids) == list(range(packed.size))
    for tokens, segments, real, i in zip(rows.tokens, rows.segments, counted, ids, strict=True):
        assert (np.diff(real.astype(int)) <= 0).all(), "padding is at the end"
        assert set(np.diff(segments).tolist()) <= {0, 1}
        assert segments[0] == 0
        pieces = [tokens[real & (segments == s)].tolist() for s in np.unique(segments[real])]
        assert tuple(of[piece[0]] for piece in pieces) == i.documents
        for piece in pieces:
            size, at = lengths[of[piece[0]]] - 1, piece[0] - 1
            before = at - int(np.cumsum(lengths)[of[piece[0]]]) + lengths[of[piece[0]]]
            assert before % seq_len == 0, "only a document longer than a row is cut, at whole rows"
            assert len(piece) == min(size - before, seq_len)
    best = naive_best_fit(
        [min(n - 1 - at, seq_len) for n in lengths for at in range(0, n - 1, seq_len)], seq_len
    )
    assert packed.size == max(best) + 1


# Loss masks


@given(LENGTHS, st.integers(1, 6), st.data())
def test_a_mask_takes_labels_away(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    total = sum(lengths)
    bits = st.lists(st.integers(0, 1), min_size=total, max_size=total)
    folder = tmp_path_factory.mktemp("d")
    mask = data.draw(bits)
    documents = stored(folder, lengths, mask=mask)
    assert documents.mask is not None
    whole = Documents(documents.dataset, None, 0, len(lengths), "unmasked")
    for kind in (Windows, Packed):
        try:
            samples, unmasked = kind(documents, seq_len), kind(whole, seq_len)
        except DataError:
            continue
        got = samples.read(3, numbers_of(samples, 0))
        plain = unmasked.read(3, numbers_of(samples, 0))
        learnt = np.array([0, *mask])[np.maximum(plain.labels, 0)] == 1
        assert (got.labels == np.where(learnt, plain.labels, IGNORED_LABEL)).all()
        assert (got.tokens == plain.tokens).all()


def test_a_mask_of_other_documents_is_an_error(tmp_path: Path) -> None:
    stored(tmp_path, [2, 3], mask=[0, 1, 0, 1, 1])
    with IndexedWriter(tmp_path / "d_mask", np.uint8, overwrite=True) as writer:
        writer.add_documents(np.ones(5), np.array([3, 2]))
    with pytest.raises(DataError, match=r"d_mask\.idx has other documents than .*d\.idx"):
        Documents.open(tmp_path / "d")
    with IndexedWriter(tmp_path / "d_mask", np.uint16, overwrite=True) as writer:
        writer.add_documents(np.ones(5), np.array([2, 3]))
    with pytest.raises(DataError, match="is of uint16; a loss mask is of uint8"):
        Documents.open(tmp_path / "d")


# Splits


@given(
    st.integers(0, 10_000),
    st.lists(st.decimals(0, 1000, places=3), min_size=1, max_size=5).filter(any),
)
def test_split_sizes_are_the_shares_rounded(count: int, shares: list) -> None:
    sizes = split_sizes(count, ",".join(map(str, shares)))
    assert sum(sizes) == count
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - count * float(share) / float(sum(shares))) < 1 + 1e-6
        assert size == 0 or share > 0


@given(LENGTHS, st.sampled_from(["98,2,0", "1,1", "0.5,0.25,0.25", "1"]))
def test_parts_share_no_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], text: str
) -> None:
    documents = stored(tmp_path_factory.mktemp("d"), lengths)
    parts = documents.split(text)
    assert len(parts) == len(text.split(","))
    assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])]
    assert parts[-1].last == len(lengths)
    assert sum(part.num_tokens for part in parts) == documents.num_tokens == sum(lengths)
    again = documents.split([float(share) for share in text.split(",")])
    assert [(p.first, p.last) for p in again] == [(p.first, p.last) for p in parts]
    for part in parts:
        if part.num_tokens > 1:
            ids = Windows(part, 1).ids(0, np.arange(3))
            assert {d for i in ids for d in i.documents} <= set(range(part.first, part.last))


@pytest.mark.parametrize("text", ["98,,2", "a", "-1,2", "nan", "1e9", "1,inf", "", "9" * 40])
def test_a_split_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"for a number of at least 0\.\n  fix: \"98,1,1\""):
        stored(tmp_path, [3]).split(text)


def test_a_split_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'0,0' has no part above 0"):
        stored(tmp_path, [3]).split("0,0")


# Blends


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
def test_interleaving_keeps_every_share_at_every_point(counts: list[int]) -> None:
    order = interleave(counts)
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    total = sum(counts)
    taken = np.zeros(len(counts), np.int64)
    for n, source in enumerate(order, 1):
        taken[source] += 1
        # Whole numbers, so exact: |taken - n * count / total| < 1.
        assert (np.abs(taken * total - n * np.array(counts)) < total).all()


WEIGHTS = st.lists(st.decimals(0, 10, places=2), min_size=1, max_size=5).filter(any)


@given(WEIGHTS)
def test_counts_are_the_weights(weights: list) -> None:
    counts = period_counts([float(weight) for weight in weights])
    assert [sum(counts) * weight for weight in weights] == [sum(weights) * c for c in counts]
    assert sum(counts) <= 1000 * 5 * 10


def test_weights_of_a_long_period_are_rounded_to_millionths() -> None:
    weights = [1_000_003, 1, 998_877_665]
    counts = period_counts(weights)
    assert sum(counts) == 1_000_000
    assert counts[1] == 1, "not nothing"
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / 1e6 - weight / sum(weights)) < 3e-6


@given(WEIGHTS, st.integers(0, 150), st.integers(0, 99))
def test_a_blend_is_its_sources_in_turn(
    tmp_path_factory: pytest.TempPathFactory, weights: list, start: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    sources = [Windows(part, 2) for part in stored(folder, [3] * 25).split([1] * 5)]
    sources = sources[: len(weights)]
    blend = Blend(sources, [float(weight) for weight in weights])
    numbers = np.arange(start, start + 20)
    rows, ids = blend.read(seed, numbers), blend.ids(seed, numbers)
    drawn = np.array([i.source for i in blend.ids(seed, np.arange(start + 20))])
    for at, (number, found) in enumerate(zip(numbers, ids, strict=True)):
        place = int((drawn[:number] == found.source).sum())
        alone = sources[found.source]
        assert found == alone.ids(seed, np.array([place]))[0]._replace(source=found.source)
        for part, whole in zip(rows, alone.read(seed, np.array([place])), strict=True):
            assert (part[at] == whole[0]).all()


def test_what_cannot_be_blended(tmp_path: Path) -> None:
    documents = stored(tmp_path, [9, 9])
    two, three = Windows(documents, 2), Windows(documents, 3)
    with pytest.raises(DataError, match="has 2 sources and 1 weights"):
        Blend([two, two], [1.0])
    with pytest.raises(DataError, match="rows of different lengths: 2, 3"):
        Blend([two, three], [1.0, 1.0])
    for weights in ([-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(DataError, match="must be at least 0, and one above"):
            Blend([two, two], weights)


def test_what_cannot_be_cut(tmp_path: Path) -> None:
    documents = stored(tmp_path, [3, 2])
    for kind in (Windows, Packed):
        with pytest.raises(ValueError, match="seq_len is 0"):
            kind(documents, 0)
        with pytest.raises(
            DataError, match=r'part 2 of "1,0" of the 2 documents of .* no document'
        ):
            kind(documents.split("1,0")[1], 2)
    with pytest.raises(DataError, match=r"has 5 tokens; .* need 9\.\n  fix: seq_len=4"):
        Windows(documents, 8)
