"""Packed documents are documents apart: same losses, same gradients, on one device and by any plan.

The oracle runs each document through the model alone, without positions or segments.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
from models import common
from pfx.data import Batches, Documents, IndexedWriter, Packed, Windows
from tests.common import FAMILIES, Case, assert_close

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "3"))
SEQ = 8
LENGTHS = [3, 9, 5, 3, 5, 3, 4, 3, 9, 4, 3, 5, 4, 3]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """Documents that fit into rows of `SEQ`, several to a row."""
    prefix = tmp_path_factory.mktemp("packed") / "d"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(rng.integers(0, 50, sum(LENGTHS)), np.array(LENGTHS))
    return Documents.open(prefix)


def alone(batches: Batches, step: int) -> dict[str, torch.Tensor]:
    """The documents of a batch apart: one a row, filled up behind, where causal models do not look."""
    dataset = batches.samples.documents.dataset  # type: ignore[attr-defined]
    texts = [dataset.document(d).astype(np.int64) for i in batches.ids(step) for d in i.documents]
    tokens = torch.zeros(len(texts), SEQ, dtype=torch.int64)
    labels = torch.full_like(tokens, common.IGNORED_LABEL)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = torch.from_numpy(text[:-1])
        labels[row, : len(text) - 1] = torch.from_numpy(text[1:])
    return {"tokens": tokens, "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
@hypothesis.settings(max_examples=EXAMPLES)  # every call of a model traces its loop over layers
@given(seed=st.integers(0, 99), step=st.integers(0, 5), rows=st.integers(1, 2))
def test_losses_of_packed_rows_are_those_of_the_documents(
    documents: Documents, family: str, seed: int, step: int, rows: int
) -> None:
    case = Case(family, {"num_layers": 1})
    batches = Batches(
        Packed(documents, SEQ), rows, seed=seed, reset_positions=True, block_diagonal=True
    )
    batch = batches(step)
    params = case.init(pfx.random.key(seed))
    logits = FAMILIES[family].apply(
        params, batch["tokens"], case.model,
        positions=batch["positions"], segments=batch["segments"],
    )  # fmt: skip
    counted = batch["labels"] != common.IGNORED_LABEL
    apart = alone(batches, step)
    expected = FAMILIES[family].apply(params, apart["tokens"], case.model)
    expected = expected[apart["labels"] != common.IGNORED_LABEL]
    torch.testing.assert_close(logits[counted], expected, atol=1e-12, rtol=1e-12)
    without = FAMILIES[family].apply(params, batch["tokens"], case.model)
    several = int(batch["segments"][counted].max()) > 0
    assert several != torch.allclose(without[counted], expected, atol=1e-6)


CASES = {
    "sp": ("gpt", {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 3, "microbatches": 2}),
    "split tokens": ("llama", {"axes": {"x": 2}, "names": {"tokens": "x"}}),
    "pp and tp": ("llama", {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize(("family", "plan"), CASES.values(), ids=CASES)
def test_a_step_on_packed_rows_is_a_step_on_the_documents(
    documents: Documents, family: str, plan: dict[str, Any]
) -> None:
    case = Case(family, plan=plan)
    batches = Batches(Packed(documents, SEQ), 4, reset_positions=True, block_diagonal=True)
    batch = batches(0)
    train = case.train()
    state = train.init(pfx.random.key(0))
    params = pfx.device_get(state.params)
    after, metrics = train.step(state, batch)
    apart = alone(batches, 0)
    weight = int((apart["labels"] != common.IGNORED_LABEL).sum())
    loss = lambda params: case.loss_fn(params, apart, None)[0] / weight
    grads, value = torch.func.grad_and_value(loss)(params)
    assert int(metrics["weight"].item()) == weight
    torch.testing.assert_close(pfx.device_get(metrics["loss"]), value, atol=1e-10, rtol=1e-10)
    expected = pfx.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(pfx.device_get(after.params), expected, 1e-10, "params")


@pytest.mark.parametrize("family", FAMILIES)
def test_counting_positions_from_zero_is_saying_nothing(documents: Documents, family: str) -> None:
    """One segment and the positions 0, 1, 2, ... are the defaults."""
    case = Case(family)
    batch = Batches(Windows(documents, SEQ), 3)(0)
    params = case.init(pfx.random.key(1))
    shape = batch["tokens"].shape
    plain = FAMILIES[family].apply(params, batch["tokens"], case.model)
    said = FAMILIES[family].apply(
        params, batch["tokens"], case.model,
        positions=torch.arange(SEQ).expand(shape), segments=torch.zeros(shape, dtype=torch.int64),
    )  # fmt: skip
    torch.testing.assert_close(said, plain, atol=1e-12, rtol=1e-12)
