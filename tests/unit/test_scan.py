"""`scan` and `remat` against the Python loop and the plain function they stand for.

Law: under any nesting of grad, vmap and scan, what the loop returns and its derivatives equal those
of the loop written out, to rounding; with rematerialization they are the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

import pfx
from pfx.errors import TraceError

N, WIDTH, ROWS = 5, 4, 3
Fn = Callable[..., torch.Tensor]


def unrolled(
    body: Any,
    carry: Any,
    xs: Any = None,
    *,
    reverse: bool = False,
    remat: Any = None,
    length: Any = None,
) -> tuple[Any, Any]:
    """What `pfx.scan` means."""
    n = pfx.tree.leaves(xs)[0].shape[0] if pfx.tree.leaves(xs) else length
    ys: list[Any] = [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = body(carry, pfx.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, pfx.tree.map(lambda *rows: torch.stack(rows), ys[0], *ys[1:])


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (rows, width), one weight an iteration, one bias for all; float64."""
    torch.manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64) / 2
    return draw(ROWS, WIDTH), draw(N, WIDTH, WIDTH), draw(WIDTH)


# One loss per way of writing a loop; each takes the scan to use and how to rematerialize.


def plain(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    def body(c: Any, w: Any) -> Any:
        c = torch.tanh(c @ w + b)  # closes over b
        return c, c.sum()

    x, ys = scan(body, x, w, remat=remat)
    return (x**2).sum() + (ys**3).sum()


def reversed_(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    def body(c: Any, item: Any) -> Any:
        w, scale = item
        c = torch.sin(c @ w) * scale + b
        return c, {"mean": c.mean(), "row": c[0]}

    x, ys = scan(body, x, (w, torch.arange(1.0, N + 1, dtype=w.dtype)), reverse=True, remat=remat)
    return (x**2).sum() + (ys["mean"] * ys["row"].sum(1)).sum()


def nested(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    def outer(c: Any, _: Any) -> Any:
        def inner(d: Any, w: Any) -> Any:
            return torch.tanh(d @ w + b * c.sum()), None  # closes over both levels

        d, _ = scan(inner, c, w, remat=remat)
        return d * 2, d.sum()

    x, y = scan(outer, x, None, length=3, remat=remat)
    return (x * y[-1]).sum() + y.prod()


def integers(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    def body(carry: Any, item: Any) -> Any:
        count, c = carry
        index, w, nothing = item
        assert nothing is None
        c = c @ w + torch.where(index % 2 == 0, b, 0.0) * count
        return (count + 1, c), (index * 2, c.sum(), None, count > 2)

    start = (torch.tensor(0), x)
    (count, x), (twice, sums, nothing, late) = scan(
        body, start, (torch.arange(N), w, None), remat=remat
    )
    assert nothing is None
    return x.sum() * count + (twice * sums).sum() + (late * sums).prod()


def gradients_inside(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    """The body takes gradients with respect to what it closes over: microbatching's form."""

    def add(total: Any, row: Any) -> Any:
        loss = lambda w, b: plain(scan, remat, row[None], w, b)
        return pfx.tree.map(torch.add, total, grad(loss, argnums=(0, 1))(w, b)), None

    start = (torch.zeros_like(w), torch.zeros_like(b))
    (dw, db), _ = scan(add, start, x)
    return (dw.sin() * w).sum() + (db**2).sum()


def unused(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    """A carry that never changes, one that nothing reads, and a y that is an input."""

    def body(carry: Any, w: Any) -> Any:
        fixed, lost, c = carry
        return (fixed, lost + c.sum(), torch.cos(c @ w + fixed)), (w, c)

    (_, _, x), (same, _) = scan(body, (b, b.sum(), x), w, remat=remat)
    return x.sum() + (same**2).sum()


def constant(scan: Any, remat: Any, x: Any, w: Any, b: Any) -> torch.Tensor:
    """The carry is overwritten: its cotangent is zero, not missing."""
    x, ys = scan(lambda c, w: (w @ b, (c * c).sum()), b, w, remat=remat)
    return x.sum() * ys.sum()


FORMS: dict[str, Fn] = {
    f.__name__: f for f in (plain, reversed_, nested, integers, gradients_inside, unused, constant)
}
REMAT = (None, "full")
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_remat = pytest.mark.parametrize("remat", REMAT)


def both(form: Fn, remat: Any) -> tuple[Fn, Fn]:
    """The form with `pfx.scan`, and written out."""
    return (
        lambda *args: form(pfx.scan, remat, *args),
        lambda *args: form(unrolled, None, *args),
    )


def assert_same(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    for got, want in zip(pfx.tree.leaves(found), pfx.tree.leaves(expected), strict=True):
        assert want.abs().max() > 0, "the test would not see a missing gradient"
        torch.testing.assert_close(got, want, rtol=0, atol=rtol * float(want.abs().max()))


@every_remat
@every_form
def test_values_and_gradients(form: Fn, remat: Any) -> None:
    found, expected = both(form, remat)
    args = inputs()
    assert_same(found(*args), expected(*args))
    argnums = (1, 2) if form is constant else (0, 1, 2)
    assert_same(grad(found, argnums)(*args), grad(expected, argnums)(*args))


@every_remat
@every_form
def test_gradient_of_the_gradient(form: Fn, remat: Any) -> None:
    argnums = (1, 2) if form is constant else (0, 1, 2)

    def second(f: Fn) -> Any:
        loss = lambda *args: sum(g.sin().sum() for g in grad(f, argnums)(*args))
        return grad(loss, argnums)(*inputs())

    found, expected = both(form, remat)
    assert_same(second(found), second(expected))


@every_remat
@pytest.mark.parametrize("form", [plain, reversed_, nested, unused], ids=lambda f: f.__name__)
def test_batched(form: Fn, remat: Any) -> None:
    """vmap of grad: a gradient for each sample; grad of vmap: the gradient of their sum."""
    found, expected = both(form, remat)
    x, w, b = inputs()
    xs = torch.stack([x, x.flip(0), x * 2])
    per_sample = lambda f: vmap(grad(f, (0, 1, 2)), (0, None, None))(xs, w, b)
    summed = lambda f: grad(lambda *a: vmap(f, (0, None, None))(*a).sum(), (0, 1, 2))(xs, w, b)
    assert_same(per_sample(found), per_sample(expected))
    assert_same(summed(found), summed(expected))
    ws = torch.stack([w, w * 0.5])
    per_weight = lambda f: vmap(grad(f, (0, 1, 2)), (None, 0, None))(x, ws, b)
    assert_same(per_weight(found), per_weight(expected))


@every_remat
def test_second_order_by_finite_differences(remat: Any) -> None:
    found, _ = both(plain, remat)
    x, w, b = inputs()
    slope = grad(lambda b: found(x, w, b))
    h, matrix = 1e-6, jacrev(slope)(b)
    for i, unit in enumerate(torch.eye(WIDTH, dtype=b.dtype)):
        central = (slope(b + h * unit) - slope(b - h * unit)) / (2 * h)
        torch.testing.assert_close(matrix[:, i], central, rtol=1e-6, atol=1e-7)


def test_third_order() -> None:
    found, expected = both(plain, None)
    x, w, b = inputs()
    third = lambda f: grad(
        lambda b: grad(lambda b: grad(lambda b: f(x, w, b))(b).sin().sum())(b)[0]
    )(b)
    assert_same(third(found), third(expected))


@pytest.mark.parametrize(
    "form", [f for f in FORMS.values() if f is not gradients_inside], ids=lambda f: f.__name__
)
def test_remat_changes_no_bit(form: Fn) -> None:
    """Of first derivatives: a second one adds up the same terms in another order."""
    saved, again = both(form, None)[0], both(form, "full")[0]
    argnums = (1, 2) if form is constant else (0, 1, 2)
    for a, b in zip(grad(saved, argnums)(*inputs()), grad(again, argnums)(*inputs()), strict=True):
        assert torch.equal(a, b)


def test_plain_autograd_reaches_everything_a_body_closes_over() -> None:
    x, w, b = (t.requires_grad_() for t in inputs())
    found, expected = both(plain, None)
    assert_same(
        torch.autograd.grad(found(x, w, b), (x, w, b)),
        torch.autograd.grad(expected(x, w, b), (x, w, b)),
    )


# Compiled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["rows", "width", "steps"])
@every_form
def test_compiled_on_a_mesh(form: Fn, axis: str) -> None:
    """The same with the rows, a dim of the weights, or the scanned dim itself split."""
    specs = {
        "rows": (pfx.P("d"), pfx.P(), pfx.P()),
        "width": (pfx.P(), pfx.P(None, None, "d"), pfx.P("d")),
        "steps": (pfx.P(), pfx.P("d"), pfx.P()),
    }[axis]
    sizes = {"rows": ROWS, "width": WIDTH, "steps": N}
    found, expected = both(form, None)
    argnums = (1, 2) if form is constant else (0, 1, 2)
    step = pfx.jit(
        grad(found, argnums), mesh=pfx.make_mesh(d=sizes[axis]), in_specs=specs, check=True
    )
    assert_same(pfx.device_get(step(*inputs())), grad(expected, argnums)(*inputs()))


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_loop_stays_one_node_whatever_its_length(length: int) -> None:
    def loss(x: Any, w: Any) -> Any:
        return (pfx.scan(lambda c, w: (torch.tanh(c @ w), None), x, w)[0] ** 2).sum()

    x, w = torch.ones(2, 4), torch.ones(length, 4, 4)
    program = pfx.jit(grad(loss, (0, 1)), mesh=pfx.make_mesh(d=1)).lower(x, w)
    loops = [instr for instr in program.instrs if type(instr).__name__ == "LoopInstr"]
    assert [(loop.length, loop.reverse) for loop in loops] == [(length, False), (length, True)]
    assert len(program.instrs) < 15


def test_remat_saves_less() -> None:
    """Only the carries remain between the two loops."""

    def loss(remat: Any) -> Fn:
        def body(c: Any, w: Any) -> Any:
            for _ in range(6):
                c = torch.tanh(torch.sin(c) @ w)
            return c, None

        return lambda x, w: pfx.scan(body, x, w, remat=remat)[0].sum()

    x, w = torch.ones(64, 8), torch.ones(20, 8, 8)
    peaks = {
        remat: pfx.jit(grad(loss(remat), (0, 1)), mesh=pfx.make_mesh(d=1)).lower(x, w).memory().peak
        for remat in REMAT
    }
    carries = 20 * x.nbytes
    assert peaks["full"] < 2 * (carries + w.nbytes)
    assert peaks[None] > 6 * carries


# Errors -------------------------------------------------------------------------------------------


def one(carry: Any) -> Any:
    return pfx.scan(lambda c, x: (carry, None), {"h": torch.ones(2)}, torch.ones(3))


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lengths differ": (
        lambda: pfx.scan(lambda c, x: (c, None), torch.ones(1), (torch.ones(2), torch.ones(3))),
        TraceError,
        """
scan: xs and length must agree on one length, got [2, 3].
  fix: pass length=n when xs has no leaf""",
    ),
    "no length": (
        lambda: pfx.scan(lambda c, x: (c, None), torch.ones(1)),
        TraceError,
        """
scan: xs and length must agree on one length, got [].
  fix: pass length=n when xs has no leaf""",
    ),
    "a scalar in xs": (
        lambda: pfx.scan(lambda c, x: (c, None), torch.ones(1), torch.tensor(1.0)),
        TraceError,
        """
scan: every leaf of xs needs a leading dim to loop over.""",
    ),
    "length 0": (
        lambda: pfx.scan(lambda c, x: (c, None), torch.ones(1), torch.ones(0, 2)),
        TraceError,
        """
scan: a scan of length 0 has no iteration to trace.""",
    ),
    "no pair": (
        lambda: pfx.scan(lambda c, x: c + x, torch.ones(1), torch.ones(3, 1)),
        TraceError,
        """
scan: body must return (carry, y), got a tensor.
  fix: return carry, None""",
    ),
    "shape": (
        lambda: one({"h": torch.ones(3)}),
        TraceError,
        """
scan: carry['h'] changes its form from one iteration to the next.
  in:  torch.float32 (2,)
  out: torch.float32 (3,)
  fix: cast or reshape it in the body so that both agree""",
    ),
    "dtype": (
        lambda: one({"h": torch.ones(2, dtype=torch.float64)}),
        TraceError,
        """
scan: carry['h'] changes its form from one iteration to the next.
  in:  torch.float32 (2,)
  out: torch.float64 (2,)
  fix: cast or reshape it in the body so that both agree""",
    ),
    "no tensor": (lambda: one({"h": 1.0}), TraceError, "\nscan: carry['h'] is not a tensor."),
    "unknown remat": (
        lambda: pfx.scan(lambda c, x: (c, None), torch.ones(1), torch.ones(3), remat="some"),
        ValueError,
        """
scan: remat='some' is unknown.
  fix: use "full", "none" or None""",
    ),
    "unknown policy": (
        lambda: pfx.remat(torch.sin, policy="some"),
        ValueError,
        """
remat: policy='some' is unknown.
  fix: use "full\"""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_texts(name: str) -> None:
    call, kind, text = ERRORS[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text.removeprefix("\n")


def test_a_carry_of_another_structure_is_named() -> None:
    with pytest.raises(TraceError, match=r"^scan: the carry changes its structure\."):
        one({"h": torch.ones(2), "new": torch.ones(1)})


def test_ys_keep_the_order_of_xs() -> None:
    for reverse, remat in itertools.product((False, True), REMAT):
        _, ys = pfx.scan(
            lambda c, x: (c + 1, (c, x)),
            torch.tensor(0),
            torch.arange(3),
            reverse=reverse,
            remat=remat,
        )
        assert ys[0].tolist() == ([2, 1, 0] if reverse else [0, 1, 2]) and ys[1].tolist() == [
            0,
            1,
            2,
        ]
