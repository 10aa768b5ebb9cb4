"""The resume law: train k steps, save under plan A, restore under plan B, train k = train 2k steps.

Bit for bit where B is A, and to rounding otherwise, for any two plans: data, tensor and pipeline
parallel, ZeRO 0 to 3, 1 to 12 devices. `PFX_EXAMPLES=60 pytest tests/sim/test_resume.py` draws more.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import pfx
from pfx import P, ShapeDtype, checkpoint
from pfx.errors import CheckpointError
from tests.common import Case, State, assert_same_run, tolerance
from tests.sim.pipelines import VIRTUAL, assert_same_bits

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "3"))
LAYERS, ROWS = 6, 48  # a batch that 1, 2, 3, 4, 6 and 12 devices cut into 1, 2 or 4 microbatches
SPLITS = [(dp, tp, pp) for dp in (1, 2, 3, 4, 6, 12) for tp in (1, 2, 4) for pp in (1, 2, 3)
          if dp * tp * pp <= 12]  # fmt: skip
Items = tuple[tuple[str, Any], ...]


@st.composite
def plans(draw: st.DrawFn, microbatches: int) -> Items:
    """A plan on 1 to 12 devices, as items that can be a key."""
    dp, tp, pp = draw(st.sampled_from(SPLITS))
    plan: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "microbatches": microbatches,
                            "zero": draw(st.integers(0, 3)),
                            "sequence_parallel": tp > 1 and draw(st.booleans())}  # fmt: skip
    if pp > 1:
        plan["schedule"] = draw(st.sampled_from(sorted(VIRTUAL)))
        plan["virtual"] = draw(st.sampled_from(VIRTUAL[plan["schedule"]]))
        stages = pp * plan["virtual"]
        if draw(st.booleans()):
            cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=stages - 1,
                                        max_size=stages - 1)))  # fmt: skip
            ends = [0, *cuts, LAYERS]
            plan["stage_layers"] = tuple(b - a for a, b in zip(ends[:-1], ends[1:], strict=True))
    return tuple(plan.items())


def case_of(plan: Mapping[str, Any], optimizer: str) -> Case:
    config = {"num_layers": LAYERS, "vocab_size": 8, "dropout": 0.3}
    return Case("toy", config, dict(plan), optimizer, masked=0.3)


@functools.lru_cache(maxsize=64)
def train_of(plan: Items, optimizer: str) -> pfx.TrainStep:
    return case_of(dict(plan), optimizer).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step, the same for every plan."""
    return Case("toy", {"vocab_size": 8}, {}, rows=ROWS, seq=4, masked=0.3).batch(step)


def trained(train: pfx.TrainStep, state: Any, first: int, count: int) -> tuple[Any, list[State]]:
    """Train on the batches of some steps; the state, and what there is to see after each."""
    found = []
    for step in range(first, first + count):
        state, metrics = train.step(state, batch(step))
        found.append((pfx.device_get(state), pfx.device_get(metrics)))
    return state, found


def restored(run: Path, train: pfx.TrainStep) -> tuple[Any, int]:
    """The state and the data step, on a plan's own mesh."""
    like = {"train": train.shapes, "data_step": 0}
    specs = {"train": train.state_specs, "data_step": P()}
    found = checkpoint.restore(run, like=like, mesh=train.mesh, specs=specs)
    return found["train"], found["data_step"]


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(
    pair=st.sampled_from([1, 2, 4]).flatmap(lambda m: st.tuples(plans(m), plans(m))),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    k=st.integers(1, 2),
    background=st.booleans(),
)
@hypothesis.settings(max_examples=EXAMPLES)
def test_resume_law(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[Items, Items],
    optimizer: str,
    k: int,
    background: bool,
) -> None:
    run = tmp_path_factory.mktemp("run")
    before, after = (train_of(plan, optimizer) for plan in pair)
    state, seen = trained(before, before.init(pfx.random.key(0)), 0, k)
    save = checkpoint.save_async if background else checkpoint.save
    save(run, k, {"train": state, "data_step": k})
    _, rest = trained(before, state, k, k)  # the steps overwrite what is being saved
    again, step = restored(run, before)
    assert step == k
    _, same = trained(before, again, step, k)
    assert_same_bits(same, rest)
    other, _ = restored(run, after)
    for array, wanted in zip(pfx.tree.leaves(other), pfx.tree.leaves(seen[-1][0]), strict=True):
        assert array.mesh == after.mesh and torch.equal(pfx.device_get(array), wanted)
    _, moved = trained(after, other, step, k)
    if pair[0] == pair[1]:
        assert_same_bits(moved, rest)
    assert_same_run(moved, rest, tolerance(torch.float64))


def test_a_sharded_llama_comes_back_on_one_device(tmp_path: Path) -> None:
    """Gate and up weights, grouped heads, a tied table: dp=2 x tp=2 with ZeRO-3 to one device."""
    plan = {"dp": 2, "tp": 2, "zero": 3}
    train = Case("llama", {"num_layers": 1, "tied": True}, plan, "adamw", torch.float32).train()
    state = train.init(pfx.random.key(1))
    checkpoint.save(tmp_path, 1, {"train": state, "data_step": 1})
    found, _ = restored(tmp_path, train.on_one_device())
    for one, other in zip(pfx.tree.leaves(found), pfx.tree.leaves(state), strict=True):
        assert torch.equal(pfx.device_get(one), pfx.device_get(other))


def test_a_checkpoint_of_another_model_lists_what_differs(tmp_path: Path) -> None:
    train = train_of((("dp", 2), ("zero", 1)), "sgd")
    state = train.init(pfx.random.key(0))
    checkpoint.save(tmp_path, 0, {"train": state, "data_step": 0})
    shapes = pfx.tree.map(lambda leaf: ShapeDtype(leaf.shape, torch.float32), train.shapes)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.restore(tmp_path, like={"train": shapes, "data_step": 0.0})
    lines = str(raised.value).splitlines()
    assert any("['train'].params['table']: f64[8, 4] is saved" in line for line in lines), lines
    assert any(line.endswith("['data_step']: int is saved, float is asked for") for line in lines)
    assert lines[-1] == "  fix: cast=True to convert dtypes"
