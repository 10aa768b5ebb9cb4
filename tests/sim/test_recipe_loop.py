"""Whole runs in this process: stop and go on, rewind and skip, evaluate, keep, and what is written."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import pfx
from pfx import checkpoint
from pfx.data import ByteTokenizer, preprocess
from pfx.recipe import (
    Checkpoint,
    Data,
    Evaluate,
    Log,
    Model,
    Monitor,
    Optimizer,
    Run,
    Train,
    session,
)
from pfx.recipe.log import read_metrics
from pfx.recipe.overrides import ConfigError
from pfx.recipe.sources import BatchError
from tests.sim import recipe_model


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the source is to do, empty before each test."""
    recipe_model.WANTED.clear()
    return recipe_model.WANTED


def config(directory: Path, **changes: Any) -> Run:
    usual: dict[str, Any] = {
        "model": Model(module="tests.sim.recipe_model", config=recipe_model.Config()),
        "data": Data(source="tests.sim.recipe_model:counting", seq_len=16),
        "train": Train(steps=12, batch_size=8),
        "optimizer": Optimizer(lr=0.02, warmup_steps=2, schedule="constant"),
        "checkpoint": Checkpoint(every=4, keep=None, asynchronous=False),
        "log": Log(progress=False),
        "monitor": Monitor(warmup=2),
        "directory": str(directory),
    }
    return Run(**{**usual, **changes})


def losses(directory: Path) -> dict[int, float]:
    found = read_metrics(directory / "metrics.jsonl")
    return {step: record["loss"] for step, record in found.items()}


def final(outcome: session.Outcome) -> list[torch.Tensor]:
    return [leaf.full_tensor() for leaf in pfx.tree.leaves(outcome.state)]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record.get("event") == name]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, session.Outcome]:
    recipe_model.WANTED.clear()
    directory = tmp_path_factory.mktemp("whole")
    return directory, session.train(config(directory))


@pytest.mark.timeout(300)
@hypothesis.settings(max_examples=3)
@hypothesis.given(st.sets(st.integers(1, 11), min_size=1, max_size=2), st.booleans())
def test_a_stopped_run_goes_on_to_the_same_bits(uninterrupted, tmp_path_factory, stops, background):
    """Asked to stop before any step, in a run of any number of parts: nothing is different."""
    whole, expected = uninterrupted
    directory = tmp_path_factory.mktemp("stopped")
    settings = Checkpoint(every=4, keep=None, asynchronous=background)
    run = config(directory, checkpoint=settings)
    for data_step in sorted(stops):
        recipe_model.WANTED["signals"] = {data_step: signal.SIGTERM}
        outcome = session.train(run)
        # The batch was being read when the signal came: its step is run, then all is saved.
        assert (outcome.ending, outcome.reason) == ("stopped", "SIGTERM")
        assert outcome.at.step == data_step + 1 == checkpoint.latest(directory / "checkpoints")
    recipe_model.WANTED.clear()
    outcome = session.train(run)
    assert outcome.ending == "done"
    assert losses(directory) == losses(whole)
    assert outcome.at == expected.at
    assert same_bits(final(outcome), final(expected))


def test_a_finished_run_is_left_as_it_is(uninterrupted):
    whole, expected = uninterrupted
    before = (whole / "metrics.jsonl").read_text()
    outcome = session.train(config(whole))
    assert outcome.ending == "done" and same_bits(final(outcome), final(expected))
    added = (whole / "metrics.jsonl").read_text().removeprefix(before).splitlines()
    assert [json.loads(line)["event"] for line in added] == ["resume", "start", "done"]


def test_more_steps_go_on_and_say_what_has_changed(uninterrupted, tmp_path: Path):
    session.train(config(tmp_path, train=Train(steps=5, batch_size=8)))
    plan = pfx.Plan(dp=2, tp=2, zero=3)
    outcome = session.train(config(tmp_path, plan=plan))
    assert outcome.at.step == 12
    changed = [record["setting"] for record in events(tmp_path, "changed")]
    assert changed == [
        "train.steps: 5 -> 12", "plan.dp: 1 -> 2", "plan.tp: 1 -> 2", "plan.zero: 0 -> 3",
    ]  # fmt: skip
    whole = losses(uninterrupted[0])
    for step, loss in losses(tmp_path).items():
        assert loss == pytest.approx(whole[step], rel=1e-5)


def test_another_run_is_refused_before_anything_is_written(tmp_path: Path):
    session.train(config(tmp_path, train=Train(steps=2, batch_size=8)))
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"train\.seed: 0 -> 1"):
        session.train(config(tmp_path, train=Train(steps=4, batch_size=8, seed=1)))
    assert (tmp_path / "config.json").read_text() == before


def test_data_that_were_written_anew_are_refused(tmp_path: Path) -> None:
    text, prefix = tmp_path / "text.jsonl", str(tmp_path / "text")
    text.write_text('{"text": "the first text is long enough for rows of sixteen"}\n' * 4)
    data = Data(prefixes=(prefix,), seq_len=16, split=(1.0, 0.0))
    run = config(tmp_path / "run", data=data, train=Train(steps=1, batch_size=2))
    run = dataclasses.replace(run, model=Model(
        module="tests.sim.recipe_model", config=recipe_model.Config(vocab_size=257)))  # fmt: skip
    preprocess([text], ByteTokenizer(), prefix)
    assert session.train(run).ending == "done"
    text.write_text(text.read_text() + '{"text": "one more"}\n')
    preprocess([text], ByteTokenizer(), prefix, overwrite=True)
    with pytest.raises(ConfigError) as raised:
        session.train(dataclasses.replace(run, train=Train(steps=2, batch_size=2)))
    assert (
        str(raised.value)
        == f"""\
{tmp_path / "run"}: its data have changed.
  {prefix}: {{"documents": 4, "tokens": 200}} -> {{"documents": 5, "tokens": 209}}
  fix: the old files, or another directory: --set directory=runs/another"""
    )


def test_after_a_rewind_training_goes_on_behind_the_bad_batch(source, tmp_path: Path):
    """The same as training on data that never had the batches from the checkpoint to the bad one."""
    source |= {"same": 6, "factors": {6: 100.0}}
    plan = pfx.Plan(dp=2, zero=1)
    run = config(tmp_path / "run", plan=plan)
    outcome = session.train(run)
    assert (outcome.ending, outcome.at.rewinds) == ("done", 1)
    assert (outcome.at.step, outcome.at.data_step) == (12, 15)

    source.clear()
    source["moved"] = (4, 3)  # after step 4 come batches 7, 8, ...
    oracle = session.train(config(tmp_path / "oracle", plan=plan))
    assert same_bits(final(outcome), final(oracle))
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "oracle")
    assert found == expected

    (incident,) = events(tmp_path / "run", "incident")
    assert incident["step"] == 7
    assert incident["action"] == "went back to step 4; batches 4 to 6 are left out"
    assert incident["verdict"].startswith("bad batch: row 0 repeats token 7 16 times in a row")
    assert "; its gradient is " in incident["verdict"]
    record = json.loads(Path(incident["report"]).with_suffix(".json").read_text())
    assert record["data_step"] == 6 and record["batch_ids"] == list(range(48, 56))
    assert record["same_bits"] is True and record["replayed"] == "from step 4 on"
    assert record["disagreeing"] == record["nonfinite"] == []
    assert record["grad_norm"] > 10 * record["usual_norm"]
    assert set(record["layers"]) == {"['embed']", "['head']"}
    assert record["ranges"]["overflow"] == record["ranges"]["nonfinite"] == 0
    assert record["ranges"]["zero"] > 0.9  # the batch of one token touches one row of 128


def test_a_run_killed_after_a_rewind_does_not_meet_the_batch_again(source, tmp_path: Path):
    source["factors"] = {6: 100.0}
    source["signals"] = {8: signal.SIGINT}

    class Killed(Exception):
        pass

    original = session.saves.Saver.__call__

    def dies(self: Any, state: Any, at: Any, tier: str) -> None:
        if tier == "temporary":
            raise Killed  # as kill -9 would, before the checkpoint is there
        original(self, state, at, tier)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(session.saves.Saver, "__call__", dies)
        session.train(config(tmp_path))
    assert checkpoint.latest(tmp_path / "checkpoints") == 4
    source["factors"] = {6: math.nan}  # it would be seen
    outcome = session.train(config(tmp_path))
    assert (outcome.ending, outcome.at.rewinds, outcome.at.data_step) == ("done", 1, 15)
    assert len(events(tmp_path, "incident")) == 1


def test_an_alarm_before_the_first_checkpoint_begins_anew(source, tmp_path: Path):
    source["factors"] = {3: 100.0}
    outcome = session.train(config(tmp_path, checkpoint=Checkpoint(every=None)))
    assert (outcome.at.step, outcome.at.data_step, outcome.at.rewinds) == (12, 16, 1)


@pytest.mark.parametrize(
    ("settings", "ending", "rewinds"),
    [
        (Monitor(warmup=2, max_rewinds=1), "failed", 1),
        (Monitor(warmup=2, action="stop"), "failed", 0),
        (Monitor(warmup=2, action="report"), "done", 0),
    ],
)
def test_how_an_alarm_is_answered(source, tmp_path: Path, settings, ending, rewinds):
    source["factors"] = {6: 100.0, 9: 100.0}
    outcome = session.train(config(tmp_path, monitor=settings))
    assert (outcome.ending, outcome.at.rewinds) == (ending, rewinds)
    assert len(events(tmp_path, "incident")) == (1 if settings.action == "stop" else 2)
    assert checkpoint.latest(tmp_path / "checkpoints") == (12 if ending == "done" else 4)


def test_steps_that_are_not_finite_are_skipped_and_counted(source, tmp_path: Path):
    source["factors"] = {5: math.nan, 7: math.inf}
    outcome = session.train(config(tmp_path))
    assert (outcome.ending, outcome.at.rewinds) == ("done", 0)
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [found[step]["skipped"] for step in (5, 6, 7, 8, 12)] == [0, 1, 1, 2, 2]
    assert found[6]["loss"] == "nan"
    assert outcome.at.monitor.skipped == 2
    assert all(torch.isfinite(leaf).all() for leaf in final(outcome) if leaf.is_floating_point())


def test_too_many_skips_in_a_row_go_back(source, tmp_path: Path):
    source["factors"] = {4: math.nan, 5: math.nan, 6: math.nan}
    settings = Monitor(warmup=2, max_skips=3)
    outcome = session.train(config(tmp_path, monitor=settings))
    assert (outcome.ending, outcome.at.rewinds, outcome.at.data_step) == ("done", 1, 15)
    (incident,) = events(tmp_path, "incident")
    assert incident["alarm"] == "3 steps in a row were skipped; the limit is 3"


def test_ids_beyond_the_vocabulary_are_an_error_that_names_them(source, tmp_path: Path):
    source["vocab"] = 40
    with pytest.raises(BatchError) as error:
        session.train(config(tmp_path))
    assert str(error.value).startswith("batch 0: cannot be looked up.\n  ")
    assert "token ids are outside of 0...31: 32" in str(error.value)
    assert "samples: 0, 1, 2, 3, and 4 more" in str(error.value)


def test_evaluation_is_the_mean_over_all_tokens_and_the_best_is_kept(tmp_path: Path):
    run = config(
        tmp_path, evaluate=Evaluate(every=3), checkpoint=Checkpoint(every=5, asynchronous=False)
    )
    outcome = session.train(run)
    found = events(tmp_path, "evaluate")
    assert [record["step"] for record in found] == [3, 6, 9, 12]
    assert outcome.at.best == min(record["loss"] for record in found)
    tiers = {record["step"]: record["tier"] for record in events(tmp_path, "checkpoint")}
    assert tiers == {3: "best", 5: "regular", 6: "best", 9: "best", 10: "regular", 12: "final"}
    assert checkpoint.best(tmp_path / "checkpoints") == 12  # the last one is the best too

    held_out = recipe_model.counting(run, "valid")
    params = pfx.device_get(outcome.state.params)
    loss = recipe_model.loss_fn(run.model.config)
    sums = [loss(params, held_out(i)) for i in range(held_out.num_batches)]
    expected = sum(float(s[0]) for s in sums) / sum(float(s[1]) for s in sums)
    assert found[-1]["loss"] == pytest.approx(expected, rel=1e-6)
    assert found[-1]["weight"] == sum(float(s[1]) for s in sums)


def test_the_kept_checkpoints_are_those_of_the_settings(tmp_path: Path):
    settings = Checkpoint(every=4, keep=1, temporary_every=1, asynchronous=False)
    session.train(config(tmp_path, checkpoint=settings, train=Train(steps=11, batch_size=8)))
    assert checkpoint.steps(tmp_path / "checkpoints") == [8, 11]


def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path: Path):
    """At the next step, not at the next save."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    settings = Checkpoint(every=4, asynchronous=True)
    run = config(tmp_path, checkpoint=settings, train=Train(steps=400, batch_size=8))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(pfx.errors.CheckpointError, match="No space left on device"),
    ):
        patch.setattr("pfx.checkpoint.image.write", full)
        session.train(run)
    assert max(losses(tmp_path)) <= 8
    assert checkpoint.latest(tmp_path / "checkpoints") is None


def test_everything_that_a_run_needs_is_in_its_checkpoint(uninterrupted):
    whole, outcome = uninterrupted
    metadata = checkpoint.metadata(whole / "checkpoints", 12)
    assert metadata["position"] == outcome.at.to_plain()
    assert metadata["config"]["config"]["optimizer"]["lr"] == 0.02
    restored = checkpoint.restore(
        whole / "checkpoints", 12, like={"state": pfx.tree.map(lambda x: x, outcome.state)}
    )
    pairs = pfx.tree.leaves(restored["state"])
    assert same_bits([pfx.device_get(x) for x in pairs], final(outcome))


def test_a_run_can_start_from_the_parameters_of_another(uninterrupted, tmp_path: Path):
    whole, expected = uninterrupted
    model = Model(module="tests.sim.recipe_model", config=recipe_model.Config(), weights=str(whole))
    still = Optimizer(lr=0.0, schedule="constant", weight_decay=0.0)
    outcome = session.train(
        config(tmp_path, model=model, optimizer=still, train=Train(steps=1, batch_size=8),
               plan=pfx.Plan(tp=2))
    )  # fmt: skip
    assert outcome.at.step == 1
    ours, theirs = (pfx.tree.leaves(pfx.device_get(o.state.params)) for o in (outcome, expected))
    assert same_bits(ours, theirs)


def test_mfu_is_the_models_own_arithmetic(tmp_path: Path):
    run = config(tmp_path, log=Log(progress=False, peak_flops=1e9))
    session.train(run)
    record = read_metrics(tmp_path / "metrics.jsonl")[5]
    # One product of (8·16, 8) and (8, 32), forward and twice as much backward.
    flops = 3 * 2 * 8 * 16 * 8 * 32
    assert record["mfu"] == pytest.approx(flops / record["seconds"] / 1e9)
    assert record["tokens/s"] == pytest.approx(8 * 16 / record["seconds"])
    assert record["memory"] > 2**20


def test_float16_shows_its_loss_scale(source, tmp_path: Path):
    source["factors"] = {3: 1e6}
    outcome = session.train(config(tmp_path, plan=pfx.Plan(precision="fp16")))
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found[1]["loss_scale"] == 2.0**16
    assert found[4]["skipped"] == found[3]["skipped"] + 1 == found[12]["skipped"]
    assert outcome.ending == "done" and outcome.at.monitor.skipped == found[12]["skipped"]


def test_a_config_is_not_changed_by_its_run(tmp_path: Path):
    run = config(tmp_path)
    before = dataclasses.asdict(run)
    session.train(run)
    assert dataclasses.asdict(run) == before
