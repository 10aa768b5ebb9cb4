"""The monitor, what is odd in a batch, and the verdict: pure functions and their laws."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from pfx.recipe import Monitor
from pfx.recipe.health import Leaf, broken_moments, disagreeing
from pfx.recipe.monitor import MonitorState, observe
from pfx.recipe.oddities import oddities
from pfx.recipe.report import write_report
from pfx.recipe.verdict import Evidence, judge

POSITIVE = st.floats(1e-3, 1e3)


def watch(settings: Monitor, losses: list[float], norms: list[float] | None = None):
    """All alarms, with the step each was raised at."""
    state, found = MonitorState(), []
    for step, loss in enumerate(losses):
        numbers = {"loss": loss, "grad_norm": 1.0 if norms is None else norms[step]}
        state, alarms = observe(settings, state, numbers)
        found += [(step, alarm.kind, alarm.metric) for alarm in alarms]
    return state, found


@hypothesis.given(st.lists(POSITIVE, min_size=1, max_size=60), st.integers(1, 20))
def test_the_running_mean_is_the_mean_of_the_first_steps_then_forgets(losses, window):
    settings = Monitor(window=window, warmup=10**6)
    state, _ = watch(settings, losses)
    expected = losses[0]
    for n, loss in enumerate(losses[1:], 2):
        expected += (loss - expected) / min(n, window)
    assert state.loss == pytest.approx(expected, rel=1e-12)
    if len(losses) <= window:
        assert state.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-9)


@hypothesis.given(st.lists(st.floats(1.0, 9.9), min_size=2, max_size=60), st.integers(1, 5))
def test_what_stays_within_the_factor_raises_nothing(losses, warmup):
    # The mean of values of at least 1 is at least 1, so that 9.9 is below 10 times it.
    assert watch(Monitor(warmup=warmup), losses)[1] == []


@hypothesis.given(
    st.lists(st.floats(1.0, 2.0), min_size=3, max_size=40), st.data(),
    st.sampled_from(["loss", "grad_norm"]),
)  # fmt: skip
def test_ten_times_the_mean_is_alarming_and_stays_out_of_it(values, data, metric):
    at = data.draw(st.integers(2, len(values)))
    series = values[:at] + [10.001 * 2.0] + values[at:]
    ones = [1.0] * len(series)
    losses, norms = (series, ones) if metric == "loss" else (ones, series)
    state, found = watch(Monitor(warmup=2), losses, norms)
    assert found == [(at, "spike", metric)]
    clean = values if metric == "loss" else [1.0] * len(values)
    expected, _ = watch(Monitor(warmup=2), clean, values if metric == "grad_norm" else None)
    assert state == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_alarming_from_the_first_step(value):
    assert watch(Monitor(warmup=100), [value])[1] == [(0, "nonfinite", "loss")]
    assert watch(Monitor(), [1.0], [value])[1] == [(0, "nonfinite", "grad_norm")]


def test_no_spike_during_warmup():
    assert watch(Monitor(warmup=3), [1.0, 100.0, 1.0])[1] == []
    assert watch(Monitor(warmup=3), [1.0, 1.0, 1.0, 100.0])[1] == [(3, "spike", "loss")]


@hypothesis.given(st.lists(st.booleans(), max_size=60), st.integers(1, 6))
def test_skipped_steps_are_alarming_only_many_in_a_row(skips, limit):
    settings, state = Monitor(max_skips=limit), MonitorState()
    total, row = 0, 0
    for skip in skips:
        total, row = total + skip, row + 1 if skip else 0
        loss = math.nan if skip else 1.0
        numbers = {"loss": loss, "grad_norm": 1.0, "skipped": float(total)}
        state, alarms = observe(settings, state, numbers)
        assert [alarm.kind for alarm in alarms] == (["skips"] if row == limit else [])
        row = 0 if alarms else row
    assert state.skipped == total
    assert state.loss in (0.0, 1.0)


def test_alarms_say_what_they_compare():
    state, _ = observe(Monitor(warmup=1), MonitorState(), {"loss": 2.0, "grad_norm": 1.0})
    _, alarms = observe(Monitor(warmup=1), state, {"loss": math.nan, "grad_norm": 11.0})
    assert [str(alarm) for alarm in alarms] == [
        "loss is nan; its running mean is 2",
        "grad_norm 11 is 11.0 times its running mean 1; the limit is 10",
    ]
    _, alarms = observe(Monitor(max_skips=1), state, {"loss": 1.0, "skipped": 1})
    assert str(alarms[0]) == "1 steps in a row were skipped; the limit is 1"


def usual_batch(seed: int, rows: int = 6, seq: int = 64, vocab: int = 50) -> dict:
    generator = torch.Generator().manual_seed(seed)
    # Frequencies like those of words: a few tokens are most of the text.
    weights = 1 / torch.arange(1, vocab + 1).double()
    tokens = torch.multinomial(weights, rows * seq, replacement=True, generator=generator)
    tokens = tokens.reshape(rows, seq)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


@hypothesis.given(st.integers(0, 10**6))
def test_usual_batches_are_not_odd(seed):
    usual = [usual_batch(seed + i) for i in range(1, 5)]
    assert oddities(usual_batch(seed), usual, 50) == []


@hypothesis.given(st.integers(0, 10**6), st.data())
def test_what_is_planted_is_found(seed, data):
    usual = [usual_batch(seed + i) for i in range(1, 5)]
    batch = usual_batch(seed)
    tokens, labels = batch["tokens"], batch["labels"]
    row = data.draw(st.integers(0, 4))
    kind = data.draw(st.sampled_from(["twice", "run", "range", "label", "ignored", "rare"]))
    if kind == "twice":
        tokens[5] = tokens[row]
        expected = f"rows {row} and 5 are the same"
    elif kind == "run":
        start, length = data.draw(st.integers(0, 20)), data.draw(st.integers(40, 44))
        tokens[row, start : start + length] = 49
        expected = f"row {row} repeats token 49 "
    elif kind == "range":
        tokens[row, 7] = data.draw(st.sampled_from([-1, 50, 2**62]))
        expected = f"1 token ids are outside of 0...49: {int(tokens[row, 7])}"
    elif kind == "label":
        labels[row, 7] = 50
        expected = "1 labels are outside of 0...49: 50"
    elif kind == "ignored":
        labels[:3] = -100
        expected = "50% of the labels are ignored; usual are 0% to 0%"
    else:
        generator = torch.Generator().manual_seed(seed)
        tokens.copy_(torch.randint(25, 50, tokens.shape, generator=generator))
        expected = "its tokens are rare: "
    assert any(line.startswith(expected) for line in oddities(batch, usual, 50))


@pytest.mark.parametrize("wrong", [-(2**63), -1, 2**62, 2**63 - 1])
def test_an_id_of_any_size_is_told_and_takes_no_memory(wrong):
    # A table with a place for every id up to this one would not fit into any machine.
    usual, batch = [usual_batch(i) for i in range(1, 5)], usual_batch(0)
    batch["tokens"][0, :] = batch["labels"][1, :] = wrong
    found = oddities(batch, usual, 50)
    assert f"64 token ids are outside of 0...49: {wrong}" in found
    assert f"64 labels are outside of 0...49: {wrong}" in found
    assert any(line.startswith("its tokens are rare: ") and str(wrong) in line for line in found)


def test_batches_that_usually_repeat_rows_may():
    usual = usual_batch(1)
    usual["tokens"][1] = usual["tokens"][0]
    batch = usual_batch(2)
    batch["tokens"][3] = batch["tokens"][4]
    assert oddities(batch, [usual], 50) == []


def test_labels_all_ignored_are_odd_without_comparison():
    batch = usual_batch(1)
    batch["labels"][:] = -100
    assert oddities(batch, [], 50) == ["no label counts: all are ignored"]


BASE = Evidence(step=30, data_step=31, alarms=["grad_norm 40 is 20 times its running mean"])
GROWING = [{"grad_norm": 1.0}] * 8 + [{"grad_norm": 4.0}] * 5


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"disagreeing": ["w: rank 1 differs from rank 0"], "oddities": ["x"]}, "ranks disagree"),
        ({"same_bits": False, "oddities": ["x"]}, "faulty machine"),
        ({"same_bits": False, "deterministic": False, "oddities": ["x"]}, "bad batch"),
        ({"broken_moments": ["nu: -1"], "oddities": ["x"]}, "corrupted optimizer state"),
        ({"nonfinite_before": ["mu: 3 values"]}, "corrupted optimizer state"),
        ({"precision": "float16", "ranges": {"overflow": 0.01}}, "float16 range"),
        ({"precision": "float16", "loss_scale": 1.0}, "float16 range"),
        ({"oddities": ["rows 1 and 2 are the same"], "lr": 1.0, "history": GROWING}, "bad batch"),
        ({"grad_norm": 50.0, "usual_norm": 1.0}, "bad batch"),
        ({"grad_norm": math.nan, "usual_norm": 1.0}, "bad batch"),
        ({"lr": 0.1, "history": GROWING}, "learning rate too high"),
        ({"grad_norm": 5.0, "usual_norm": 1.0}, "exploding gradient"),
        ({"alarms": ["loss 4"], "nonfinite": ["w: 2 values"]}, "exploding gradient"),
        ({"alarms": ["loss 4"], "same_bits": True}, "unknown"),
    ],
)
def test_the_verdict_names_the_most_certain_cause(changes, cause):
    verdict = judge(dataclasses.replace(BASE, **changes))
    assert verdict.cause == cause
    assert verdict.reasons


def test_moments_below_zero_are_found_by_name():
    leaves = {
        "[1].nu['w']": Leaf(1.0, 1.0, -0.5, 0), "[1].mu['w']": Leaf(1.0, 1.0, -0.5, 0),
        "[1].nu['b']": Leaf(1.0, 1.0, 0.0, 0),
    }  # fmt: skip
    assert broken_moments(leaves) == ["[1].nu['w']: -0.5"]


@hypothesis.given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"))))
def test_copies_disagree_exactly_where_two_hold_different_ones(everyone):
    differ = {
        place
        for place in "abc"
        if len({prints[place] for prints in everyone if place in prints}) > 1
    }
    assert {line.partition(":")[0] for line in disagreeing(everyone)} == differ


def test_a_report_is_written_for_people_and_programs(tmp_path: Path):
    evidence = dataclasses.replace(
        BASE, batch_ids=[[1, 2]], oddities=["rows 0 and 1 are the same"], lr=1e-3,
        layers={"['w'] layer 1": [math.nan, 0.5]}, same_bits=True, replayed="from step 20 on",
        history=[{"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3}],
    )  # fmt: skip
    path = write_report(tmp_path / "incidents", evidence, judge(evidence), "went back to step 20")
    text = path.read_text()
    for part in (
        "# Step 30: bad batch", "- rows 0 and 1 are the same", "Action: went back to step 20.",
        "| `['w'] layer 1` | nan | 0.5 |", "repeated from step 20 on: the same bits",
        "all copies agree", "samples: [[1, 2]]",
    ):  # fmt: skip
        assert part in text
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["verdict"]["cause"] == "bad batch"
    assert record["layers"]["['w'] layer 1"] == ["nan", 0.5]
    again = write_report(tmp_path / "incidents", evidence, judge(evidence), "stopped")
    assert again.name == "step-00000030-2.md" and path.exists()
