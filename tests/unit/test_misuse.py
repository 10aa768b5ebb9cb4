"""Misuse: each is either told in one text, or works and gives what the plain function gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P
from pfx.errors import MeshError, PfxError, ShardingError, TraceError

MESH = pfx.make_mesh(dp=2, tp=4)
X = torch.arange(32.0).reshape(8, 4)


def identity(x: Any) -> Any:
    return x


def train(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": x.sum()}


def told(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, PfxError)
    return str(caught.value)


def line_in(fn: Callable[..., object], offset: int = 1) -> str:
    """The place of a line of a function, as errors write it."""
    return f"unit/test_misuse.py:{fn.__code__.co_firstlineno + offset}"


HELD = pfx.device_put(X, MESH)


def array(spec: P | None = None) -> pfx.Array:
    return pfx.device_put(X, MESH, spec)


def jitted(fn: Callable[..., Any] = identity, **options: Any) -> Callable[..., Any]:
    return pfx.jit(fn, **{"mesh": MESH} | options)


MISUSE: dict[str, tuple[Callable[[], object], type[PfxError], str]] = {
    "in_specs is a string": (
        lambda: jitted(in_specs="dp")(X),
        ShardingError,
        """\
jit(identity): in_specs is a str, not a tuple with one entry per argument.
  fix: in_specs=(P("dp"), …)""",
    ),
    "in_specs is a dict": (
        lambda: jitted(in_specs={"x": P("dp")})({"x": X}),
        ShardingError,
        """\
jit(identity): in_specs is a dict, not a tuple with one entry per argument.
  fix: in_specs=({'x': P('dp')},)""",
    ),
    "a spec written as a tuple": (
        lambda: jitted(in_specs=("dp", None))(X),
        ShardingError,
        """\
jit(identity): in_specs has 2 entries; the call has 1 arguments.
  in_specs: ('dp', None)
  fix: one entry per argument; None for one that is not split""",
    ),
    "in_specs for fewer arguments": (
        lambda: jitted(lambda x, y: x, in_specs=[P()]).lower(X, X),
        ShardingError,
        """\
jit(<lambda>): in_specs has 1 entries; the call has 2 arguments.
  in_specs: (P(),)
  fix: one entry per argument; None for one that is not split""",
    ),
    "a number in a P": (
        lambda: P("dp", 0),  # type: ignore[arg-type]
        ShardingError,
        """\
P: 0 is not an axis name.
  fix: P("dp", None, ("tp", "cp"))""",
    ),
    "a P in a P": (
        lambda: P(P("dp")),
        ShardingError,
        """\
P: P('dp') is not an axis name.
  fix: P("dp", None, ("tp", "cp"))""",
    ),
    "out_specs for another tree": (
        lambda: jitted(train, out_specs={"loss": P(), "norm": P()})(X),
        ShardingError,
        """\
jit(train): out_specs do not match the tree that they are for.
  output: keys differ; missing [], extra ["['norm']"]
  fix: give one P per leaf, or one P for a whole subtree""",
    ),
    "out_specs that do not fit": (
        lambda: jitted(out_specs={"a": (P("tp"), P("tp"))})({"a": (X, X[:6])}),
        ShardingError,
        """\
jit(identity): output['a'][1] cannot be split.
  P('tp') puts dim 0 (size 6) on axis "tp" (size 4).
  6 % 4 = 2: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 0 a multiple of 4 (4 or 8), or drop 'tp' from this spec.""",
    ),
    "an argument that is text": (
        lambda: jitted(lambda x, mode: x)(X, {"mode": "train"}),
        TraceError,
        """\
jit(<lambda>): mode['mode'] has type str; it is not a tensor or a number.
  the leaves of a pytree are tensors and numbers, or None for nothing.
  fix: keep it outside: close over it, or use functools.partial""",
    ),
    "a result that is a module": (
        lambda: jitted(lambda x: {"x": x, "m": torch.nn.Linear(1, 1)})(X),
        TraceError,
        """\
jit(<lambda>): output['m'] has type Linear; it is not a tensor or a number.
  the leaves of a pytree are tensors and numbers, or None for nothing.
  fix: keep it outside: close over it, or use functools.partial""",
    ),
    "an argument by name": (
        lambda: jitted()(x=X),
        TraceError,
        """\
jit(identity): takes its arguments by position.
  given by name: x
  fix: pass them in order, or bind them first: jit(functools.partial(fn, …), …)""",
    ),
    "a call with a form": (
        lambda: jitted()(pfx.ShapeDtype((8, 4))),
        TraceError,
        """\
jit(identity): x is a ShapeDtype: a form without data.
  fix: call lower(…) with it, or pass a tensor""",
    ),
    "an Array of another mesh": (
        lambda: jitted(mesh=pfx.make_mesh(dp=2))(array(P("tp"))),
        ShardingError,
        """\
jit(identity): x lives on another mesh.
  it is on dp=2 tp=4 (simulated, cpu).
  mesh: dp=2 (simulated, cpu)
  fix: pfx.device_put(pfx.device_get(x), mesh, specs)""",
    ),
    "an Array given to an inner jit": (
        lambda: torch.func.grad(lambda w: jitted(lambda w, x: (w * x).sum())(w, HELD))(X),
        TraceError,
        """\
jit(<lambda>): x is an Array, inside a transform or another jit.
  there a jit-ted function is a part of the outer one, and takes tensors.
  fix: pass the Array to the outermost jit-ted function as an argument""",
    ),
    "an inner jit with a spec that does not fit": (
        lambda: jitted(lambda x: jitted(in_specs=(P("tp"),))(x[:6]))(X),
        ShardingError,
        """\
jit(identity): x cannot be split.
  P('tp') puts dim 0 (size 6) on axis "tp" (size 4).
  6 % 4 = 2: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 0 a multiple of 4 (4 or 8), or drop 'tp' from this spec.""",
    ),
    "no function": (
        lambda: pfx.jit(X, mesh=MESH),  # type: ignore[arg-type]
        TraceError,
        f"jit: {X!r} is not a function.\n  fix: jit(fn, mesh=mesh)",
    ),
    "no mesh": (
        lambda: jitted(mesh={"dp": 2}),
        MeshError,
        """\
jit(identity): mesh={'dp': 2} is not a mesh.
  fix: mesh=pfx.make_mesh(dp=2, tp=4)""",
    ),
    "donate is a bool": (
        lambda: jitted(donate=True),
        TraceError,
        """\
jit(identity): donate=True is not a tuple of positions.
  fix: donate=(0,)""",
    ),
    "donate past the arguments": (
        lambda: jitted(donate=(0, 1))(X),
        ShardingError,
        """\
jit(identity): donate names position 1; the call has 1 arguments, from 0 on.
  fix: drop it from donate""",
    ),
    "device_put of text": (
        lambda: pfx.device_put({"a": "b"}, MESH),
        TraceError,
        """\
device_put: value['a'] has type str; it is not a tensor or a number.
  the leaves of a pytree are tensors and numbers, or None for nothing.
  fix: keep it outside: close over it, or use functools.partial""",
    ),
    "device_put with specs for another tree": (
        lambda: pfx.device_put({"a": X, "b": X}, MESH, {"a": P()}),
        ShardingError,
        """\
device_put: specs do not match the tree that they are for.
  value: keys differ; missing ["['b']"], extra []
  fix: give one P per leaf, or one P for a whole subtree""",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), MISUSE.values(), ids=MISUSE.keys())
def test_misuse_is_told(call: Callable[[], object], kind: type[PfxError], text: str):
    assert told(kind, call) == text


def test_a_donated_argument_given_again():
    step, state = jitted(donate=(0,)), {"w": array(P("dp"))}
    step(state)
    assert told(ShardingError, lambda: step(state)) == (
        "jit(identity): x['w'] was donated to an earlier call.\n"
        "  fix: use the value that call returned, or drop it from donate"
    )


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (lambda x: HELD + 1, "an operator"),
        (lambda x: 1 - HELD, "an operator"),
        (lambda x: HELD[0], "an operator"),
        (lambda x: x * HELD, "an operator"),
        (lambda x: torch.sin(HELD), "sin"),
        (lambda x: F.linear(x, HELD), "linear"),
    ],
)
def test_computing_with_an_array_outside_or_in_a_closure(compute: Callable[..., Any], what: str):
    text = (
        f"{what} at {line_in(compute, 0)}: an Array holds its parts; what computes with it is a "
        "jit-ted function.\n"
        "  fix: pass it to that function as an argument, or pfx.device_get(x) first"
    )
    assert told(TraceError, lambda: compute(X)) == text
    assert told(TraceError, lambda: jitted(compute)(X)) == text


def test_constrain_with_a_list():
    def step(x: torch.Tensor) -> torch.Tensor:
        return pfx.constrain(x, ["dp"])

    assert told(ShardingError, lambda: jitted(step)(X)) == (
        f"constrain at {line_in(step)}: the specs do not match the tree that they are for.\n"
        "  x: a list where the value is a FakeTensor of shape (8, 4)\n"
        "  fix: give one P per leaf, or one P for a whole subtree"
    )


def test_what_the_function_itself_raises_is_left_alone():
    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("w")

    with pytest.raises(KeyError, match="w"):
        jitted(step)(X)


# What looks like misuse, and works: each must give what the plain function gives.

SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0])
LAYER = torch.nn.Linear(4, 2)


WORKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "specs in a list": (lambda x, y: x + y, (X, X), [P("dp"), P("tp")]),
    "one P for all arguments": (lambda x, y: x + y, (X, X), P("dp")),
    "numpy": (lambda x: x * 2, (np.arange(8, dtype=np.int32),), (P("dp"),)),
    "numbers": (lambda x, a, b, c: (x * a + b, c), (X, 2, 0.5, True), None),
    "None among the leaves": (lambda t: t, ({"a": X, "b": None, "c": [None, X]},), (P("dp"),)),
    "None for an argument": (lambda x, mask: x if mask is None else x * mask, (X, None), (P(), P())),
    "numbers and None returned": (lambda x: {"x": x, "n": 3, "none": None}, (X,), (P("dp"),)),
    "nothing returned": (lambda x: None, (X,), None),
    "no arguments": (lambda: SCALE * 2, (), ()),
    "a closure over a tensor": (lambda x: x * SCALE, (X,), (P("dp", "tp"),)),
    "a closure over a module": (lambda x: LAYER(x).detach(), (X,), (P("dp"),)),
    "a literal": (lambda x: x * torch.tensor([1.0, 0.0, 1.0, 0.0]), (X,), (P("dp", "tp"),)),
    "functools.partial": (functools.partial(torch.add, alpha=2), (X, X), P("dp")),
    "an argument given twice": (lambda x, y: (x, y, x + y), (X, X), (P("dp"), P("tp"))),
    "a tensor that wants its gradient": (lambda x: x * 2, (X.clone().requires_grad_(),), None),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "specs"), WORKS.values(), ids=WORKS.keys())
def test_what_looks_like_misuse_works(fn: Callable[..., Any], args: Any, specs: Any):
    found = pfx.device_get(jitted(fn, in_specs=specs, check=True)(*args))
    expected = fn(*[torch.as_tensor(a) if isinstance(a, (np.ndarray, float)) else a for a in args])
    assert pfx.tree.structure(found) == pfx.tree.structure(expected)
    for one, other in zip(pfx.tree.leaves(found), pfx.tree.leaves(expected), strict=True):
        other = torch.as_tensor(other).detach()
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def inner_or_plain(*, inner: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    doubled = lambda x: x * 2
    if inner:
        doubled = jitted(doubled, in_specs=(P(None, "tp"),), out_specs=P(None, "dp"))

    def step(x: torch.Tensor) -> Any:
        loss = lambda x: (doubled(x) ** 2).sum()
        _, rows = pfx.scan(lambda c, row: (c, doubled(row[None])), x[0], x)
        return (
            doubled(x) + 1,
            torch.func.grad(loss)(x),
            torch.vmap(torch.func.grad(loss))(x[:, None]),
            rows,
        )

    return step


def test_a_jitted_function_inside_another():
    found = pfx.device_get(jitted(inner_or_plain(inner=True), in_specs=(P("dp"),), check=True)(X))
    for one, other in zip(found, inner_or_plain(inner=False)(X), strict=True):
        assert torch.equal(one, other)
    (gathered,) = jitted(lambda x: [jitted(out_specs=P(None, "tp"))(x)])(X)
    assert gathered.spec == P(None, "tp")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for jacfwd
def test_a_jitted_function_under_transforms_of_torch_func():
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sum()

    compiled = jitted(loss, in_specs=(P(None, "tp"), P("dp")), out_specs=P())
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(transform(compiled)(w, x), transform(loss)(w, x))
    ws = torch.stack([w, -w])
    by_row = torch.vmap(torch.func.grad(compiled), in_dims=(0, None))
    assert torch.equal(by_row(ws, x), torch.vmap(torch.func.grad(loss), in_dims=(0, None))(ws, x))
