"""A batch is a function of the seed and the step: whoever asks, however it is cut, whenever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import Batches, Blend, DataError, Documents, IndexedWriter, Packed, Windows
from pfx.data.samples import IGNORED_LABEL

LENGTHS = [5, 1, 9, 4, 0, 30, 2, 7, 11, 3]


def stored(folder: Path) -> Documents:
    if not (folder / "d.idx").exists():
        with IndexedWriter(folder / "d", np.int32) as writer:
            writer.add_documents(np.arange(sum(LENGTHS)), np.array(LENGTHS))
    return Documents.open(folder / "d")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return stored(tmp_path_factory.mktemp("d"))


def samples_of(documents: Documents, kind: str, seq_len: int = 4) -> Any:
    if kind == "blend":
        first, second = documents.split("1,1")
        return Blend([Windows(first, seq_len), Packed(second, seq_len)], [0.7, 0.3])
    return {"windows": Windows, "packed": Packed}[kind](documents, seq_len)


KIND = st.sampled_from(["windows", "packed", "blend"])
FLAGS = st.fixed_dictionaries(
    {flag: st.booleans() for flag in ("reset_positions", "block_diagonal", "mask_boundaries")}
)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(KIND, st.integers(1, 9), st.integers(0, 2**64 - 1), FLAGS, st.permutations(range(12)))
def test_a_batch_depends_on_seed_and_step_alone(
    documents: Documents, kind: str, size: int, seed: int, flags: dict, order: list[int]
) -> None:
    """Read in any order, from fresh objects, whole or a few rows at a time."""
    batches = Batches(samples_of(documents, kind), size, seed=seed, **flags)
    read = {step: batches(step) for step in order}
    fresh = Batches(samples_of(documents, kind), size, seed=seed, **flags)
    for step in range(12):
        assert same(fresh(step), read[step])
        assert fresh.ids(step) == batches.ids(step)
        parts = [fresh(step, rows=slice(i, i + 2)) for i in range(0, size, 2)]
        names = read[step].keys()
        joined = {name: torch.cat([part[name] for part in parts]) for name in names}
        assert same(joined, read[step])
    for name, value in read[0].items():
        assert value.dtype == torch.int64, name
        assert value.shape == (size, 4), name


@given(KIND, FLAGS, st.integers(0, 50))
def test_what_a_batch_holds(documents: Documents, kind: str, flags: dict, step: int) -> None:
    samples = samples_of(documents, kind)
    batch = Batches(samples, 3, seed=5, **flags)(step)
    rows = samples.read(5, np.arange(3 * step, 3 * step + 3))
    keys = {"tokens", "labels"}
    keys |= {"positions"} if flags["reset_positions"] else set()
    keys |= {"segments"} if flags["block_diagonal"] else set()
    assert batch.keys() == keys
    assert (batch["tokens"].numpy() == rows.tokens).all()
    for row in range(3):
        for at in range(4):
            label = batch["labels"][row, at]
            masked = flags["mask_boundaries"] and rows.crosses[row, at]
            assert label == (IGNORED_LABEL if masked else rows.labels[row, at])
            if "positions" in batch:
                segment = rows.segments[row]
                assert batch["positions"][row, at] == (segment[:at] == segment[at]).sum()
            if "segments" in batch:
                assert batch["segments"][row, at] == rows.segments[row, at]


@given(st.sampled_from(["windows", "packed"]), st.integers(1, 40), st.integers(0, 9))
def test_wrapped_batches_hold_each_row_once_an_epoch(
    documents: Documents, kind: str, size: int, seed: int
) -> None:
    batches = Batches(samples_of(documents, kind), size, seed=seed)
    assert batches.size is not None
    steps = -(-3 * batches.size // size)
    ids = [i for step in range(steps) for i in batches.ids(step)][: 3 * batches.size]
    for epoch in range(3):
        here = ids[epoch * batches.size : (epoch + 1) * batches.size]
        assert {i.epoch for i in here} == {epoch}
        assert sorted(i.sample for i in here) == list(range(batches.size))
    for step in range(steps):
        epoch, consumed = batches.position(step)
        assert epoch * batches.size + consumed == step * size


@given(st.sampled_from(["windows", "packed"]), st.integers(1, 15), st.sampled_from(["drop", "pad"]))
def test_dropped_and_padded_batches_keep_to_an_epoch(
    documents: Documents, kind: str, size: int, last: Any
) -> None:
    samples = samples_of(documents, kind)
    if last == "drop" and size > samples.size:
        with pytest.raises(DataError, match=f"is more than the {samples.size} rows of an epoch"):
            Batches(samples, size, last=last)
        return
    batches = Batches(samples, size, last=last)
    whole, rest = divmod(samples.size, size)
    assert batches.steps_per_epoch == (whole if last == "drop" else whole + (rest > 0))
    for step in range(2 * batches.steps_per_epoch):
        epoch, consumed = batches.position(step)
        assert (epoch, consumed // size) == divmod(step, batches.steps_per_epoch)
        ids, batch = batches.ids(step), batches(step)
        assert {i.epoch for i in ids} == {epoch}
        expected = samples.read(0, epoch * samples.size + consumed + np.arange(len(ids)))
        assert (batch["labels"][: len(ids)].numpy() == expected.labels).all()
        assert (batch["labels"][len(ids) :] == IGNORED_LABEL).all()
        is_last = step % batches.steps_per_epoch == batches.steps_per_epoch - 1
        assert len(ids) == (rest if is_last and rest and last == "pad" else size)
        assert same(
            batches(step, rows=slice(size - 1, None)), {k: v[-1:] for k, v in batch.items()}
        )
    epoch = [i.sample for step in range(batches.steps_per_epoch) for i in batches.ids(step)]
    assert len(set(epoch)) == len(epoch) == (whole * size if last == "drop" else samples.size)


def test_what_is_no_batch(documents: Documents) -> None:
    windows, blend = samples_of(documents, "windows"), samples_of(documents, "blend")
    with pytest.raises(ValueError, match="batch_size is 0"):
        Batches(windows, 0)
    with pytest.raises(ValueError, match="step -1 is below 0"):
        Batches(windows, 1)(-1)
    with pytest.raises(ValueError, match="last is 'keep'; it is one of wrap, drop, pad"):
        Batches(windows, 1, last="keep")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="last is 'drop', and a blend has no epochs"):
        Batches(blend, 1, last="drop")
    for ask in (lambda: Batches(blend, 1).steps_per_epoch, lambda: Batches(blend, 1).position(3)):
        with pytest.raises(DataError, match="a blend has no epochs"):
            ask()
