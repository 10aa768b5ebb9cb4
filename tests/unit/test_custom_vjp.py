"""`custom_vjp`: the rule is taken by the innermost derivative, under every transform, and checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import pfx
from pfx import P
from pfx.errors import PfxError
from pfx.lax.custom_vjp import custom_vjp
from pfx.lax.stop_gradient import stop_gradient

# The first use of forward mode in a process makes torch warn of its own torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
Fn = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


X, W, B = draw(4), draw(4, 4), draw(4, seed=1)
ROWS, STACK = draw(6, 4), 0.5 * draw(3, 4, 4)


def plain(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.sin(p["w"] @ x + p["b"]) * x


@custom_vjp
def ruled(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return plain(p, x)


def ruled_fwd(p: Any, x: Any) -> Any:
    y = p["w"] @ x + p["b"]
    out = torch.sin(y) * x
    # An argument, an output, something new, and what is no tensor.
    return out, {"p": p, "out": out, "y": (y, x, None), "name": "sin", "sign": 1}


def ruled_bwd(kept: Any, c: torch.Tensor) -> Any:
    (y, x, none), w = kept["y"], kept["p"]["w"]
    assert none is None and kept["name"] == "sin"
    inner = c * x * torch.cos(y)
    # torch.sin(y) once by the output: the derivative of the rule then passes through both.
    sine = kept["sign"] * kept["out"] / x
    return {"w": torch.outer(inner, x), "b": inner}, c * sine + w.T @ inner


ruled.defvjp(ruled_fwd, ruled_bwd)


def of(f: Fn) -> Fn:
    """A scalar function of (w, b, x)."""
    return lambda w, b, x: (f({"w": w, "b": b}, x) ** 2).sum()


def rows_of(f: Fn) -> Fn:
    return lambda w, b, rows: (vmap(f, (None, 0))({"w": w, "b": b}, rows) ** 2).sum()


def scan_of(f: Fn) -> Fn:
    body = lambda b: lambda c, w: (f({"w": w, "b": b}, c), c)
    return lambda stack, b, x: (pfx.scan(body(b), x, stack)[0] ** 2).sum()


def remat_of(f: Fn) -> Fn:
    return of(pfx.remat(f))


def total(f: Fn) -> Fn:
    return lambda *args: sum(leaf.sin().sum() for leaf in pfx.tree.leaves(f(*args)))


# Scalar functions built on f, with arguments for them.
FUNCTIONS: dict[str, tuple[Callable[[Fn], Fn], tuple[torch.Tensor, ...]]] = {
    "plain": (of, (W, B, X)),
    "vmap": (rows_of, (W, B, ROWS)),
    "scan": (scan_of, (STACK, B, X)),
    "remat": (remat_of, (W, B, X)),
    "scan of remat": (lambda f: scan_of(pfx.remat(f)), (STACK, B, X)),
    "remat of vmap": (lambda f: pfx.remat(rows_of(f)), (W, B, ROWS)),
    "vmap of scan": (lambda f: lambda s, b, r: vmap(scan_of(f), (None, None, 0))(s, b, r).sum(),
                     (STACK, B, ROWS)),
}  # fmt: skip
ALL = (0, 1, 2)
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "value": lambda f: f,
    "grad": lambda f: grad(f, ALL),
    "vjp": lambda f: lambda *args: vjp(f, *args)[1](torch.ones((), dtype=torch.float64)),
    "jacrev": lambda f: jacrev(f, ALL),
    "grad of grad": lambda f: grad(total(grad(f, ALL)), ALL),
    "vmap of grad": lambda f: lambda w, b, x: vmap(grad(f, ALL), (None, 0, None))(
        w, torch.stack([b, 2 * b]), x),
    "grad of vmap of grad": lambda f: grad(lambda w, b, x: total(
        vmap(grad(f, ALL), (None, 0, None)))(w, torch.stack([b, 2 * b]), x), ALL),
    "vmap of grad of grad": lambda f: lambda w, b, x: vmap(
        grad(total(grad(f, ALL)), ALL), (None, 0, None))(w, torch.stack([b, 2 * b]), x),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 2), 2),
}  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(pfx.tree.leaves(found), pfx.tree.leaves(expected), strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# Each transform with the function itself, and the telling ones with every way to wrap it.
CELLS = [("plain", transform) for transform in TRANSFORMS] + [
    (function, transform)
    for function in FUNCTIONS
    for transform in ("grad", "grad of grad", "vmap of grad")
    if function != "plain"
]


@pytest.mark.parametrize(("function", "transform"), CELLS)
def test_with_the_true_derivative_it_is_the_plain_function(function: str, transform: str) -> None:
    (build, args), apply = FUNCTIONS[function], TRANSFORMS[transform]
    assert_same(apply(build(ruled))(*args), apply(build(plain))(*args))


@pytest.mark.parametrize("function", ["plain", "vmap", "remat of vmap"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: hessian(f, 1),
        lambda f: jacfwd(jacfwd(jacrev(f, 2), 2), 2),
        lambda f: lambda *args: jvp(grad(f, ALL), args, tuple(torch.sin(a) for a in args)),
    ],
    ids=["hessian", "forward twice", "a Hessian-vector product"],
)
def test_forward_mode_over_the_rule(function: str, transform: Any) -> None:
    build, args = FUNCTIONS[function]
    if function.startswith("remat"):
        build = lambda f: lambda *a: pfx.remat(grad(rows_of(f), ALL))(*a)[2].sin().sum()
        transform = TRANSFORMS["grad"]  # a rule already applied, in a body that is differentiated
    assert_same(transform(build(ruled))(*args), transform(build(plain))(*args))


@pytest.mark.parametrize("function", ["plain", "vmap", "scan", "remat of vmap"])
@pytest.mark.parametrize("transform", ["value", "grad of grad"])
def test_compiled_for_a_mesh(function: str, transform: str) -> None:
    (build, args), apply = FUNCTIONS[function], TRANSFORMS[transform]
    spec = P("dp") if args[2].ndim == 2 else P()
    jitted = pfx.jit(
        apply(build(ruled)), mesh=pfx.make_mesh(dp=2), in_specs=(P(), P(), spec), check=True
    )
    assert_same(pfx.device_get(jitted(*args)), apply(build(plain))(*args))


@pytest.mark.parametrize("f", [ruled, plain])
def test_plain_autograd_and_its_second_derivative(f: Fn) -> None:
    args = [a.clone().requires_grad_() for a in (W, B, X)]
    first = torch.autograd.grad(of(f)(*args), args, create_graph=True)
    assert_same([g.detach() for g in first], grad(of(plain), ALL)(W, B, X))
    outer = sum(g.sin().sum() for g in first) + of(f)(*args)
    expected = grad(lambda *a: total(grad(of(plain), ALL))(*a) + of(plain)(*a), ALL)(W, B, X)
    assert_same(torch.autograd.grad(outer, args), expected)


# A rule that is not the derivative: it shows who takes it.


def scaled(factor: float, *, forward: str = "plain") -> Fn:
    """The identity, whose backward rule multiplies by `factor`."""

    @custom_vjp
    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    of_itself = forward == "itself"
    f.defvjp(lambda x: (f(x) if of_itself else x, None), lambda _, c: (factor * c,))
    return f


ONE = torch.tensor(1.5, dtype=torch.float64)


def test_the_rule_is_applied_once_by_the_derivative_that_meets_it() -> None:
    f = scaled(7.0)
    square = lambda x: f(x) ** 2
    rows = torch.linspace(1, 2, 4, dtype=torch.float64)
    first = 7 * 2 * rows
    assert float(f(ONE)) == 1.5 and float(grad(square)(ONE)) == 21.0
    torch.testing.assert_close(vmap(grad(square))(rows), first)
    torch.testing.assert_close(grad(lambda r: vmap(square)(r).sum())(rows), first)
    torch.testing.assert_close(jacrev(vmap(square))(rows), torch.diag(first))
    torch.testing.assert_close(grad(lambda r: pfx.remat(square)(r).sum())(rows), first)
    loop = lambda x: pfx.scan(lambda c, _: (f(c), None), x, length=3)[0]
    assert float(grad(loop)(ONE)) == 7.0**3
    torch.testing.assert_close(vmap(grad(loop))(rows), torch.full_like(rows, 7.0**3))
    jitted = pfx.jit(
        lambda r: (grad(lambda r: vmap(square)(r).sum())(r), vmap(grad(loop))(r)),
        mesh=pfx.make_mesh(dp=2),
        in_specs=(P("dp"),),
    )
    found = pfx.device_get(jitted(rows))
    torch.testing.assert_close(found[0], first)
    torch.testing.assert_close(found[1], torch.full_like(rows, 7.0**3))


@pytest.mark.parametrize(("forward", "times"), [("plain", 1.0), ("itself", 7.0)])
def test_outer_derivatives_differentiate_both_rules_as_they_are_written(
    forward: str, times: float
) -> None:
    f = scaled(7.0, forward=forward)
    square = lambda x: f(x) ** 2
    second = 7 * 2 * times
    assert float(grad(grad(square))(ONE)) == second
    assert float(vmap(grad(grad(square)))(ONE[None])) == second
    assert float(grad(lambda x: vmap(grad(square))(x[None]).sum())(ONE)) == second
    assert float(jacrev(jacrev(square))(ONE)) == second
    assert float(pfx.jit(grad(grad(square)), mesh=pfx.make_mesh(dp=2))(ONE).full_tensor()) == second
    # The value that comes with a gradient belongs to the forward rule too.
    both = lambda x: torch.func.grad_and_value(square)(x)[1]
    assert float(grad(both)(ONE)) == 2 * 1.5 * times
    if forward == "plain":
        assert float(jacfwd(jacrev(square))(ONE)) == second
    else:
        with pytest.raises(TypeError, match="has no forward-mode rule"):
            jacfwd(jacrev(square))(ONE)


def test_a_rule_may_call_its_own_function() -> None:
    f, rows = scaled(7.0, forward="itself"), torch.linspace(1, 2, 4, dtype=torch.float64)
    loop = lambda x: pfx.scan(lambda c, _: (f(c) ** 2, None), x, length=2)[0]
    # (7^2 x^4)' = 4 * 49 x^3; once more, with a 7 for each of the calls in the first derivative.
    first, second = 4 * 7**2 * rows**3, None
    torch.testing.assert_close(vmap(grad(loop))(rows), first)
    unrolled = lambda x: f(f(x) ** 2) ** 2
    second = vmap(grad(grad(unrolled)))(rows)
    torch.testing.assert_close(second, 12 * 7**2 * 7 * rows**2 * torch.tensor([5.0]).double())
    for found in (
        vmap(grad(grad(loop)))(rows),
        grad(lambda r: vmap(grad(loop))(r).sum())(rows),
        grad(lambda r: vmap(grad(pfx.remat(unrolled)))(r).sum())(rows),
        pfx.device_get(
            pfx.jit(vmap(grad(grad(loop))), mesh=pfx.make_mesh(dp=2), in_specs=(P("dp"),))(rows)
        ),
    ):
        torch.testing.assert_close(found, second)


def test_a_derivative_by_something_else_leaves_the_rule_to_the_next() -> None:
    f = scaled(7.0)
    # The inner derivative is by y; x comes through it as an argument, or is closed over.
    through = lambda x: grad(lambda y, x: f(x) ** 2 * y)(torch.ones_like(x), x)
    around = lambda x: grad(lambda y: f(x) ** 2 * y)(torch.ones_like(x))
    for inner in (through, around):
        assert float(grad(inner)(ONE)) == 21.0
        assert float(grad(lambda x, inner=inner: vmap(inner)(x[None]).sum())(ONE)) == 21.0
    # Mapped over something that f does not see.
    mapped = lambda x: vmap(lambda s: s * f(x) ** 2)(torch.ones(3, dtype=torch.float64)).sum()
    assert float(grad(mapped)(ONE)) == 63.0


def straight_through() -> Fn:
    f = custom_vjp(torch.round)
    f.defvjp(lambda x: (torch.round(x), None), lambda _, c: (c,))
    return f


def test_a_straight_through_estimator() -> None:
    f, rows = straight_through(), torch.tensor([0.4, 1.6, 2.7, -0.6], dtype=torch.float64)
    loss = lambda x: (f(x) ** 2).sum()
    expected = 2 * torch.round(rows)
    jitted = pfx.jit(grad(loss), mesh=pfx.make_mesh(dp=2), in_specs=(P("dp"),))
    for found in (grad(loss)(rows), vmap(grad(loss))(rows), pfx.device_get(jitted(rows))):
        torch.testing.assert_close(found, expected)
    assert float(grad(lambda x: grad(loss)(x).sum())(rows).abs().max()) == 0.0  # of round
    loop = lambda x: (pfx.scan(lambda c, _: (f(c + 0.3), c), x, length=3)[0] ** 2).sum()
    end = torch.round(torch.round(torch.round(rows + 0.3) + 0.3) + 0.3)
    torch.testing.assert_close(grad(loop)(rows), 2 * end)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def clipped(mode: str, x: Any, limit: torch.Tensor) -> Any:
    return x


def clipped_bwd(mode: str, limit: torch.Tensor, c: Any) -> Any:
    if mode == "value":
        return pfx.tree.map(lambda t: torch.minimum(torch.maximum(t, -limit), limit), c), None
    norm = sum((t**2).sum() for t in pfx.tree.leaves(c)) ** 0.5
    return pfx.tree.map(lambda t: t * limit / norm, c), None


clipped.defvjp(lambda mode, x, limit: (x, limit), clipped_bwd)


@pytest.mark.parametrize("mode", ["value", "norm"])
def test_gradient_clipping_of_a_tree(mode: str) -> None:
    limit = torch.tensor(0.1, dtype=torch.float64)
    weights = {"a": torch.tensor([3.0, -0.01]), "b": [torch.tensor([[-2.0, 0.02]])]}
    weights = pfx.tree.map(torch.Tensor.double, weights)

    def loss(tree: Any, limit: Any) -> Any:
        return sum(
            (w * x).sum()
            for w, x in zip(
                pfx.tree.leaves(weights), pfx.tree.leaves(clipped(mode, tree, limit)), strict=True
            )
        )

    ones = pfx.tree.map(torch.ones_like, weights)
    found = grad(loss)(ones, limit)
    if mode == "value":
        expected = pfx.tree.map(lambda w: w.clamp(-0.1, 0.1), weights)
    else:
        norm = torch.cat([w.flatten() for w in pfx.tree.leaves(weights)]).norm()
        expected = pfx.tree.map(lambda w: w * 0.1 / norm, weights)
    torch.testing.assert_close(found, expected)
    # By example, each with a limit of its own, or all with one.
    many = pfx.tree.map(lambda x: torch.stack([x, x]), ones)
    limits = torch.stack([limit, limit])
    for each in (vmap(grad(loss), (0, None))(many, limit), vmap(grad(loss))(many, limits)):
        torch.testing.assert_close(pfx.tree.map(lambda x: x[1], each), expected)
    assert float(grad(loss, 1)(ones, limit)) == 0.0


def test_arguments_by_name_defaults_integers_and_numbers() -> None:
    @custom_vjp
    def pick(table: torch.Tensor, ids: torch.Tensor, scale: Any = 2.0) -> Any:
        return {"rows": table[ids] * scale, "ids": ids + 1}

    def fwd(table: Any, ids: Any, scale: Any) -> Any:
        return pick(table, ids, scale), (table.shape[0], ids, scale)

    def bwd(kept: Any, c: Any) -> Any:
        size, ids, scale = kept
        assert c["ids"] is None  # nothing comes back for integers
        zeros = torch.zeros(size, *c["rows"].shape[1:], dtype=c["rows"].dtype)
        return zeros.index_add(0, ids, c["rows"] * scale), None, None

    pick.defvjp(fwd, bwd)
    table, ids = draw(5, 3), torch.tensor([0, 2, 2])
    weight = draw(3, 3, seed=3)
    loss = lambda f: (
        lambda t, ids: ((out := f(t, ids=ids))["rows"] * weight).sum() + out["ids"].sum()
    )
    bare = lambda t, ids: {"rows": t[ids] * 2.0, "ids": ids + 1}
    assert_same(grad(loss(pick))(table, ids), grad(loss(bare))(table, ids))
    many = torch.stack([ids, ids + 1])
    assert_same(
        vmap(grad(loss(pick)), (None, 0))(table, many),
        vmap(grad(loss(bare)), (None, 0))(table, many),
    )
    step = pfx.jit(grad(loss(pick)), mesh=pfx.make_mesh(dp=2), in_specs=(P(), P()))
    assert_same(pfx.device_get(step(table, ids)), grad(loss(bare))(table, ids))


def test_no_rule_is_run_when_nobody_differentiates() -> None:
    f = custom_vjp(lambda x: x + 1 if float(x) > 0 else x)  # needs the value: cannot be traced
    f.defvjp(lambda x: 1 / 0, lambda _, c: 1 / 0)
    assert float(f(ONE)) == 2.5
    assert float(f(ONE.clone().requires_grad_().detach())) == 2.5


# Closing over tensors.


def closing(w: torch.Tensor, *, in_rule: str) -> Fn:
    f = custom_vjp(lambda x: x * w if in_rule == "fn" else x * 1)
    f.defvjp(
        lambda x: (x * w if in_rule in ("fn", "fwd") else x * 1, None),
        lambda _, c: (c * w if in_rule in ("fn", "fwd", "bwd") else c,),
    )
    return f


@pytest.mark.parametrize("in_rule", ["fn", "bwd"])
def test_a_constant_may_be_closed_over(in_rule: str) -> None:
    w = torch.tensor([2.0, 3.0], dtype=torch.float64)
    f, rows = closing(w, in_rule=in_rule), draw(4, 2)
    loss = lambda x: f(x).sum()
    assert torch.equal(grad(loss)(w), w)
    assert torch.equal(vmap(grad(loss))(rows), w.expand(4, 2))
    # A loop asks for the cotangents of whatever its body closes over; of a constant there is none.
    loop = lambda x: pfx.scan(lambda c, _: (f(c), None), x, length=3)[0].sum()
    assert torch.equal(grad(loop)(w), w**3)
    assert torch.equal(grad(lambda x: pfx.remat(loss)(x))(w), w)
    step = pfx.jit(grad(loop), mesh=pfx.make_mesh(dp=2), in_specs=(P("dp"),))
    assert torch.equal(pfx.device_get(step(w)), w**3)


@pytest.mark.parametrize("in_rule", ["fn", "bwd"])
def test_what_an_outer_transform_works_on_may_be_closed_over(in_rule: str) -> None:
    x, w = draw(2), draw(2, seed=5)
    inner = lambda w: grad(lambda x: closing(w, in_rule=in_rule)(x).sum())(x)
    # The outer derivative differentiates the rules as they are written; both say w.
    assert torch.equal(jacrev(inner)(w), torch.eye(2, dtype=torch.float64))
    assert torch.equal(jacfwd(inner)(w), torch.eye(2, dtype=torch.float64))
    assert torch.equal(vmap(lambda w: inner(w))(torch.stack([w, 2 * w])), torch.stack([w, 2 * w]))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: grad(lambda w: f(w)(X).sum()),
        lambda f: grad(lambda w: f(w)(w).sum()),
        lambda f: grad(lambda w: vmap(f(w))(ROWS).sum()),
        lambda f: lambda w: vmap(grad(lambda w: f(w)(X).sum()))(torch.stack([w, w])),
        lambda f: grad(lambda w: vmap(lambda v: f(v)(X).sum())(torch.stack([w, w])).sum()),
        lambda f: grad(lambda w: pfx.scan(lambda c, _: (f(w)(c), None), X, length=2)[0].sum()),
        lambda f: grad(lambda w: pfx.remat(lambda x: f(w)(x))(X).sum()),
        lambda f: lambda w: f(v := w.clone().requires_grad_())(v).sum().backward(),
        lambda f: pfx.jit(grad(lambda w: f(w)(X).sum()), mesh=pfx.make_mesh(dp=2)),
    ],
    ids=["w", "w and x", "vmap", "vmap of grad", "mapped w", "scan", "remat", "autograd", "jit"],
)
@pytest.mark.parametrize("in_rule", ["fn", "fwd", "bwd"])
def test_closing_over_what_is_differentiated_is_refused(differentiate: Any, in_rule: str) -> None:
    with pytest.raises(PfxError, match="pass it as an argument"):
        differentiate(lambda w: closing(w, in_rule=in_rule))(B)


def test_a_rule_that_calls_its_function_may_close_over_constants_only() -> None:
    def make(w: torch.Tensor) -> Fn:
        f = custom_vjp(lambda x: x * 1)
        f.defvjp(lambda x: (f(x), None), lambda _, c: (c * w,))
        return lambda x: (f(x) ** 2).sum()

    x, w = draw(2), draw(2, seed=5)
    assert_same(grad(lambda x: grad(make(w))(x).sum())(x), 2 * w * w)
    with pytest.raises(PfxError, match="a rule that calls the function closes over"):
        grad(lambda w: grad(lambda x: grad(make(w))(x).sum())(x).sum())(w)


def test_a_gradient_that_is_stopped_may_be_closed_over() -> None:
    f = lambda w: closing(stop_gradient(w), in_rule="fn")(w).sum()
    assert torch.equal(grad(f)(B), B)


# What a rule must look like.


def with_rule(fwd: Any = None, bwd: Any = None) -> Fn:
    @custom_vjp
    def f(p: Any, n: torch.Tensor) -> Any:
        return {"y": p["a"] * p["b"][0].sum()}

    kept = lambda p, n: ({"y": p["a"] * p["b"][0].sum()}, p)
    f.defvjp(fwd or kept, bwd or (lambda p, c: ({"a": c["y"], "b": [torch.ones(3)]}, None)))
    return f


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            {"fwd": lambda p, n: {"y": p["a"]}},
            "custom_vjp(f): the forward rule must return a pair (out, residuals), got a dict.\n"
            "  fix: return out, residuals (None for none)",
        ),
        (
            {"fwd": lambda p, n: ({"z": p["a"]}, None)},
            "custom_vjp(f): the forward rule returns another tree than the function.\n"
            "  the tree: keys differ; missing [\"['y']\"], extra [\"['z']\"]",
        ),
        (
            {"fwd": lambda p, n: ({"y": p["b"][0]}, None)},
            "custom_vjp(f): the forward rule's out['y'] has another form than the function's.\n"
            "  function: float32 (2,)\n  forward:  float32 (3,)",
        ),
        (
            {"bwd": lambda p, c: p},
            "custom_vjp(f): the backward rule must return a tuple of cotangents, got a dict.\n"
            "  one per argument: (p, n)",
        ),
        (
            {"bwd": lambda p, c: (p,)},
            "custom_vjp(f): the backward rule returns 1 cotangents for 2 arguments.\n"
            "  one per argument: (p, n)\n"
            "  fix: return None for an argument whose cotangent is zero",
        ),
        (
            {"bwd": lambda p, c: ({"a": c["y"]}, None)},
            "custom_vjp(f): p gets a cotangent of another tree from the backward rule.\n"
            "  the tree: keys differ; missing [\"['b']\"], extra []\n"
            "  fix: return a tree like the argument, None where it is zero",
        ),
        (
            {"bwd": lambda p, c: ({"a": c["y"], "b": torch.ones(3)}, None)},
            "custom_vjp(f): p gets a cotangent of another tree from the backward rule.\n"
            "  ['b']: a leaf in the place of a subtree\n"
            "  fix: return a tree like the argument, None where it is zero",
        ),
        (
            {"bwd": lambda p, c: ({"a": c["y"].sum(), "b": None}, None)},
            "custom_vjp(f): p['a'] gets a cotangent of another shape from the backward rule.\n"
            "  argument:  float32 (2,)\n"
            "  cotangent: float32 ()\n"
            "  fix: sum over the dims that were broadcast, or reshape",
        ),
        (
            {"bwd": lambda p, c: ({"a": None, "b": [torch.ones(3).double()]}, None)},
            "custom_vjp(f): p['b'][0] gets a cotangent of another dtype from the backward rule.\n"
            "  argument:  float32 (3,)\n"
            "  cotangent: float64 (3,)\n"
            "  fix: return it as .to(torch.float32)",
        ),
        (
            {"bwd": lambda p, c: (None, torch.ones(2))},
            "custom_vjp(f): n is not differentiable, and the backward rule returns a cotangent for "
            "it.\n"
            "  argument:  int64 (2,)\n"
            "  cotangent: float32 (2,)\n"
            "  fix: return None in its place",
        ),
        (
            {"bwd": lambda p, c: ({"a": 1.0, "b": None}, None)},
            "custom_vjp(f): p['a'] gets a float from the backward rule, not a tensor.\n"
            "  argument:  float32 (2,)\n"
            "  fix: return a tensor, or None for zero",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_refused(rule: Any, text: str) -> None:
    p, n = {"a": torch.ones(2), "b": [torch.ones(3)]}, torch.arange(2)
    loss = lambda p: with_rule(**rule)(p, n)["y"].sum()
    jitted = pfx.jit(grad(loss), mesh=pfx.make_mesh(dp=2))
    for run in (grad(loss), jitted):
        with pytest.raises(PfxError) as error:
            run(p)
        assert str(error.value) == text


def test_none_is_zero_for_an_argument_a_subtree_or_a_leaf() -> None:
    p, n = {"a": torch.ones(2), "b": [torch.ones(3)]}, torch.arange(2)
    for whole, a, b in ((None, 0, 0), ({"a": torch.ones(2), "b": None}, 1, 0),
                        ({"a": None, "b": [torch.ones(3)]}, 0, 1)):  # fmt: skip
        f = with_rule(bwd=lambda p, c, whole=whole: (whole, None))
        found = grad(lambda p, f=f: f(p, n)["y"].sum())(p)
        assert torch.equal(found["a"], a * torch.ones(2))
        assert torch.equal(found["b"][0], b * torch.ones(3))


def test_a_single_cotangent_needs_its_tuple() -> None:
    f = scaled(2.0)
    f.defvjp(lambda x: (x, None), lambda _, c: c)
    with pytest.raises(
        PfxError, match=r"got a tensor.\n  one per argument: \(x,\)\n  fix: return \(c"
    ):
        grad(lambda x: f(x).sum())(X)


def test_inside_jit_it_is_as_pure_as_the_rest() -> None:
    f = custom_vjp(lambda x: x * torch.rand(4))
    f.defvjp(lambda x: (f(x), None), lambda _, c: (c,))
    with pytest.raises(PfxError, match="draws from torch's global random number generator"):
        pfx.jit(lambda x: f(x), mesh=pfx.make_mesh(dp=2))(X)
    g = custom_vjp(lambda x: (x * 1).add_(1))
    g.defvjp(lambda x: (g(x), None), lambda _, c: (3 * c,))
    found = pfx.jit(lambda x: (g(x), grad(lambda x: g(x).sum())(x)), mesh=pfx.make_mesh(dp=2))(X)
    assert torch.equal(found[0].full_tensor(), X + 1)
    assert torch.equal(found[1].full_tensor(), torch.full_like(X, 3))


def test_a_function_without_a_rule_says_how_to_give_one() -> None:
    f = custom_vjp(scan_of)
    with pytest.raises(PfxError, match=r"has no backward rule yet.\n  fix: scan_of.defvjp\(fwd"):
        f(X)


def test_other_misuse() -> None:
    f = scaled(2.0)
    with pytest.raises(PfxError, match=r"x is a str, not a tensor\.\n  fix: name its position in"):
        f("text")
    g = custom_vjp(lambda x: x, nondiff_argnums=(3,))
    g.defvjp(lambda x: (x, None), lambda _, c: (c,))
    with pytest.raises(PfxError, match="names an argument that is not there"):
        g(X)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jvp(f, (X,), (X,)),
        lambda f: jacfwd(f)(X),
        lambda f: jvp(vmap(f), (ROWS,), (ROWS,)),
        lambda f: jvp(lambda x: vmap(f, out_dims=1)(x), (ROWS,), (ROWS,)),
        lambda f: grad(lambda x: jvp(f, (x,), (x,))[1].sum())(X),
        lambda f: pfx.jit(jacfwd(f), mesh=pfx.make_mesh(dp=2))(X),
        lambda f: jacfwd(f)(X.clone().requires_grad_()),
    ],
)
def test_forward_mode_of_the_function_itself_is_refused(transform: Any) -> None:
    with pytest.raises(TypeError, match="custom_vjp has no forward-mode rule"):
        transform(scaled(2.0))
