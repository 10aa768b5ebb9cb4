"""Prefixes to batches: what is trained on, what is held out, and ids that no model knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pfx.data import ByteTokenizer, DataError, Documents, preprocess
from pfx.recipe import Data, Evaluate, Model, Run, Train
from pfx.recipe.oddities import IGNORED
from pfx.recipe.sources import BatchError, Checked, sources

SEQ = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name, letters in (("small", "abcdefgh"), ("large", "uvwxyz")):
        count = 40 if name == "small" else 90
        texts = [f"{letters} {number}." for number in range(count)]
        path = made / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        preprocess([path], ByteTokenizer(), made / name)
    return made


def config(folder: Path, names: str = "small large", **data: object) -> Run:
    prefixes = tuple(str(folder / name) for name in names.split())
    settings = {"prefixes": prefixes, "seq_len": SEQ, "split": (0.75, 0.25), **data}
    return Run(
        model=Model(module="models.gpt", config=None),
        data=Data(**settings),  # type: ignore[arg-type]
        train=Train(steps=9, batch_size=4),
        evaluate=Evaluate(every=1),
    )


@pytest.mark.parametrize("packing", ["windows", "packed"])
def test_every_held_out_row_is_evaluated_once_and_never_trained_on(folder: Path, packing: str):
    _, held_out = sources(config(folder, packing=packing))
    assert held_out is not None
    labels = 0
    for number in range(held_out.num_batches):
        labels += int((held_out(number)["labels"] != IGNORED).sum())
    expected = 0
    for name in ("small", "large"):
        documents = Documents.open(str(folder / name)).split((0.75, 0.25))[1]
        tokens, documents_in = documents.num_tokens, len(documents)
        expected += (tokens - 1) // SEQ * SEQ if packing == "windows" else tokens - documents_in
    assert labels == expected
    ids = [held_out.parts[0].ids(step) for step in range(held_out.parts[0].steps_per_epoch)]
    held = {document for batch in ids for one in batch for document in one.documents}
    alone, _ = sources(config(folder, "small", packing=packing))
    seen = {d for step in range(30) for one in alone.ids(step) for d in one.documents}
    assert held and seen and not held & seen
    with pytest.raises(ValueError, match="beyond the last one"):
        held_out(held_out.num_batches)


def test_prefixes_are_mixed_by_their_tokens_or_by_weights(folder: Path):
    def share(run: Run) -> float:
        training, _ = sources(run)
        tokens = torch.cat([training(step)["tokens"].flatten() for step in range(60)])
        small, large = ((tokens == ord(letter)).sum() for letter in "au")
        return float(small / (small + large))

    assert share(config(folder, weights=(3.0, 1.0))) == pytest.approx(0.75, abs=0.05)
    sizes = {name: (folder / f"{name}.bin").stat().st_size for name in ("small", "large")}
    letters = {"small": sizes["small"] / 40, "large": sizes["large"] / 90}
    rows = sizes["small"] / sum(sizes.values())
    expected = rows / letters["small"] / (rows / letters["small"] + (1 - rows) / letters["large"])
    assert share(config(folder)) == pytest.approx(expected, abs=0.05)


def test_what_was_asked_for_is_in_the_batch(folder: Path):
    training, _ = sources(config(folder, reset_positions=True, block_diagonal=True))
    assert set(training(0)) == {"tokens", "labels", "positions", "segments"}
    assert all(leaf.shape == (4, SEQ) for leaf in training(0).values())


def test_without_evaluation_nothing_needs_to_be_held_out(folder: Path):
    run = config(folder, split=(1.0, 0.0))
    with pytest.raises(DataError):
        sources(run)
    nothing = Run(model=run.model, data=run.data, train=run.train)
    assert sources(nothing)[1] is None


def test_ids_beyond_the_model_are_named_with_their_samples(folder: Path):
    training, _ = sources(config(folder, "small"))
    assert Checked(training, 257)(0).keys() == training(0).keys()
    with pytest.raises(BatchError) as error:
        Checked(training, 100)(3)
    text = str(error.value)
    assert text.startswith("batch 3: cannot be looked up.\n")
    assert "token ids are outside of 0...99: 10" in text and "samples: SampleId(" in text
    assert text.endswith(
        "model.config.vocab_size of at least that of the tokenizer that wrote the data"
    )
