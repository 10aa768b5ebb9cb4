"""Settings: typed overrides, plain data and back, what a resumed run may change, every error text."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import pfx
from models import gpt, llama
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
    resolved,
)
from pfx.recipe.config_file import function_of, load, module_of
from pfx.recipe.overrides import ConfigError, overridden
from pfx.recipe.plain import decode, flat, parse, plain
from pfx.recipe.position import Position, position_of

ROOT = Path(__file__).parents[2]


def config(**changes: object) -> Run:
    sizes = gpt.Config(
        num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=64, max_seq_len=16
    )
    usual = {
        "model": Model(module="models.gpt", config=sizes),
        "data": Data(prefixes=("data/text",), seq_len=16),
        "train": Train(steps=10, batch_size=4),
    }
    return Run(**{**usual, **changes})


def test_a_setting_is_typed_by_its_annotation():
    run = overridden(
        config(),
        ["train.steps=1_000", "optimizer.lr=1e-3", "optimizer.clip=none", "data.prefixes=a,b",
         "data.weights=[0.5, 0.5]", "model.config.dtype=bfloat16", "model.config.remat=full",
         "plan.dp=2", "log.progress=off", "optimizer.options.b2=0.95", "evaluate.every=5"],
    )  # fmt: skip
    assert run.train == Train(steps=1000, batch_size=4)
    assert run.optimizer == Optimizer(lr=1e-3, clip=None, options={"b2": 0.95})
    assert run.data == Data(prefixes=("a", "b"), weights=(0.5, 0.5), seq_len=16)
    assert (run.model.config.dtype, run.model.config.remat) == (torch.bfloat16, "full")
    assert run.plan == pfx.Plan(dp=2)
    assert (run.log.progress, run.evaluate) == (False, Evaluate(every=5))


def test_settings_that_only_fit_together_are_set_at_once():
    assert overridden(config(), ["plan.pp=2", "plan.microbatches=2"]).plan.pp == 2
    chosen = ["data.prefixes=a,b", "data.weights=1,2"]
    assert overridden(config(), chosen).data.weights == (1.0, 2.0)


def test_the_config_given_is_left_as_it_was():
    run = config(optimizer=Optimizer(options={"b2": 0.9}))
    before = flat(run)
    overridden(run, ["optimizer.options.b2=0.95", "train.steps=7"])
    assert flat(run) == before


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("train.stepz=3", "--set train.stepz: no such setting.\n  fix: --set train.steps"),
        ("steps=3", "--set steps: no such setting.\n  fix: --set train.steps"),
        (
            "train.steps=many",
            "--set train.steps: 'many' is not int.\n  now: train.steps = 10",
        ),
        (
            "optimizer.clip=x",
            "--set optimizer.clip: 'x' is not float or None.\n  now: optimizer.clip = 1.0",
        ),
        (
            "optimizer.schedule=cos",
            "--set optimizer.schedule: 'cos' is not 'constant' or 'linear' or 'cosine' or 'wsd'.\n"
            "  now: optimizer.schedule = 'cosine'",
        ),
        ("train.steps", "--set train.steps: no value.\n  fix: --set train.steps=..."),
        (
            "evaluate=3",
            "--set evaluate=3: is a group of settings.\n"
            "  in it: evaluate.every, evaluate.batches",
        ),
        ("train.steps.x=1", "--set train.steps.x: no such setting.\n  fix: --set train.steps"),
        ("train.steps=0", "Train: steps=0 must be at least 1."),
        ("monitor.factor=1", "Monitor: factor=1.0 must be above 1."),
        ("plan.dp=0", "Plan: dp=0 must be an integer of at least 1."),
    ],
)  # fmt: skip
def test_a_wrong_override_says_what_is_known(assignment: str, text: str):
    with pytest.raises(pfx.errors.PfxError) as error:
        overridden(config(), [assignment])
    assert str(error.value) == text


def test_an_unknown_name_with_nothing_near_lists_all():
    with pytest.raises(ConfigError, match=r"settings: model.module, .*monitor.replay"):
        overridden(config(), ["qqqqqqqq=1"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Data(), "Data: needs either prefixes or a source."),
        (lambda: Data(prefixes=("a",), source="m:f"), "Data: needs either prefixes or a source."),
        (
            lambda: Data(prefixes=("a",), weights=(1.0, 2.0)),
            "Data: weights are 2 for 1 prefixes.",
        ),
        (lambda: Optimizer(lr=-1), "Optimizer: lr=-1 must be at least 0."),
        (lambda: Monitor(window=0), "Monitor: window=0 must be at least 1."),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, text: str):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).splitlines()[0] == text


VALUES = {
    int: st.integers(-(10**9), 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    int | None: st.none() | st.integers(),
    str: st.text("abcdef/._-", min_size=1),
    tuple[int, ...]: st.lists(st.integers()).map(tuple),
    tuple[float, float]: st.tuples(st.floats(0, 1), st.floats(0, 1)),
    torch.dtype: st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dict[str, float]: st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1)),
}


@hypothesis.given(st.data())
def test_plain_and_decode_are_inverse_through_json(data: st.DataObject):
    kind = data.draw(st.sampled_from(list(VALUES)))
    value = data.draw(VALUES[kind])
    assert decode(json.loads(json.dumps(plain(value))), kind) == value


@hypothesis.given(st.data())
def test_what_is_shown_can_be_typed(data: st.DataObject):
    kind = data.draw(st.sampled_from([k for k in VALUES if k != dict[str, float]]))
    value = data.draw(VALUES[kind])
    shown = plain(value)
    text = shown if isinstance(shown, str) else json.dumps(shown)
    assert parse(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1.5", int), ("x", float), ("maybe", bool), ("1,2,3", tuple[int, int]), ("f", torch.dtype),
     ("a", dict[str, int]), ("1", type(None)), ("x", object)],
)  # fmt: skip
def test_what_is_no_such_value_is_refused(text: str, kind: object):
    with pytest.raises(ValueError):
        parse(text, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (1.5, int), ("1", int), ([1], tuple[int, int]), ({"x": 1}, Train), (3, Train)],
)
def test_json_of_another_type_is_refused(value: object, kind: object):
    with pytest.raises(ValueError):
        decode(value, kind)


def test_a_resolved_config_is_read_back_and_says_where_settings_came_from(tmp_path: Path):
    run = overridden(config(plan=pfx.Plan(dp=2)), ["train.steps=99"])
    origin = resolved.origins(run, "config.py", ["train.steps=99"])
    assert origin["train.steps"] == "--set"
    assert origin["plan.dp"] == origin["model.config.num_layers"] == "config.py"
    assert "optimizer.lr" not in origin and "plan.tp" not in origin
    resolved.write(tmp_path / "config.json", resolved.resolved(run, origin))
    record = resolved.read(tmp_path / "config.json")
    assert record["config"]["train"]["steps"] == 99
    assert resolved.changes(record, run) == []
    assert resolved.model_of(record, gpt.Config) == run.model.config


def test_nested_settings_of_a_model_come_back():
    sizes = dataclasses.replace(
        llama.LLAMA3_8B,
        rope_scaling=llama.RopeScaling(factor=8.0, original_seq_len=8192),
        dtype=torch.bfloat16,
    )
    run = config(model=Model(module="models.llama", config=sizes))
    record = json.loads(json.dumps(resolved.resolved(run, {})))
    assert resolved.model_of(record, llama.Config) == sizes
    assert (
        overridden(run, ["model.config.rope_scaling.factor=32"]).model.config.rope_scaling.factor
        == 32
    )


def test_a_changed_setting_is_shown_and_only_some_may_change():
    record = resolved.resolved(config(), {})
    free = overridden(config(), ["train.steps=20", "plan.tp=2", "optimizer.lr=1e-3"])
    found = resolved.changes(record, free)
    assert [str(c) for c in found] == [
        "train.steps: 10 -> 20", "optimizer.lr: 0.0003 -> 0.001", "plan.tp: 1 -> 2",
    ]  # fmt: skip
    resolved.check_changes(found, "runs/a")
    other = resolved.changes(record, overridden(config(), ["train.seed=1", "data.seq_len=8"]))
    with pytest.raises(ConfigError) as error:
        resolved.check_changes(other, "runs/a")
    assert str(error.value) == (
        "runs/a: its checkpoints are of another run.\n"
        "  data.seq_len: 16 -> 8\n"
        "  train.seed: 0 -> 1\n"
        "  fix: the old values, or another directory: --set directory=runs/another"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 2, "config": {}}'])
def test_a_damaged_resolved_config_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolved.read(path)


def test_a_model_config_of_another_class_is_refused():
    record = resolved.resolved(config(), {})
    record["config"]["model"]["config"]["width"] = 3
    with pytest.raises(ConfigError, match=r"model.config does not fit models.gpt.Config"):
        resolved.model_of(record, gpt.Config)


@hypothesis.given(st.integers(0, 9), st.integers(0, 99), st.none() | st.floats(0, 9))
def test_a_position_comes_back(step: int, data_step: int, best: float | None):
    at = Position(step=step, data_step=data_step, best=best)
    assert position_of(json.loads(json.dumps(at.to_plain())), "x") == at


@pytest.mark.parametrize("record", [None, {}, {"step": "x"}, [1]])
def test_metadata_without_a_position_are_refused(record: object):
    with pytest.raises(ConfigError, match="checkpoint 3: its metadata do not say"):
        position_of(record, "checkpoint 3")


def test_a_config_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sizes_of_mine.py").write_text("STEPS = 12\n")
    path = tmp_path / "config.py"
    path.write_text(
        "from models import gpt\nfrom sizes_of_mine import STEPS\n"
        "from pfx.recipe import Run, Model, Data, Train\n"
        "def config():\n"
        "    sizes = gpt.Config(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8,"
        " vocab_size=9, max_seq_len=4)\n"
        "    return Run(model=Model(module='models.gpt', config=sizes),\n"
        "        data=Data(prefixes=('x',)), train=Train(steps=STEPS, batch_size=2))\n"
    )
    assert load(path).train.steps == 12


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "config.py: is not there.\n  fix: pfx train path/to/config.py"),
        ("x = 1\n", "has no function config.\n  fix: def config() -> pfx.recipe.Run: ..."),
        ("def config():\n    return 3\n", "config() returned a int, not a pfx.recipe.Run."),
    ],
)
def test_a_wrong_config_file_is_an_error(tmp_path: Path, source: str | None, text: str):
    path = tmp_path / "config.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert text in str(error.value)


def test_what_is_named_and_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.module='models\.gtp': no such module"):
        module_of("models.gtp", "model.module")
    with pytest.raises(ConfigError, match=r"data\.source='models\.gpt:nothing': no such function"):
        function_of("models.gpt:nothing", "data.source")
    with pytest.raises(ConfigError, match="no such function"):
        function_of("models.gpt", "data.source")


def test_every_setting_is_documented():
    for group in (Model, Data, Optimizer, Train, Checkpoint, Log, Evaluate, Monitor, Run):
        for field in dataclasses.fields(group):
            assert re.search(rf"\b{field.name}\b[^:\n]*:", group.__doc__ or ""), field.name


def test_the_recipe_imports_nothing_optional():
    code = (
        "import sys, pfx.recipe, pfx.cli\n"
        "print([m for m in ('rich', 'tyro', 'tokenizers', 'transformers', 'safetensors',"
        " 'tensorboard', 'jinja2') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
