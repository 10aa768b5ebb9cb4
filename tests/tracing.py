"""Trace a function, make its graph pure, and compare what it computes with eager torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pfx import _torch
from pfx.lax.ops.functionalize import functionalize

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
