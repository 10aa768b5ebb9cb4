"""What may be unreduced: addends through an op are addends of the op of their sum, or an error.

Every entry of the table runs on addends, and with every operand in every state that it may not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pfx
from pfx import P, lax
from pfx.errors import ShardingError
from pfx.lax.manual.linearity import TABLE, is_product
from tests.sim.manual import EACH_WAY, assert_close, draw, mapped
from tests.unit.linear_cases import CASES, OTHERS, Case

MESH = pfx.make_mesh(dp=2)


ALL = {
    f"{name}-{i}-{c.states}": c
    for t in (CASES, OTHERS)
    for name in t
    for i, c in enumerate(t[name])
}
IN_STATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "I": lambda x: x.sum(0),
    "R": lambda x: lax.pcast(x.sum(0), "dp", to="reduced"),
    "V": lambda x: lax.pcast(x[0], "dp", to="varying") * (lax.axis_index("dp") + 1),
    "U": lambda x: lax.pcast((x * _mine()).sum(0), "dp", to="unreduced"),
}


def _mine() -> torch.Tensor:
    """One on the device's own addend, zero on the other."""
    return (torch.arange(2) == lax.axis_index("dp"))[:, None].to(torch.float64)


def total(c: Case, states: str) -> torch.Tensor:
    """The sum over the devices of the op of operands in these states."""
    drawn = [draw(2, *c.shape(i), seed=i) for i in range(len(c.states))]

    def fn(*operands: torch.Tensor) -> torch.Tensor:
        given = [
            IN_STATE[s](x.reshape(2, -1)).reshape(x.shape[1:])
            for s, x in zip(states, operands, strict=True)
        ]
        return lax.psum(c.call(*given), "dp")

    return mapped(fn, MESH, P(), P())(*drawn)


def test_every_entry_of_the_table_has_a_case() -> None:
    assert set(CASES) == set(TABLE)


@pytest.mark.parametrize("name", ALL)
def test_addends_through_an_op_are_addends_of_the_op_of_their_sum(name: str) -> None:
    c = ALL[name]
    expected = c.call(*[draw(2, *c.shape(i), seed=i).sum(0) for i in range(len(c.states))])
    states = c.states.replace("F", "U").replace("N", "I")
    assert_close(total(c, states), expected)
    assert_close(total(c, states.replace("I", "R")), expected)
    if set("FN") & set(c.states) and "U" in c.states:
        assert_close(total(c, c.states.replace("F", "I").replace("N", "U")), expected)


WRONG = [
    (name, states)
    for name, c in ALL.items()
    for i, now in enumerate(c.states)
    for other in {"U": "IRV", "I": "UV", "F": "V", "N": ""}[now]
    if "U"
    in (states := (c.states[:i] + other + c.states[i + 1 :]).replace("F", "U").replace("N", "I"))
]


@pytest.mark.parametrize(("name", "states"), WRONG)
def test_an_operand_in_another_state_is_an_error(name: str, states: str) -> None:
    with pytest.raises(ShardingError, match="'dp'") as found:
        total(ALL[name], states)
    op, at, line = str(found.value).split()[:3]
    assert hasattr(torch.ops.aten, op)
    assert (at, line[:5]) == ("at", "unit/")


def summed(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum over the devices of what they make of their addends."""
    own = lambda x: lax.psum(call(lax.pcast(x * 1, "dp", to="unreduced")), "dp")
    return mapped(own, MESH, P("dp"), P())


FIVE = torch.tensor([5.0])
AT = torch.tensor([0])
REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_": lambda u: u.exp_(),
    "mul_ by itself": lambda u: u.mul_(u),
    "fill_": lambda u: u.fill_(5.0),
    "clamp_": lambda u: u.clamp_(max=1.0),
    "bernoulli_": lambda u: u.bernoulli_(1.0),
    "relu_": lambda u: torch.relu_(-u),
    "exp out": lambda u: torch.exp(u, out=u),
    "foreach exp_": lambda u: (torch._foreach_exp_([u]), u)[1],
    "foreach add_ a number": lambda u: (torch._foreach_add_([u], 5.0), u)[1],
    "where of a number": lambda u: torch.where(u.new_zeros(1).bool(), u, 5.0),
    "where of a tensor": lambda u: torch.where(torch.tensor([True]), u, FIVE),
    "where on addends": lambda u: torch.where(u != 0, FIVE, FIVE),
    "masked_fill of a number": lambda u: u.masked_fill(torch.tensor([True]), 5.0),
    "masked_fill of a tensor": lambda u: u.masked_fill(torch.tensor([True]), FIVE[0]),
    "index_put": lambda u: u.index_put((AT,), FIVE),
    "index_add": lambda u: u.index_add(0, AT, FIVE),
    "scatter_add": lambda u: u.scatter_add(0, AT, FIVE),
    "scatter of a number": lambda u: u.scatter(0, AT, 5.0),
    "scatter_reduce amax": lambda u: u.scatter_reduce(0, AT, u, "amax"),
    "pad with a number": lambda u: torch.nn.functional.pad(u, (1, 0), value=5.0),
    "add a number": lambda u: u + 5,
    "a number minus": lambda u: 5 - u,
    "a number over": lambda u: 5 / u,
    "ones_like": lambda u: torch.ones_like(u),
    "full_like": lambda u: torch.full_like(u, 5.0),
    "index by addends": lambda u: (torch.arange(10.0) ** 2)[(u * 0).long()],
    "to integers": lambda u: (u * 0.5).to(torch.int32),
    "to truth values": lambda u: u.to(torch.bool),
    "copy into integers": lambda u: torch.zeros_like(u, dtype=torch.int64).copy_(u),
    "sum as integers": lambda u: u.sum(dtype=torch.int64),
    "bits": lambda u: u.view(torch.int32),
    "bits of another float": lambda u: u.view(torch.float16),
    "floor of a quotient": lambda u: torch.div(u, 2.0, rounding_mode="floor"),
    "bias of a convolution": lambda u: torch.conv1d(u[None, None], FIVE[None, None], FIVE),
    "bias of a layer": lambda u: torch.nn.functional.linear(u, FIVE[None], FIVE),
    "copy of a number": lambda u: u.copy_(FIVE),
}


@EACH_WAY
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_number_is_refused(name: str, run: Any) -> None:
    with pytest.raises(ShardingError, match="unreduced over 'dp'"):
        run(summed(REFUSED[name]), MESH, torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("read", [torch.Tensor.item, lambda u: torch.equal(u, u)])
def test_python_may_not_read_an_addend(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ShardingError, match="unreduced over 'dp'"):
        summed(lambda u: u * read(u))(torch.tensor([1.0, 3.0]))


ALLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "where of zero": lambda u: torch.where(torch.tensor([True]), u, 0.0),
    "where of zeros": lambda u: torch.where(torch.tensor([True]), torch.zeros(1), u),
    "masked_fill of zero": lambda u: u.masked_fill(torch.tensor([True]), 0.0),
    "mul_": lambda u: u.mul_(3.0),
    "mul_ in place of a part": lambda u: u[:1].mul_(3.0),
    "zero_": lambda u: u.zero_(),
    "add_": lambda u: u.add_(u, alpha=2),
    "div of ints": lambda u: u.to(torch.float64) / 4,
    "pad": lambda u: torch.nn.functional.pad(u, (1, 0)),
    "form": lambda u: u * u.numel() * u.shape[0],
}


@EACH_WAY
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_linear_after_all(name: str, run: Any) -> None:
    x = torch.tensor([1.0, 3.0])
    assert_close(run(summed(ALLOWED[name]), MESH, x), ALLOWED[name](x.sum().reshape(1)))


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": lambda u, w: u * w,
    "rmul": lambda u, w: w * u,
    "mul_": lambda u, w: (u * 1).mul_(w),
    "twice": lambda u, w: u * w + u * w * w,
    "div": lambda u, w: u / w,
    "matmul": lambda u, w: u[None] @ w[:, None],
    "einsum": lambda u, w: torch.einsum("i,i->i", u, w),
    "linear": lambda u, w: torch.nn.functional.linear(u, w[None]),
    "outer": lambda u, w: torch.outer(w, u),
    "dot": lambda u, w: u.dot(w),
    "conv": lambda u, w: torch.conv1d(u[None, None], w[None, None]),
    "addcdiv": lambda u, w: torch.addcdiv(u, u, w),
}


class TestProducts:
    """The gradient of what multiplies addends is a sum over the devices: the factor is reduced."""

    X, W = torch.tensor([1.0, 2.0]), torch.tensor([3.0])

    @EACH_WAY
    @pytest.mark.parametrize("name", PRODUCTS)
    def test_gradient_of_the_factor(self, name: str, run: Any) -> None:
        form = PRODUCTS[name]
        inner = lambda x, w: lax.psum(form(lax.pcast(x, "dp", to="unreduced"), w), "dp")
        region = mapped(inner, MESH, (P("dp"), P()), P())
        found = run(pfx.grad(lambda w, x: region(x, w).sum()), MESH, self.W, self.X)
        expected = pfx.grad(lambda w: form(self.X.sum().reshape(1), w).sum())(self.W)
        assert_close(found, expected)

    def test_every_form_is_known(self) -> None:
        tensor, functional = torch.Tensor, torch.nn.functional
        products = [torch.mul, tensor.__mul__, tensor.__rmul__, tensor.mul_, tensor.__imul__]
        products += [torch.matmul, tensor.__matmul__, tensor.__rmatmul__, torch.mm, torch.bmm]
        products += [torch.mv, torch.dot, torch.einsum, torch.outer, torch.linalg.vecdot]
        products += [functional.linear, functional.conv2d, functional.conv_transpose1d]
        products += [torch.div, tensor.__truediv__, tensor.__itruediv__, torch.addmm, torch.lerp]
        assert all(map(is_product, products))
        others = [torch.add, tensor.__add__, torch.where, torch.cat, torch.exp, tensor.sum]
        assert not any(map(is_product, others))


F = torch.nn.functional
SMOOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "clamp": lambda r: r.clamp(-0.5, 0.5),
    "softmax": lambda r: r.softmax(0),
    "log_softmax": lambda r: r.log_softmax(0),
    "amax": lambda r: r.amax(0),
    "max": lambda r: r.max(0)[0],
    "maximum": lambda r: torch.maximum(r, -r),
    "abs": torch.abs,
    "gelu": F.gelu,
    "layer_norm": lambda r: F.layer_norm(r, (2,)),
    "norm": lambda r: r / r.norm(),
    "logsumexp": lambda r: r.logsumexp(0),
    "sort": lambda r: r.sort()[0],
    "cumprod": lambda r: r.cumprod(0),
    "std": lambda r: r.std(),
    "pow": lambda r: r**3,
    "div": lambda r: 1 / r,
    "where": lambda r: torch.where(r > 0, r, r * 2),
    "embedding": lambda r: F.embedding(torch.tensor([0, 1]), r[:, None])[:, 0],
    "matmul": lambda r: r[None] @ torch.ones(2, 2, dtype=r.dtype),
    "outer": lambda r: torch.outer(r, r).sum(0),
    "prod": lambda r: r.prod(),
    "remat": lambda r: pfx.remat(lambda r: r.sin())(r),
    "scan": lambda r: pfx.scan(lambda c, _: (c * r, c), r, None, length=2)[0],
    "dot": lambda r: r @ r,
    "index": lambda r: r[torch.tensor([1, 0])],
    "lerp": lambda r: r.lerp(r * 2, 0.5),
    "mse": lambda r: F.mse_loss(r, r * 0, reduction="none"),
    "var": lambda r: r.var(),
    "cat": lambda r: torch.cat([r, r])[1:3],
    "gather": lambda r: r.gather(0, torch.tensor([1, 1])),
    "silu": F.silu,
    "rms_norm": lambda r: F.rms_norm(r, (2,)),
    "cross_entropy": lambda r: F.cross_entropy(r[None], torch.tensor([1])),
    "hypot": lambda r: torch.hypot(r, r),
    "atan2": lambda r: torch.atan2(r, r + 1),
    "cumsum": lambda r: r.cumsum(0),
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "huber": lambda r: F.huber_loss(r, r * 2),
    "addcmul": lambda r: torch.addcmul(r, r, r),
    "nan_to_num": lambda r: r.nan_to_num(),
    "addmm": lambda r: torch.addmm(r, r[None], torch.ones(2, 2, dtype=r.dtype))[0],
    "linear": lambda r: F.linear(torch.ones(1, 2, dtype=r.dtype), r[None], r[:1])[0].expand(2),
}


@pfx.custom_vjp
def _both(r: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return r * r, r * x


_both.defvjp(
    lambda r, x: (_both(r, x), (r, x)),
    lambda saved, cts: (
        cts[0] * 2 * saved[0] + lax.pcast(cts[1] * saved[1], "dp", to="unreduced"),
        cts[1] * lax.pcast(saved[0], "dp", to="varying"),
    ),
)


# Functions of a reduced and a varying value with a reduced result that nobody uses.
UNUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "remat": lambda r, x: pfx.remat(lambda r, x: (r * r, r * x))(r, x)[1],
    "remat of the sum": lambda r, x: pfx.remat(lambda r, x: (r + r, r * x))(r, x)[1],
    "scan ys": lambda r, x: pfx.scan(lambda c, _: (c * 1.0, r * r), r * x, None, length=2)[0],
    "scan carry": lambda r, x: pfx.scan(lambda c, _: (c * r, c[:1] * 0 + r * x), r, None, length=1)[
        1
    ],
    "custom_vjp": lambda r, x: _both(r, x)[1],
}


class TestReduced:
    """The cotangent of a reduced value is addends, and stays so through every backward formula."""

    W = draw(2)
    X = draw(4, seed=1)

    def gradient(self, g: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
        """The gradient by a reduced value, added up, against the one by the value itself."""

        def inner(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            r = lax.pcast(w, "dp", to="reduced")
            return lax.psum(pfx.grad(lambda r: g(r, x).sum())(r), "dp")

        return mapped(inner, MESH, (P(), P("dp")), P())

    def expected(self, g: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = self.X.chunk(2)
        return sum(pfx.grad(lambda w, x=x: g(w, x).sum())(self.W) for x in parts)  # type: ignore[return-value]

    @EACH_WAY
    @pytest.mark.parametrize("name", SMOOTH)
    def test_through_one_op(self, name: str, run: Any) -> None:
        g = lambda r, x: SMOOTH[name](r) * x
        assert_close(run(self.gradient(g), MESH, self.W, self.X), self.expected(g))

    @EACH_WAY
    @pytest.mark.parametrize("name", UNUSED)
    def test_a_result_that_nobody_uses(self, name: str, run: Any) -> None:
        g = UNUSED[name]
        expected = pfx.grad(lambda r, x: (r * x).sum())
        total = sum(expected(self.W, x) for x in self.X.chunk(2))
        assert_close(run(self.gradient(g), MESH, self.W, self.X), total)
