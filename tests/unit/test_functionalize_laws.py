"""In-place ops made pure: random programs of views and changes, and every in-place op of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from pfx import _torch
from pfx.errors import TraceError
from pfx.lax.body import trace_body
from pfx.lax.ops.functionalize import functionalize
from tests.tracing import Function, assert_same, pure_module, seeded


@dataclass(frozen=True)
class Step:
    """One line of a random program; which op and which operands is read off the numbers."""

    kind: str
    which: int
    other: int
    a: int
    b: int


def views_of(x: torch.Tensor, step: Step) -> list[Callable[[], torch.Tensor]]:
    """Every view that can be taken of a tensor of this form."""
    n = x.ndim
    found: list[Callable[[], torch.Tensor]] = [
        lambda: x.unsqueeze(step.a % (n + 1)),
        lambda: x.squeeze(),
        lambda: x.detach().expand(2, *x.shape)[step.b % 2 : step.b % 2 + 1],
        lambda: x.view_as(x),
    ]
    if x.is_contiguous():
        found += [lambda: x.view(-1), lambda: x.reshape(1, x.numel())]
    if n:
        dim = step.a % n
        size = x.shape[dim]
        found += [
            lambda: x.select(dim, step.b % size),
            lambda: x.select(dim, -1),
            lambda: x.narrow(dim, step.b % size, size - step.b % size),
            lambda: x.unbind(dim)[step.b % size],
            lambda: x.permute([(i + step.b) % n for i in range(n)]),
            lambda: x[(slice(None),) * dim + (slice(step.b % size, None, 2),)],
            lambda: x.split(2, dim)[-1],
            lambda: x.split([1, size - 1], dim)[1 if size > 1 else 0],
            lambda: x.squeeze(dim),
            lambda: x.unflatten(dim, (1, size)),
        ]
    if n >= 2:
        found += [
            lambda: x.mT,
            lambda: x.transpose(0, step.b % n),
            lambda: x.diagonal(step.b % 2, step.a % n, (step.a + 1) % n),
        ]
    return found


def changes_of(
    x: torch.Tensor, y: torch.Tensor, step: Step, *, plain: bool
) -> list[Callable[[], object]]:
    """Every change in place of `x` that may read `y`."""
    total, extra = y.sum(), x.clone()
    found: list[Callable[[], object]] = [
        lambda: x.add_(step.b),
        lambda: x.mul_(total * 0.25),
        lambda: x.sub_(x.clone(), alpha=0.5),
        lambda: x.fill_(step.b),
        lambda: x.fill_(total),
        lambda: x.zero_(),
        lambda: x.copy_(total.float()),
        lambda: x.masked_fill_(x > 0, -1.5),
        lambda: x.clamp_(min=-1).neg_(),
        lambda: x.gt_(0),
        lambda: torch.abs(x.clone(), out=x),
        lambda: F.relu(x, inplace=True),
        lambda: x.lerp_(total.expand(x.shape), 0.5),
    ]
    if x.ndim:
        dim, size = step.a % x.ndim, x.shape[step.a % x.ndim]
        index = torch.arange(size) // 2
        found += [
            lambda: x.index_fill_(dim, index, 2.0),
            lambda: x.index_add_(dim, index, x.clone()),
            lambda: x.cumsum_(dim),
            lambda: x.__setitem__(step.b % x.shape[0], total),
            lambda: x.__setitem__(x > 1, 0.5),
            lambda: x.__setitem__(torch.tensor([0]), -total),
        ]
    if plain:  # under torch.func.grad, torch forgets a foreach change of a view
        found += [
            lambda: torch._foreach_mul_([x], 1.5),
            lambda: torch._foreach_add_([x, extra], [x.clone(), x.clone()]),
        ]
    if x.ndim == 2:
        found += [
            lambda: x.fill_diagonal_(step.b),
            lambda: x.tril_(),
            lambda: x.t_().t_(),
            lambda: x.addmm_(x.clone(), torch.eye(x.shape[1], dtype=x.dtype)),
        ]
    return found


def run_program(
    steps: Sequence[Step], x: torch.Tensor, *, plain: bool = True
) -> list[torch.Tensor]:
    tensors = [x.clone(), x.mT.clone() * 2]
    repeated: set[int] = set()  # ids of expanded tensors and their views: torch refuses a change
    for step in steps:
        one = tensors[step.which % len(tensors)]
        other = tensors[step.other % len(tensors)]
        if step.kind == "view":
            choices = views_of(one, step)
            view = choices[(step.a + step.b) % len(choices)]()
            tensors.append(view)
            if id(one) in repeated or 0 in view.stride():
                repeated.add(id(view))
        elif step.kind == "new":
            tensors.append(one.clone() + other.sum())
        elif one.numel() and id(one) not in repeated:
            choices = changes_of(one, other, step, plain=plain)
            choices[(step.a + step.b) % len(choices)]()
    return tensors


def loss_of(steps: Sequence[Step]) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(t * t).sum() for t in run_program(steps, x, plain=False)]).sum()

    return loss


steps = st.builds(
    Step,
    st.sampled_from(["view", "view", "change", "change", "new"]),
    *[st.integers(0, 40)] * 4,
)
programs = st.lists(steps, min_size=2, max_size=9)


@given(programs)
def test_random_programs_equal_eager(program: list[Step]):
    assert_same(lambda x: run_program(program, x), seeded(3, 4))


def eager_or_reject(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Autograd refuses some changes itself: through one of several views, or by ``out=``."""
    try:
        return fn(x.clone())
    except RuntimeError:
        reject()


@given(programs)
def test_gradients_of_random_programs_equal_eager(program: list[Step]):
    x, gradient = seeded(3, 4), torch.func.grad(loss_of(program))
    expected = eager_or_reject(gradient, x)
    traced = _torch.trace(lambda v: [gradient(v)], [x])
    (found,) = functionalize(traced, "f")(x, *traced.captured)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@given(programs)
def test_rewritten_programs_differentiate_like_eager(program: list[Step]):
    """What scan and remat do: the body is rewritten first and differentiated then."""
    x, loss = seeded(3, 4), loss_of(program)
    expected = eager_or_reject(torch.func.grad(loss), x)
    body, captured = trace_body(lambda v: [loss(v)], [x])
    found = torch.func.grad(lambda v: body(v, *captured)[0])(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# What torch itself knows to work in place: the op, applied to one of two rows.
IN_PLACE = [op for op in op_db if op.get_inplace() is not None and torch.float64 in op.dtypes]
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu",
}  # fmt: skip
UNSUPPORTED = {"as_strided", "polygamma", "resize_", "resize_as_"}


def op_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def on_a_row(op: OpInfo, sample: SampleInput) -> tuple[Function, list[torch.Tensor]]:
    """The op in place on a row of a matrix, and the tensors among its arguments."""
    leaves = [sample.input, *sample.args]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        first, *rest = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
        rows = torch.stack([first, first])
        row = rows[1]
        op.get_inplace()(row, *rest, **sample.kwargs)
        return [rows, row]

    return run, [x for x in leaves if isinstance(x, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize(
    "op", [op for op in IN_PLACE if op.name not in RANDOM | UNSUPPORTED], ids=op_name
)
def test_every_in_place_op_of_torch(op: OpInfo):
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 2):
        run, tensors = on_a_row(op, sample)
        result = op(sample.input, *sample.args, **sample.kwargs)
        if result.shape == sample.input.shape and torch.can_cast(result.dtype, torch.float64):
            assert_same(run, *tensors)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_has_no_pure_form_is_refused(name: str):
    op = next(op for op in IN_PLACE if op.name == name)
    run, tensors = on_a_row(op, next(iter(op.sample_inputs("cpu", torch.float64))))
    with pytest.raises(TraceError, match=r"in place|writes into its operands"):
        pure_module(run, *tensors)
