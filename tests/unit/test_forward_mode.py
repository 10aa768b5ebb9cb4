"""Forward mode through `scan` and `remat`, against the Python loop and the plain function.

Law: under every nesting of jvp, grad and vmap, eagerly, closed over, inside another body and
compiled, the derivatives are those of the loop written out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import pfx
from pfx.lax.label import label
from tests.unit.test_scan import (
    REMAT,
    ROWS,
    WIDTH,
    Fn,
    assert_same,
    both,
    constant,
    every_form,
    every_remat,
    inputs,
    integers,
    nested,
    plain,
    reversed_,
    unrolled,
    unused,
)

# torch's own, when it loads its forward rules
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def directions(seed: int) -> tuple[torch.Tensor, ...]:
    """One tangent for each of `inputs`."""
    torch.manual_seed(seed)
    return tuple(torch.randn_like(value) for value in inputs())


X, W, B = POINT = inputs()
DX, _, DB = ALONG = directions(1)
ACROSS = directions(2)


def forms(*which: Fn) -> Any:
    """Run a test for each of some forms."""
    return pytest.mark.parametrize("form", which, ids=lambda form: form.__name__)


def smooth(form: Fn) -> tuple[int, ...]:
    """The arguments that a form depends on."""
    return (1, 2) if form is constant else (0, 1, 2)


def in_b(form: Fn) -> Fn:
    """The form as a function of what its body closes over."""
    return lambda b: form(X, W, b)


@every_remat
@every_form
def test_jvp(form: Fn, remat: Any) -> None:
    found, expected = both(form, remat)
    assert_same(jvp(found, POINT, ALONG), jvp(expected, POINT, ALONG))


@forms(plain, reversed_, nested, integers, unused, constant)
def test_jvp_of_jvp(form: Fn) -> None:
    second = lambda f: jvp(lambda *args: jvp(f, args, ALONG)[1], POINT, ACROSS)
    found, expected = both(form, None)
    assert_same(second(found), second(expected))


@forms(plain, reversed_, nested, integers, unused, constant)
def test_forward_over_reverse(form: Fn) -> None:
    found, expected = both(form, None)
    pushed = lambda f: jvp(grad(f, smooth(form)), POINT, ALONG)[1]
    assert_same(pushed(found), pushed(expected))


@forms(plain, integers, unused, constant)
def test_reverse_over_forward(form: Fn) -> None:
    found, expected = both(form, "full" if form is unused else None)
    pulled = lambda f: grad(lambda *args: jvp(f, args, ALONG)[1], smooth(form))(*POINT)
    assert_same(pulled(found), pulled(expected))


@forms(plain, reversed_, integers, unused)
def test_batches_of_points_and_of_tangents(form: Fn) -> None:
    found, expected = both(form, None)
    xs = torch.stack([X, X.flip(0)])
    points = lambda f: vmap(lambda x: jvp(f, (x, W, B), ALONG)[1])(xs)
    assert_same(points(found), points(expected))
    many = [torch.stack(pair) for pair in zip(ALONG, ACROSS, strict=True)]
    tangents = lambda f: vmap(lambda *t: jvp(f, POINT, t)[1])(*many)
    assert_same(tangents(found), tangents(expected))


@every_remat
@forms(plain, reversed_, unused)
def test_hessian(form: Fn, remat: Any) -> None:
    found, expected = both(form, remat)
    assert_same(hessian(in_b(found))(B), hessian(in_b(expected))(B))


@pytest.mark.parametrize("outer", [jacfwd, jacrev], ids=lambda f: f.__name__)
def test_a_jacobian_of_a_forward_jacobian(outer: Any) -> None:
    found, expected = both(plain, None)
    assert_same(outer(jacfwd(in_b(found)))(B), outer(jacfwd(in_b(expected)))(B))


Scalar = Callable[[torch.Tensor], torch.Tensor]
STEPS: dict[str, Callable[[Scalar], Scalar]] = {
    "forward": lambda f: lambda b: jvp(f, (b,), (DB,))[1],
    "reverse": lambda f: lambda b: grad(f)(b) @ DB,
    "batched": lambda f: lambda b: vmap(f)(torch.stack([b, b / 2])).sin().sum(),
    "closed": lambda f: lambda b: jvp(lambda s: s * f(b * s), (b.sum(),), (b[0],))[1],
}


@settings(max_examples=8)
@given(
    order=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=2),
    form=st.sampled_from([plain, unused]),
    remat=st.sampled_from(REMAT),
)
def test_any_order_of_transforms(order: list[str], form: Fn, remat: Any) -> None:
    found, expected = (in_b(f) for f in both(form, remat))
    for step in order:
        found, expected = STEPS[step](found), STEPS[step](expected)
    torch.testing.assert_close(found(B), expected(B), rtol=1e-9, atol=1e-9)


# Bodies ---------------------------------------------------------------------------------------------


def rematerialized_body(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    return scan(remat(lambda c, w: (torch.tanh(w @ c + v), c * v)), v, w)


def rematerialized_scan(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    return remat(lambda v: scan(lambda c, w: (torch.tanh(w @ c + v), c * v), v, w))(v)


def nested_remat(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    return remat(lambda u: remat(lambda t: torch.sin(w[0] @ t) * u * v)(u * v))(v * v)


def constrained(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    """Where a value lives and what it is called say nothing about its derivatives."""

    def body(c: Any, w: Any) -> Any:
        c = pfx.constrain(torch.tanh(w @ c + v), pfx.P())
        return pfx.constrain(c * v, "embed"), label(c * v, "gradient")

    return scan(body, v, w)


def forward_mode_inside(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    """The body takes a forward derivative itself, along a closed-over value."""
    return scan(lambda c, w: jvp(lambda q: torch.tanh(w @ q) * v, (c,), (v,)), v, w)


def integer_carry(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    def body(carry: Any, i: Any) -> Any:
        count, c = carry
        return (count + 1, torch.where(count > 1, c * v, (w[0] @ c).sin() * i)), (c, i * 2)

    start = (torch.tensor(0), v)
    (_, c), (cs, _) = scan(body, start, torch.arange(3), reverse=True)
    return c, cs


def read_only(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    """Nothing but a closed-over value moves; a y is that value, the carry is an integer."""
    return scan(lambda c, _: (c + 1, v), torch.tensor(0), None, length=2)[1] ** 2


def expanded(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    """Values that overlap themselves in memory, which a tangent must not."""
    start = torch.zeros(1, dtype=v.dtype).expand(WIDTH)
    c, _ = scan(lambda c, w: ((w @ v).sum().expand(WIDTH), None), start, w)
    fixed, cube = remat(lambda v: (torch.ones(1, dtype=v.dtype).expand(WIDTH), v**3))(v)
    return c * v * fixed, cube


def library(scan: Any, remat: Any, v: Any, w: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        c = torch.nn.functional.layer_norm(w @ c, (WIDTH,), v, v)
        return c, torch.softmax(c, 0)

    return scan(body, v, w)


BODIES = [
    rematerialized_body,
    rematerialized_scan,
    nested_remat,
    constrained,
    forward_mode_inside,
    integer_carry,
    read_only,
    expanded,
    library,
]
total = lambda out: sum(leaf.sin().sum() for leaf in pfx.tree.leaves(out))
DERIVATIVES: dict[str, Callable[[Fn, torch.Tensor], Any]] = {
    "jvp": lambda f, v: jvp(f, (v,), (DB,)),
    "jvp of jvp": lambda f, v: jacfwd(jacfwd(lambda v: total(f(v))))(v),
    "hessian": lambda f, v: hessian(lambda v: total(f(v)))(v),
}


@pytest.mark.parametrize("number", range(len(BODIES)), ids=lambda i: BODIES[i].__name__)
def test_bodies(number: int) -> None:
    """A derivative each, in turns; all of them with PFX_EXAMPLES."""
    body, each = BODIES[number], list(DERIVATIVES.values())
    for derivative in each if "PFX_EXAMPLES" in os.environ else [each[number % len(each)]]:
        check_body(body, derivative)


def check_body(body: Any, derivative: Any) -> None:
    found = derivative(lambda v: body(pfx.scan, pfx.remat, v, W), B)
    expected = derivative(lambda v: body(unrolled, lambda f: f, v, W), B)
    assert_same(found, expected)


def test_integer_outputs_have_no_tangent() -> None:
    b, x = torch.ones(2), torch.arange(3)
    form = lambda b: pfx.scan(lambda c, i: (c.sin(), (i, c > 0)), b, x)
    (_, (index, positive)), (tangent, (d_index, d_positive)) = jvp(form, (b,), (b,))
    assert index.tolist() == [0, 1, 2] and bool(positive.all()) and bool(tangent.all())
    assert not d_index.any() and not d_positive.any()
    assert not jvp(pfx.remat(lambda b: (b, x)), (b,), (b,))[1][1].any()


@pytest.mark.parametrize("transform", [grad, jacfwd], ids=lambda f: f.__name__)
def test_a_transform_that_sees_no_operand_is_passed_through(transform: Any) -> None:
    """The loop belongs to an outer level; the inner one maps or differentiates something else."""
    scales = torch.tensor([1.0, 2.0], dtype=B.dtype)

    def outside(f: Fn) -> Any:
        mapped = lambda b: vmap(lambda s: s * f(b) ** 2)(scales).sum()
        return transform(mapped)(B), transform(lambda b: jacfwd(lambda s: s * f(b))(b[0]))(B)

    found, expected = both(plain, None)
    assert_same(outside(in_b(found)), outside(in_b(expected)))


# Compiled -------------------------------------------------------------------------------------------


@every_remat
@forms(plain, unused)
def test_compiled_hessian(form: Fn, remat: Any) -> None:
    """Four loops on a mesh, whatever the length: forward, backward, and the tangents of each."""
    found, expected = both(form, remat)
    step = pfx.jit(
        hessian(in_b(found)), mesh=pfx.make_mesh(dp=2), in_specs=(pfx.P("dp"),), check=True
    )
    assert_same(pfx.device_get(step(B)), hessian(in_b(expected))(B))
    loops = [instr for instr in step.lower(B).instrs if type(instr).__name__ == "LoopInstr"]
    assert [loop.reverse for loop in loops] == [False, False, True, True]


def test_compiled_jvp_with_the_rows_split() -> None:
    def both_ways(scan: Any) -> Fn:
        f = lambda x: pfx.remat(lambda x: plain(scan, None, x, W, B))(x)
        return lambda x: (*jvp(f, (x,), (DX,)), jvp(grad(f), (x,), (x,))[1])

    step = pfx.jit(
        both_ways(pfx.scan), mesh=pfx.make_mesh(dp=ROWS), in_specs=(pfx.P("dp"),), check=True
    )
    assert_same(pfx.device_get(step(X)), both_ways(unrolled)(X))
