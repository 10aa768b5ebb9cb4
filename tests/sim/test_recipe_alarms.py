"""Alarms that undo nothing, numbers that are not finite, and what is kept of steps due twice over."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from pfx import checkpoint
from pfx.recipe import Checkpoint, Evaluate, Monitor, Optimizer, session
from pfx.recipe.log import JsonLines, read_metrics
from pfx.recipe.loop import _lower, _tiers
from pfx.recipe.lost import is_of_others
from pfx.recipe.overrides import ConfigError
from pfx.recipe.plain import plain
from pfx.recipe.position import Position
from pfx.recipe.saves import after_rewinds, journal
from pfx.runtime.process_world import Alone
from tests.sim import recipe_model
from tests.sim.test_recipe_loop import config, events, source  # noqa: F401 (a fixture)


@hypothesis.settings(max_examples=1)
@hypothesis.given(st.sets(st.integers(4, 11), min_size=1))
@hypothesis.example({11})
@hypothesis.example({10, 11})
def test_an_alarm_that_is_only_reported_loses_no_step(tmp_path_factory, bad):
    """All steps are logged, all checkpoints there, the last one too, as without a monitor."""
    recipe_model.WANTED.clear()
    directory = tmp_path_factory.mktemp("run")
    recipe_model.WANTED["factors"] = dict.fromkeys(bad, 100.0)
    run = config(directory, monitor=Monitor(warmup=2, action="report"))
    outcome = session.train(run)
    assert sorted(read_metrics(directory / "metrics.jsonl")) == list(range(1, 13))
    assert checkpoint.steps(directory / "checkpoints") == [4, 8, 12]
    assert outcome.ending == "done" and outcome.at.monitor.count == 12 - len(bad)
    assert [one["step"] - 1 for one in events(directory, "incident")] == sorted(bad)


def test_a_repeated_step_without_a_loss_is_repeated_to_the_same_bits(tmp_path: Path):
    recipe_model.WANTED.clear()
    recipe_model.WANTED["factors"] = {5: math.nan, 6: 100.0}
    session.train(config(tmp_path))
    (incident,) = events(tmp_path, "incident")
    record = json.loads(Path(incident["report"]).with_suffix(".json").read_text())
    assert record["replayed"] == "from step 4 on" and record["same_bits"] is True


def test_losses_that_are_not_finite_are_never_the_best():
    assert not _lower(math.nan, None) and not _lower(math.inf, None) and not _lower(math.nan, 1.0)
    assert _lower(1.0, None) and _lower(0.5, 1.0) and not _lower(1.0, 1.0)


def test_an_evaluation_of_no_labels_has_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And does not stand as the best of all with a loss of zero."""
    make, loss_fn = recipe_model.counting, recipe_model.loss_fn

    def weightless(config: Any) -> Any:
        def loss(params: Any, batch: Any, key: Any = None) -> Any:
            total, _, metrics = loss_fn(config)(params, batch, key)
            return total, (batch["factor"] != 0).float().sum(), metrics

        return loss

    def source_of(run: Any, part: str) -> Any:
        found = make(run, part)
        none = dict.fromkeys(range(3), 0.0)
        return found if part == "train" else dataclasses.replace(found, factors=none)

    recipe_model.WANTED.clear()
    monkeypatch.setattr(recipe_model, "loss_fn", weightless)
    monkeypatch.setattr(recipe_model, "counting", source_of)
    outcome = session.train(config(tmp_path, evaluate=Evaluate(every=4)))
    assert {one["loss"] for one in events(tmp_path, "evaluate")} == {"nan"}
    assert outcome.at.best is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_better_and_better_steps_leave_the_newest_as_well(tmp_path: Path, keep: int):
    """Each regular step is the best so far: the best is one, and the newest `keep` stay."""
    recipe_model.WANTED.clear()
    settings = Checkpoint(every=3, keep=keep, asynchronous=False)
    run = config(tmp_path, checkpoint=settings, evaluate=Evaluate(every=3))
    run = dataclasses.replace(run, optimizer=Optimizer(lr=0.02, schedule="constant"))
    session.train(run)
    found = [one["loss"] for one in events(tmp_path, "evaluate")]
    assert found == sorted(found, reverse=True)
    assert checkpoint.steps(tmp_path / "checkpoints") == [3, 6, 9, 12][-keep - 1 :]
    assert checkpoint.best(tmp_path / "checkpoints") == 12


@hypothesis.given(st.integers(1, 40), st.booleans(), st.booleans())
def test_a_step_is_in_every_tier_that_is_due(step, better, last):
    run = config(Path("unused"), checkpoint=Checkpoint(every=4, temporary_every=2))
    steps = step if last else 41
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=steps))
    tiers = _tiers(run, step, better)
    if last:
        assert tiers == ["best"] * better + ["final"]
    else:
        assert ("best" in tiers, "regular" in tiers) == (better, step % 4 == 0)
        assert ("temporary" in tiers) == (step % 2 == 0 and step % 4 != 0 and not better)


def test_a_torn_journal_does_not_take_the_next_rewind_with_it(tmp_path: Path):
    (tmp_path / "rewinds.jsonl").write_text('{"step": 4, "data_')
    journal(tmp_path, Position(step=4, data_step=4), 9, 1)
    found = after_rewinds(tmp_path, Position(step=4, data_step=4), Alone())
    assert (found.data_step, found.rewinds) == (9, 1)


def test_two_runs_in_one_directory_are_refused(tmp_path: Path):
    other = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="is being written by another run"):
        session.train(config(tmp_path))
    other.close()
    recipe_model.WANTED.clear()
    assert session.train(config(tmp_path)).ending == "done"


def test_a_directory_of_other_checkpoints_is_refused(tmp_path: Path):
    recipe_model.WANTED.clear()
    checkpoint.save(tmp_path / "checkpoints", 1, {"a": 1})
    with pytest.raises(ConfigError, match="do not say where the run was"):
        session.train(config(tmp_path))


def test_an_error_of_a_file_is_none_of_other_ranks(tmp_path: Path):
    with pytest.raises(OSError) as error:
        (tmp_path / "datastore" / "socket").open()
    assert not is_of_others(error.value) and is_of_others(OSError("socket closed"))


def test_what_has_no_plain_form_is_recorded_alike_in_every_process():
    class Thing:
        pass

    assert plain(math.sqrt) == "math:sqrt"
    assert plain(Thing()) == plain(Thing()) and "0x" not in plain([Thing(), len])[0]
