"""In-place torch ops inside a traced function: the graph without them computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject

import pfx
from pfx import P, _torch
from pfx.errors import TraceError
from pfx.lax.body import trace_body
from pfx.lax.functionalize import functionalize

Function = Callable[..., Sequence[torch.Tensor]]


def pure_module(fn: Function, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The traced function without in-place ops."""
    traced = _torch.trace(fn, inputs)
    module = functionalize(traced, "f")
    module.graph.lint()
    assert not any(is_mutable(node) for node in module.graph.nodes)
    return module


def is_mutable(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def assert_same(fn: Function, *inputs: torch.Tensor) -> None:
    """Tracing, rewriting and running equals running, and leaves the inputs alone.

    A sum may run in another order, since a computed value need not have the strides of a changed one.
    """
    traced = _torch.trace(fn, inputs)
    module = pure_module(fn, *inputs)
    expected = fn(*[x.clone() for x in inputs])
    copies = [x.clone() for x in inputs]
    found = module(*copies, *traced.captured)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    for copy, x in zip(copies, inputs, strict=True):
        assert torch.equal(copy, x)


def seeded(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    # Multiples of 1/8: most sums are exact, so that comparisons with 0 never flip.
    return torch.randint(-16, 16, shape, generator=generator).double() / 8


# ------------------------------------------------------------------ random programs


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


def changes_of(x: torch.Tensor, y: torch.Tensor, step: Step, *, plain: bool) -> list[Callable[[], object]]:
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


def run_program(steps: Sequence[Step], x: torch.Tensor, *, plain: bool = True) -> list[torch.Tensor]:
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
