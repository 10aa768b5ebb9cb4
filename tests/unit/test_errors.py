"""What users are told of specs that do not fit and of functions that are not pure: texts in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P
from pfx.errors import PfxError, ShardingError, TraceError

MESH = pfx.make_mesh(dp=2, tp=4)
X = torch.arange(32.0).reshape(8, 4)


class State(NamedTuple):
    params: Any
    step: Any


STATE = State({"blocks": {"w": torch.ones(8, 6)}, "head": torch.ones(4, 8)}, torch.tensor(0))


def train(state: State, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": (batch @ state.params["head"]).sum() + state.params["blocks"]["w"].sum()}


def told(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, PfxError)
    return str(caught.value)


def told_of(specs: Any) -> str:
    """What is told of a spec tree for the parameters of `train`."""
    in_specs = (State(specs, P()), P("dp"))
    return told(ShardingError, lambda: pfx.jit(train, mesh=MESH, in_specs=in_specs)(STATE, X))


def line_in(fn: Callable[..., object], offset: int = 1) -> str:
    """The place of a line of a function, as errors write it."""
    return f"unit/test_errors.py:{fn.__code__.co_firstlineno + offset}"


# Specs that do not fit, with the key path of the leaf.


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            P(None, "tp", "dp"),
            """\
jit(train): state.params['blocks']['w'] has fewer dims than its spec.
  P(None, 'tp', 'dp') has 3 entries; the shape (8, 6) has 2 dims.
  mesh: dp=2 tp=4
  fix: use P(None, 'tp')""",
        ),
        (
            P("fsdp"),
            """\
jit(train): state.params['blocks']['w'] names the unknown axis 'fsdp'.
  spec: P('fsdp')
  mesh: dp=2 tp=4
  fix: use one of 'dp', 'tp'""",
        ),
        (
            P("tp", "tp"),
            """\
jit(train): state.params['blocks']['w'] uses the axis 'tp' twice.
  spec: P('tp', 'tp'); an axis can split one dim only.
  mesh: dp=2 tp=4
  fix: drop one 'tp' from this spec""",
        ),
        (
            P(("dp", "dp")),
            """\
jit(train): state.params['blocks']['w'] uses the axis 'dp' twice.
  spec: P(('dp', 'dp')); an axis can split one dim only.
  mesh: dp=2 tp=4
  fix: drop one 'dp' from this spec""",
        ),
        (
            P(None, "tp"),
            """\
jit(train): state.params['blocks']['w'] cannot be split.
  P(None, 'tp') puts dim 1 (size 6) on axis "tp" (size 4).
  6 % 4 = 2: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 1 a multiple of 4 (4 or 8), or drop 'tp' from this spec.""",
        ),
        (
            P(None, ("dp", "tp")),
            """\
jit(train): state.params['blocks']['w'] cannot be split.
  P(None, ('dp', 'tp')) puts dim 1 (size 6) on axis "dp" (size 2) and "tp" (size 4).
  6 % 8 = 6: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 1 a multiple of 8 (8), or drop 'dp', 'tp' from this spec.""",
        ),
        (
            "tp",
            """\
jit(train): state.params['blocks']['w'] has 'tp' where a spec belongs.
  fix: write P('tp')""",
        ),
        (
            4,
            """\
jit(train): state.params['blocks']['w'] has 4 where a spec belongs.
  fix: write a P, such as P('dp')""",
        ),
    ],
)
def test_a_spec_that_does_not_fit_its_leaf(spec: Any, text: str):
    assert told_of({"blocks": {"w": spec}, "head": None}) == text


@pytest.mark.parametrize(
    ("specs", "line"),
    [
        (
            {"blocks": {"v": P()}, "head": P()},
            """state.params['blocks']: keys differ; missing ["['w']"], extra ["['v']"]""",
        ),
        ({"blocks": P()}, """state.params: keys differ; missing ["['head']"], extra []"""),
        (
            {"blocks": [P()], "head": P()},
            "state.params['blocks']: a list where the value is a dict",
        ),
        (
            {"blocks": {"w": [None, "tp"]}, "head": P()},
            "state.params['blocks']['w']: a list where the value is a Tensor of shape (8, 6)",
        ),
    ],
)
def test_a_spec_tree_that_does_not_match_the_parameters(specs: Any, line: str):
    assert told_of(specs) == (
        "jit(train): in_specs do not match the tree that they are for.\n"
        f"  {line}\n"
        "  fix: give one P per leaf, or one P for a whole subtree"
    )


# Functions that are not pure, or that read values; each line is the one that the error names.


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def loops(x: torch.Tensor) -> torch.Tensor:
    while x.max() > 1:
        x = x / 2
    return x


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * float(x[0, 0])


def reads_in_a_scan(x: torch.Tensor) -> torch.Tensor:
    return pfx.scan(lambda c, row: (c * row.sum().item(), None), x[0], x)[0]


def reads_under_grad(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: x.sum() if bool(x.sum() > 0) else -x.sum())(x)


@pytest.mark.parametrize("fn", [branches, loops, reads, reads_in_a_scan, reads_under_grad])
def test_python_that_reads_a_traced_value(fn: Callable[..., Any]):
    assert told(TraceError, lambda: pfx.jit(fn, mesh=MESH)(X)) == (
        f"jit({fn.__name__}): Python at {line_in(fn)} needs the value of a traced tensor "
        "(if, while, int(), float() or .item()).\n"
        "  a step is traced once, from shapes alone; its values are not known then.\n"
        "  fix: torch.where(condition, a, b) for a choice; pfx.scan for a loop"
    )


def picks_rows(x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 4].sum()


def test_a_size_that_depends_on_values():
    assert told(TraceError, lambda: pfx.jit(picks_rows, mesh=MESH)(X)) == (
        f"jit(picks_rows): Python at {line_in(picks_rows)} makes a tensor whose size depends on "
        "values (aten.nonzero.default).\n"
        "  a step is traced once, from shapes alone; its values are not known then.\n"
        "  fix: torch.where(mask, x, 0) in the place of x[mask]; a fixed size and a mask elsewhere"
    )


def adds_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


def drops(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1)


def drops_in_a_scan(x: torch.Tensor) -> torch.Tensor:
    return pfx.scan(lambda c, row: (c + F.dropout(row), None), x[0], x)[0]


def fills_with_noise(x: torch.Tensor) -> torch.Tensor:
    return x + x.new_empty(8, 4).normal_()


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (adds_noise, "randn_like"),
        (drops, "bernoulli"),
        (drops_in_a_scan, "bernoulli"),
        (fills_with_noise, "normal"),
    ],
)
def test_torchs_global_random_numbers_inside_a_step(fn: Callable[..., Any], op: str):
    assert told(TraceError, lambda: pfx.jit(fn, mesh=MESH)(X)) == (
        f"jit({fn.__name__}): aten.{op} at {line_in(fn)} draws from torch's global random number "
        "generator.\n"
        "  a step must be a pure function: equal keys, equal numbers, on any mesh.\n"
        "  fix: pfx.random.normal(key, shape), uniform, bernoulli, … with a key you pass in"
    )


def test_a_mutated_input():
    def step(state: State, batch: torch.Tensor) -> State:
        state.params["blocks"]["w"][0].mul_(2)
        return state

    assert told(TraceError, lambda: pfx.jit(step, mesh=MESH)(STATE, X)) == (
        f"jit(step): mul_ at {line_in(step)} changes the input state.params['blocks']['w'] "
        "in place.\n"
        "  a step must be a pure function of its arguments.\n"
        "  fix: change a copy (.clone() first) or use the out-of-place form (mul), "
        "and return the new value"
    )
