"""Plans answer with specs: which axis splits which dim of which parameter, and what stays whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
from models import gpt, llama
from pfx import P, Plan, ShapeDtype
from pfx.errors import MeshError, ShardingError
from pfx.lax.remat_loops import remat_loops, remat_of_loops
from pfx.placement import Placement
from pfx.spec import layout_of
from tests.common import Case

AXES = {"w": "layers embed mlp", "table": "vocab embed", "b": "mlp", "scale": "embed", "t": ""}
SHAPES = {
    "w": ShapeDtype((3, 8, 12)),
    "table": ShapeDtype((16, 8)),
    "b": ShapeDtype((12,)),
    "scale": ShapeDtype((8,)),
    "t": ShapeDtype(()),
}


def specs_of(plan: Plan, shapes: Any = SHAPES, axes: Any = AXES) -> tuple[Any, Any, list[str]]:
    """Compute specs, sharded specs, and what both report."""
    mesh, lines = plan.mesh(kind="abstract"), []
    return (
        plan.compute_specs(axes, shapes, mesh, lines),
        plan.sharded_specs(axes, shapes, mesh, lines),
        lines,
    )


def test_names_become_axes() -> None:
    compute, _, lines = specs_of(Plan(tp=4))
    assert compute == {
        "w": P(None, None, "tp"),
        "table": P("tp", None),
        "b": P("tp"),
        "scale": P(None),
        "t": P(),
    }
    assert lines == []


def test_zero_splits_the_largest_whole_dim_over_dp_and_never_the_stack() -> None:
    _, sharded, lines = specs_of(Plan(dp=2, tp=4))
    assert sharded == {
        "w": P(None, "dp", "tp"),
        "table": P("tp", "dp"),
        "b": P("tp"),  # a device's 3 rows do not divide
        "scale": P("dp"),
        "t": P(),
    }
    assert lines == [
        "params['b']: no dim of (12,) as P('tp') divides by dp=2: ZeRO keeps it whole",
        "params['t']: no dim of () as P() divides by dp=2: ZeRO keeps it whole",
    ]


def test_zero_splits_a_dim_further_when_no_whole_one_divides() -> None:
    _, sharded, _ = specs_of(Plan(dp=3, tp=2))
    assert sharded["b"] == P(("tp", "dp"))
    assert sharded["w"] == P(None, None, ("tp", "dp"))  # embed is 8
    assert sharded["scale"] == P(None)


def test_the_larger_of_two_whole_dims_is_split() -> None:
    axes, shapes = {"w": "embed mlp"}, {"w": ShapeDtype((8, 12))}
    assert specs_of(Plan(dp=4), shapes, axes)[1] == {"w": P(None, "dp")}
    assert specs_of(Plan(dp=8), shapes, axes)[1] == {"w": P("dp", None)}  # 12 % 8


def test_a_parameter_that_dp_splits_already_is_left_alone() -> None:
    compute, sharded, _ = specs_of(Plan(dp=2, names={"embed": "dp"}))
    assert compute["scale"] == sharded["scale"] == P("dp")
    assert compute["w"] == sharded["w"] == P(None, "dp", None)


def test_own_names_replace_and_add() -> None:
    plan = Plan(tp=2, axes={"x": 3}, names={"mlp": ("x", "tp"), "vocab": None, "experts": "x"})
    assert str(plan.mesh(kind="abstract")) == "dp=1 tp=2 x=3"
    compute, _, _ = specs_of(plan)
    assert compute["w"] == P(None, None, ("x", "tp")) and compute["table"] == P(None, None)
    assert plan.logical_names["experts"] == "x" and plan.logical_names["heads"] == "tp"


@pytest.mark.parametrize("on", [False, True])
def test_sequence_parallelism_is_one_name(on: bool) -> None:
    names = Plan(tp=2, sequence_parallel=on).logical_names
    assert names["seq"] == ("tp" if on else None)
    assert names["tokens"] is None


def test_what_does_not_divide_stays_whole_and_is_reported() -> None:
    compute, _, lines = specs_of(Plan(tp=5))
    assert compute["w"] == P(None, None, None)
    assert lines == [
        """params['b']: "mlp" (size 12) does not divide by tp=5: whole""",
        """params['table']: "vocab" (size 16) does not divide by tp=5: whole""",
        """params['w']: "mlp" (size 12) does not divide by tp=5: whole""",
    ]


def test_an_axis_splits_one_dim_of_a_parameter() -> None:
    compute, _, lines = specs_of(Plan(tp=4, names={"embed": "tp"}))
    assert compute["w"] == P(None, "tp", None)
    assert """params['w']: "layers embed mlp": 'mlp' stays whole, tp is already used""" in lines


@pytest.mark.parametrize("family", [gpt, llama], ids=["gpt", "llama"])
@given(dp=st.integers(1, 6), tp=st.integers(1, 6), zero=st.integers(0, 3))
def test_every_spec_fits_every_parameter(family: Any, dp: int, tp: int, zero: int) -> None:
    """Whatever the sizes, the specs are legal, and ZeRO's split each parameter at least as much."""
    sizes = {"num_layers": 3, "embed_dim": 18, "num_heads": 6, "mlp_dim": 20, "vocab_size": 50,
             "max_seq_len": 9}  # fmt: skip
    if family is llama:
        sizes |= {"num_kv_heads": 3, "head_dim": 4}
    config = family.Config(**sizes)
    shapes = pfx.eval_shape(lambda key: family.init(config, key), pfx.random.key(0))
    plan = Plan(dp=dp, tp=tp, zero=zero)
    mesh = plan.mesh(kind="abstract")
    compute, sharded, lines = specs_of(plan, shapes, family.axes(config))
    is_spec = lambda node: isinstance(node, P)
    pairs, _ = pfx.tree.flatten_with_path(shapes)
    for (path, leaf), a, b in zip(
        pairs, pfx.tree.leaves(compute, is_spec), pfx.tree.leaves(sharded, is_spec), strict=True
    ):
        where = pfx.tree.path_string(path)
        before, after = (layout_of(spec, leaf.shape, mesh, where) for spec in (a, b))
        assert all(y[: len(x)] == x for x, y in zip(before.dims, after.dims, strict=True))
        gained = mesh.count(after.axes) // mesh.count(before.axes)
        kept_whole = any(where in line and "ZeRO" in line for line in lines)
        assert gained == (1 if kept_whole else dp)
        assert "dp" not in after.dims[0] or "blocks" not in where


def test_a_plan_is_a_value() -> None:
    assert Plan(dp=2, names={"embed": "dp"}) == Plan(dp=2, names={"embed": "dp"})
    with pytest.raises(AttributeError):
        Plan().dp = 2  # type: ignore[misc]


# Errors -----------------------------------------------------------------------------------------


def step_of(plan: Plan, *, axes: Any = None, mesh: Any = None) -> pfx.train.TrainStep:
    params = {"w": torch.ones(4, 6)}
    return pfx.make_train_step(
        lambda params, batch, key: ((batch @ params["w"]).sum(), torch.tensor(1.0), {}),
        pfx.optim.sgd(0.1),
        plan,
        init=lambda key: pfx.tree.map(torch.clone, params),
        axes=axes or {"w": "embed mlp"},
        mesh=mesh,
    )


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no stage": (
        lambda: Plan(zero=4),
        """\
Plan: zero=4 is no ZeRO stage.
  fix: 0, 1, 2 or 3""",
    ),
    "no devices": (lambda: Plan(tp=0), "Plan: tp=0 must be an integer of at least 1."),
    "half a microbatch": (
        lambda: Plan(microbatches=1.5),  # type: ignore[arg-type]
        "Plan: microbatches=1.5 must be an integer of at least 1.",
    ),
    "an unknown axis": (
        lambda: Plan(tp=2, axes={"cp": 2}, names={"seq": ("tp", "pc")}),
        """\
Plan: names['seq']=('tp', 'pc') mentions the unknown axis 'pc'.
  axes of the plan: dp, tp, cp
  fix: axes={"pc": 2}, or one of these""",
    ),
    "dp twice": (
        lambda: Plan(axes={"dp": 4}),
        """\
Plan: axes['dp'] is an axis of every plan.
  fix: Plan(dp=4)""",
    ),
    "another mesh": (
        lambda: step_of(Plan(dp=2), mesh=pfx.make_mesh(dp=4, tp=1)),
        """\
make_train_step: mesh dp=4 tp=1 is not the plan's.
  plan: dp=2 tp=1
  fix: mesh=plan.mesh(kind=..., device=...), or other sizes in the plan""",
    ),
    "names of another rank": (
        lambda: step_of(Plan(), axes={"w": "embed"}).placement.computed,
        """\
axes: params['w'] names 1 dims, the parameter has 2.
  axes: 'embed'
  shape: (4, 6)""",
    ),
    "an unknown name": (
        lambda: step_of(Plan(), axes={"w": "embed mpl"}).placement.computed,
        """\
constrain('embed mpl'): the logical name 'mpl' is not mapped to anything.
  known names: batch, embed, head_dim, heads, kv_heads, layers, mlp, positions, qkv, seq, tokens, vocab
  fix: add names={"mpl": "dp"} or "mpl": None to the plan""",
    ),
    "a batch that cannot be cut": (
        lambda: step_of(Plan(dp=2, microbatches=3)).lower(torch.ones(8, 4)),
        """\
train step: batch cannot be cut into equal parts.
  dim 0 (size 8) over 3 microbatches x 2 data-parallel devices; 8 % 6 = 2.
  mesh: dp=2 tp=1
  fix: use a batch of 12, padded with label -100""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_texts(name: str) -> None:
    call, text = ERRORS[name]
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == text


def test_axes_that_do_not_match_the_parameters_name_the_path() -> None:
    with pytest.raises(ShardingError) as caught:
        _ = step_of(Plan(), axes={"v": "embed mlp"}).placement.computed
    assert str(caught.value).startswith("make_train_step: axes do not match the parameters.")
    assert "'w'" in str(caught.value)


def test_a_size_below_one_is_an_error_of_the_mesh() -> None:
    with pytest.raises(MeshError):
        Plan(axes={"x": 0}).mesh()


def test_the_plans_mesh_may_live_elsewhere() -> None:
    plan = Plan(dp=2, tp=2, axes={"x": 2})
    step = step_of(plan, mesh=plan.mesh(kind="abstract"))
    program = step.lower(torch.ones(4, 4))
    assert program.mesh.kind == "abstract" and math.prod(program.mesh.shape.values()) == 8


def test_a_logical_constraint_without_names_is_reported() -> None:
    step = pfx.jit(lambda x: pfx.constrain(x, "batch embed") * 2, mesh=pfx.make_mesh(dp=2))
    program = step.lower(torch.ones(4, 3))
    assert program.report == [
        "constrain(x, 'batch embed'): jit has no names=, so it constrains nothing"
    ]


def test_a_plan_says_what_is_recomputed_where_the_model_does_not() -> None:
    case = Case("gpt", {"num_layers": 3}, {"dp": 2}, "sgd", torch.float32, rows=32)
    plan_says = replace(case, plan={**case.plan, "remat": "full"})
    model_says = replace(case, config={**case.config, "remat": "full"})
    none_says = replace(plan_says, config={**case.config, "remat": "none"})
    saved, recomputed, same, kept = (
        c.train().lower(c.batch(0)) for c in (case, plan_says, model_says, none_says)
    )
    assert recomputed.text() == same.text() != saved.text() == kept.text()
    assert recomputed.memory().peak < saved.memory().peak
    with pytest.raises(ShardingError) as caught:
        pfx.Plan(remat="some")
    assert str(caught.value) == (
        "Plan: remat='some' is no way to rematerialize.\n  fix: \"full\" or None"
    )


def test_a_loop_in_a_body_keeps_what_it_saves() -> None:
    def outer(x: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        seen.append(remat_of_loops())
        return pfx.scan(lambda c, _: (torch.sin(c), None), x, length=2)[0], None

    seen: list[str | None] = []
    with remat_loops("full"):
        pfx.scan(outer, torch.ones(2), length=2)
        assert remat_of_loops() == "full"
    assert seen == [None]


def test_state_mirrors_the_parameter_at_the_end_of_its_path_with_rows_and_columns_apart() -> None:
    """A name may be that of several parameters; a mean over a dim leaves one of it."""
    axes = {"w": "vocab embed", "z": {"w": "embed vocab"}}
    sizes = ShapeDtype((8, 4))
    placement = Placement(
        Plan(tp=2), axes, {"w": sizes, "z": {"w": sizes}}, Plan(tp=2).mesh(kind="abstract")
    )
    shapes = lambda shape: {"w": ShapeDtype(shape), "z": {"w": ShapeDtype(shape)}}
    found = placement.mirrored({
        "mean": shapes((8, 4)), "row": shapes((8, 1)), "column": shapes((1, 4)),
        "count": ShapeDtype(()), "other": shapes((4, 8)),
    })  # fmt: skip
    assert found == {
        "mean": {"w": P("tp", None), "z": {"w": P(None, "tp")}},
        "row": {"w": P("tp", None), "z": {"w": P(None, None)}},
        "column": {"w": P(None, None), "z": {"w": P(None, "tp")}},
        "count": P(),
        "other": {"w": P(), "z": {"w": P()}},
    }


@pytest.mark.parametrize(
    ("plan", "kept", "updated", "used"),
    [
        (Plan(pp=2), P("pp", None), P("pp", None), P(None, None)),
        (Plan(pp=2, dp=2), P(None, "pp"), P(None, "pp"), P(None, None)),
        (Plan(pp=2, dp=2, zero=1), P(None, "pp"), P("dp", "pp"), P(None, None)),
        (Plan(pp=2, dp=2, zero=3), P("dp", "pp"), P("dp", "pp"), P("dp", None)),
        (Plan(pp=2, dp=2, tp=2), P(("tp", "pp"), None), P(("tp", "pp"), None), P("tp", None)),
    ],
    ids=["alone", "beside dp", "zero 1", "zero 3", "beside tp"],
)
def test_what_stages_share_is_split_over_them_while_it_is_kept(
    plan: Plan, kept: P, updated: P, used: P
) -> None:
    axes, table = {"table": "vocab embed"}, {"table": ShapeDtype((16, 8))}
    placement = Placement(plan, axes, table, plan.mesh(kind="abstract"))
    assert placement.kept["table"] == kept
    assert placement.updated["table"] == updated
    assert placement.used["table"] == used
    assert placement.report == []
